// The kernel of deltafuse::GroupedQMoE in ORT's terms, and the question whether it takes a node.
#pragma once

#include <memory>
#include <string>

#include "device.h"
#include "ort.h"
#include "session.h"

namespace deltafuse::ep {

// "" when the kernel will run this node on this device, else the reason why not.
OrtStatus* MoeRefusal(const Api& api, const Device& device, const OrtNode* node, std::string* reason);

// Where the node's shapes are known, the session's workspace is made large enough for it.
OrtStatus* CreateMoeKernel(std::shared_ptr<Session> session, const OrtKernelInfo* info, OrtKernelImpl** kernel);

}  // namespace deltafuse::ep
