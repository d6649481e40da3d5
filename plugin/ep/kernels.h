// The table of kernels that ORT creates from: one registry for each device.
#pragma once

#include "device.h"
#include "ort.h"

namespace deltafuse::ep {

// `state` is what the kernels are created with: it must outlive the registry.
struct KernelState {
  const Api* api;
  const Device* device;
};

OrtStatus* CreateKernelRegistry(const KernelState& state, OrtKernelRegistry** registry);

}  // namespace deltafuse::ep
