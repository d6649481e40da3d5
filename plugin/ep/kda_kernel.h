// The kernel of deltafuse::KimiDeltaAttention in ORT's terms, and the question whether it takes a node.
#pragma once

#include <string>

#include "device.h"
#include "ort.h"

namespace deltafuse::ep {

// "" when the kernel will run this node on this device, else the reason why not.
OrtStatus* KdaRefusal(const Api& api, const Device& device, const OrtNode* node, std::string* reason);

OrtStatus* CreateKdaKernel(const Api& api, const Device& device, const OrtKernelInfo* info, OrtKernelImpl** kernel);

}  // namespace deltafuse::ep
