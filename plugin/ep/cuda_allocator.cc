// Where device memory comes from, and what ORT calls it.
#include <cuda_runtime_api.h>

#include "cuda_backend.h"

namespace deltafuse::ep {
namespace {

// The device's ordinal travels as the arena's `user`.
int Ordinal(void* user) { return static_cast<int>(reinterpret_cast<intptr_t>(user)); }

void* Allocate(void* user, size_t bytes) {
  void* block = nullptr;
  if (cudaSetDevice(Ordinal(user)) == cudaSuccess && cudaMalloc(&block, bytes) == cudaSuccess) return block;
  static_cast<void>(cudaGetLastError());
  return nullptr;
}

void Free(void* user, void* block) {
  // Fails only when the driver is going away with the process, and the memory with it.
  if (cudaSetDevice(Ordinal(user)) != cudaSuccess || cudaFree(block) != cudaSuccess)
    static_cast<void>(cudaGetLastError());
}

}  // namespace

Arena::Backend CudaMemory(int ordinal) {
  return {reinterpret_cast<void*>(static_cast<intptr_t>(ordinal)), Allocate, Free};
}

OrtStatus* CreateCudaMemoryInfo(const Api& api, int ordinal, OrtMemoryInfo** info) {
  return api.ort->CreateMemoryInfo_V2("DeltaFuseCuda", OrtMemoryInfoDeviceType_GPU, kNvidiaVendorId, ordinal,
                                      OrtDeviceMemoryType_DEFAULT, 0, OrtDeviceAllocator, info);
}

}  // namespace deltafuse::ep
