// The table of kernels that ORT creates from: one registry for each device.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "device.h"
#include "ort.h"

namespace deltafuse::ep {

class Session;

// The domain of the fused ops.
inline constexpr const char* kDomain = "deltafuse";

// One fused op.
struct FusedOp {
  const char* op_type;
  int version;
  // "" when the kernel will run this node on this device, else the reason why not.
  OrtStatus* (*refusal)(const Api& api, const Device& device, const OrtNode* node, std::string* reason);
  OrtKernelCreateFunc create;
  // Inputs that the output at the same place of `outputs` may be written over, where shapes are known to be equal.
  std::vector<int> inputs, outputs;
};

// Null when there is no such op.
const FusedOp* FindFusedOp(std::string_view op_type);

// `state` is what the kernels are created with: it must outlive the registry.
struct KernelState {
  const Api* api;
  const Device* device;
};

OrtStatus* CreateKernelRegistry(const KernelState& state, OrtKernelRegistry** registry);

}  // namespace deltafuse::ep
