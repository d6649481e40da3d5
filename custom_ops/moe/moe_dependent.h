// Launches of a prompt's kernels, each allowed to begin while the one before ends.
#pragma once

#include <cuda_runtime_api.h>

#include "moe_launch.h"

namespace deltafuse::moe {

struct LaunchForm {
  dim3 grid;
  int threads;
  size_t shared = 0;         // dynamic bytes a block
  unsigned cluster_y = 1;    // blocks of a cluster, along y
  bool cooperative = false;  // all blocks must be there at once; such a launch waits for the one before
};

// The kernel waits for the one before by itself (wait_previous). All ask for the same division of a multiprocessor's
// memory: it can only change when no block is there.
template <typename... Formal, typename... Actual>
cudaError_t launch_dependent(void (*kernel)(Formal...), const LaunchForm& form, const DeviceInfo& device,
                             cudaStream_t stream, const Actual&... args) {
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(form.shared));
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (form.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  } else if (device.capability >= 90 && prompt_tuning().dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (form.cluster_y > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = attributes[count].val.clusterDim.z = 1;
    attributes[count++].val.clusterDim.y = form.cluster_y;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = form.grid;
  config.blockDim = dim3(static_cast<unsigned>(form.threads));
  config.dynamicSmemBytes = form.shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  status = cudaLaunchKernelEx(&config, kernel, args...);
  return status == cudaSuccess ? cudaGetLastError() : status;
}

}  // namespace deltafuse::moe
