// What the CUDA kernels of all ops need to know of a device.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <mutex>

namespace deltafuse {

// The current device's, asked of the driver once. Info has capability, shared_bytes and multiprocessors, all 0 at
// first. compiled(int*): the capability that the kernels were built for, of which and the device's the lesser counts.
// more(Info*, major, minor): what else an op asks of the device.
template <typename Info, typename Compiled, typename More>
cudaError_t read_device_info(Info* info, const Compiled& compiled, const More& more) {
  constexpr int kDevices = 64;
  static std::mutex mutex;
  static Info known_devices[kDevices];
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  if (device >= kDevices) return cudaErrorInvalidDevice;
  const std::lock_guard<std::mutex> lock(mutex);
  Info& entry = known_devices[device];
  if (entry.capability == 0) {
    Info read;
    int major = 0, minor = 0;
    const struct {
      int* value;
      cudaDeviceAttr attribute;
    } wanted[] = {{&major, cudaDevAttrComputeCapabilityMajor},
                  {&minor, cudaDevAttrComputeCapabilityMinor},
                  {&read.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                  {&read.multiprocessors, cudaDevAttrMultiProcessorCount}};
    for (const auto& one : wanted) {
      status = cudaDeviceGetAttribute(one.value, one.attribute, device);
      if (status != cudaSuccess) return status;
    }
    int built_for = 0;
    status = compiled(&built_for);
    if (status != cudaSuccess) return status;
    read.capability = std::min(major * 10 + minor, built_for);
    status = more(&read, major, minor);
    if (status != cudaSuccess) return status;
    entry = read;
  }
  *info = entry;
  return cudaSuccess;
}

}  // namespace deltafuse
