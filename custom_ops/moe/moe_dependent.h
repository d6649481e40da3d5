// Launches of kernels, each allowed to begin while the one before ends.
#pragma once

#include <cuda_runtime_api.h>

#include "moe_launch.h"

namespace deltafuse::moe {

struct LaunchForm {
  dim3 grid;
  int threads;
  size_t shared = 0;         // dynamic bytes a block
  bool cooperative = false;  // all blocks must be there at once; such a launch waits for the one before
  bool dependent = true;     // may begin while the one before ends: it waits for that by itself (wait_previous)
};

// All ask for the same division of a multiprocessor's memory: it can only change when no block is there, so that they
// could not overlap otherwise.
template <typename... Formal, typename... Actual>
cudaError_t launch_as(void (*kernel)(Formal...), const LaunchForm& form, cudaStream_t stream, const Actual&... args) {
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(form.shared));
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute{};
  if (form.cooperative) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = form.grid;
  config.blockDim = dim3(static_cast<unsigned>(form.threads));
  config.dynamicSmemBytes = form.shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = form.cooperative || form.dependent ? 1 : 0;
  status = cudaLaunchKernelEx(&config, kernel, args...);
  return status == cudaSuccess ? cudaGetLastError() : status;
}

template <typename... Formal, typename... Actual>
cudaError_t launch_dependent(void (*kernel)(Formal...), LaunchForm form, const DeviceInfo& device, cudaStream_t stream,
                             const Actual&... args) {
  form.dependent = device.capability >= 90;  // before there was no such thing
  return launch_as(kernel, form, stream, args...);
}

}  // namespace deltafuse::moe
