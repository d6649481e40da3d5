// Device memory for ORT: plain, or with freed blocks kept for the next request.
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <unordered_map>

#include "cuda_backend.h"
#include "cuda_check.h"

namespace deltafuse::ep {
namespace {

constexpr size_t kSmall = size_t{1} << 20;

// Small blocks come in powers of two from 512 bytes, large ones in multiples of 1 MiB: few distinct sizes, much reuse.
size_t BlockSize(size_t bytes) {
  if (bytes > kSmall) return (bytes + kSmall - 1) / kSmall * kSmall;
  size_t size = 512;
  while (size < bytes) size *= 2;
  return size;
}

class CudaAllocator final : public OrtAllocator {
 public:
  CudaAllocator(const Api& api, Owned<OrtMemoryInfo> info, int ordinal, bool caching)
      : OrtAllocator{}, api_(api), info_(std::move(info)), ordinal_(ordinal), caching_(caching) {
    version = kOrtApiVersion;
    Alloc = [](OrtAllocator* self, size_t bytes) noexcept { return static_cast<CudaAllocator*>(self)->Take(bytes); };
    Reserve = Alloc;
    Free = [](OrtAllocator* self, void* block) noexcept { static_cast<CudaAllocator*>(self)->GiveBack(block); };
    Info = [](const OrtAllocator* self) noexcept -> const OrtMemoryInfo* {
      return static_cast<const CudaAllocator*>(self)->info_.get();
    };
    Shrink = [](OrtAllocator* self) noexcept -> OrtStatus* {
      auto* allocator = static_cast<CudaAllocator*>(self);
      return Guard(allocator->api_, [&]() -> OrtStatus* {
        const std::lock_guard<std::mutex> lock(allocator->mutex_);
        allocator->DropKept();
        return nullptr;
      });
    };
  }
  ~CudaAllocator() { DropKept(); }

 private:
  // Null when there is no memory left: ORT turns that into its own error.
  void* Take(size_t bytes) noexcept {
    if (bytes == 0) return nullptr;
    try {
      const std::lock_guard<std::mutex> lock(mutex_);
      const size_t size = BlockSize(bytes);
      // A kept block may be larger than asked for, but not by more than a quarter.
      const auto kept = kept_.lower_bound(size);
      if (kept != kept_.end() && kept->first <= size + size / 4) {
        void* block = kept->second;
        sizes_[block] = kept->first;
        kept_.erase(kept);
        return block;
      }
      void* block = NewBlock(size);
      if (!block && !kept_.empty()) {
        DropKept();
        block = NewBlock(size);
      }
      if (block) sizes_[block] = size;
      return block;
    } catch (...) {
      return nullptr;
    }
  }

  void GiveBack(void* block) noexcept {
    if (!block) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sizes_.find(block);
    if (found == sizes_.end()) return;
    const size_t size = found->second;
    sizes_.erase(found);
    try {
      if (caching_) {
        kept_.emplace(size, block);
        return;
      }
    } catch (...) {  // no room to remember it: release it instead
    }
    Destroy(block);
  }

  void* NewBlock(size_t size) {
    void* block = nullptr;
    if (cudaSetDevice(ordinal_) != cudaSuccess || cudaMalloc(&block, size) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return nullptr;
    }
    return block;
  }

  void Destroy(void* block) {
    // Fails only when the driver is going away with the process, and the memory with it.
    if (cudaSetDevice(ordinal_) != cudaSuccess || cudaFree(block) != cudaSuccess) static_cast<void>(cudaGetLastError());
  }

  void DropKept() {
    for (const auto& [size, block] : kept_) Destroy(block);
    kept_.clear();
  }

  const Api& api_;
  const Owned<OrtMemoryInfo> info_;
  const int ordinal_;
  const bool caching_;
  std::mutex mutex_;
  std::multimap<size_t, void*> kept_;
  std::unordered_map<void*, size_t> sizes_;  // of the blocks in use
};

}  // namespace

OrtStatus* CreateCudaMemoryInfo(const Api& api, int ordinal, OrtMemoryInfo** info) {
  return api.ort->CreateMemoryInfo_V2("DeltaFuseCuda", OrtMemoryInfoDeviceType_GPU, kNvidiaVendorId, ordinal,
                                      OrtDeviceMemoryType_DEFAULT, 0, OrtDeviceAllocator, info);
}

OrtStatus* CreateCudaAllocator(const Api& api, int ordinal, bool caching, OrtAllocator** allocator) {
  OrtMemoryInfo* info = nullptr;
  DF_RETURN_IF_ERROR(CreateCudaMemoryInfo(api, ordinal, &info));
  *allocator = new CudaAllocator(api, Own(info, api.ort->ReleaseMemoryInfo), ordinal, caching);
  return nullptr;
}

void ReleaseCudaAllocator(OrtAllocator* allocator) { delete static_cast<CudaAllocator*>(allocator); }

}  // namespace deltafuse::ep
