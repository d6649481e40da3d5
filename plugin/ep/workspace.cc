#include "workspace.h"

#include <exception>

#include "arena_allocator.h"

namespace deltafuse::ep {
namespace {

constexpr const char* kWhat = "a workspace";

// ORT's arenas throw where they have no memory, others return null.
OrtStatus* Allocate(const Api& api, OrtAllocator* allocator, size_t bytes, bool reserve, void** data) {
  OrtStatus* cause = nullptr;
  try {
    const bool can_reserve = reserve && allocator->version >= 18 && allocator->Reserve;
    *data = can_reserve ? allocator->Reserve(allocator, bytes) : allocator->Alloc(allocator, bytes);
  } catch (const std::exception& error) {
    *data = nullptr;
    cause = MakeStatus(api, ORT_FAIL, error.what());
  } catch (...) {
    *data = nullptr;
  }
  return *data ? nullptr : NoMemory(api, kWhat, bytes, allocator, cause);
}

// The session's allocator of the node's device, or null: then the first run takes the memory.
OrtAllocator* FindAllocator(const Api& api, const OrtKernelInfo* info) {
  OrtAllocator* allocator = nullptr;
  if (OrtStatus* status = api.ort->KernelInfoGetAllocator(info, OrtMemTypeDefault, &allocator)) {
    api.ort->ReleaseStatus(status);
    return nullptr;
  }
  return allocator;
}

}  // namespace

OrtStatus* NoMemory(const Api& api, const std::string& what, size_t bytes, const OrtAllocator* allocator,
                    OrtStatus* cause) {
  const Owned<OrtStatus> owned = Own(cause, api.ort->ReleaseStatus);
  std::string text = "no memory for " + what + " of " + std::to_string(bytes) + " bytes" + MemoryText(api, allocator);
  if (cause) text += std::string(": ") + api.ort->GetErrorMessage(cause);
  return MakeStatus(api, ORT_FAIL, text);
}

OrtStatus* NoMemory(const Api& api, const OrtKernelContext* context, const OrtMemoryInfo* memory,
                    const std::string& what, size_t bytes, OrtStatus* cause) {
  OrtAllocator* allocator = nullptr;
  if (OrtStatus* status = api.ort->KernelContext_GetAllocator(context, memory, &allocator)) {
    api.ort->ReleaseStatus(status);
    allocator = nullptr;
  }
  const Owned<OrtAllocator> owned = Own(allocator, api.ort->ReleaseAllocator);
  return NoMemory(api, what, bytes, allocator, cause);
}

HeldWorkspace::~HeldWorkspace() { Release(); }

OrtStatus* HeldWorkspace::Grow(const OrtKernelInfo* info, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bytes <= bytes_) return nullptr;
  if (!allocator_) allocator_ = FindAllocator(api_, info);
  if (!allocator_) return nullptr;
  if (data_) allocator_->Free(allocator_, data_);
  data_ = nullptr;
  bytes_ = 0;
  DF_RETURN_IF_ERROR(Allocate(api_, allocator_, bytes, /*reserve=*/true, &data_));
  bytes_ = bytes;
  return nullptr;
}

void* HeldWorkspace::Borrow(size_t bytes, void* stream) {
  if (lent_.exchange(true, std::memory_order_acquire)) return nullptr;
  if (bytes <= bytes_ && (!bound_ || stream_ == stream)) {
    bound_ = true;
    stream_ = stream;
    return data_;
  }
  GiveBack();
  return nullptr;
}

void HeldWorkspace::Release() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (data_) allocator_->Free(allocator_, data_);
  if (allocator_) api_.ort->ReleaseAllocator(allocator_);
  data_ = nullptr;
  allocator_ = nullptr;
  bytes_ = 0;
}

OrtStatus* WarmArena(const Api& api, const OrtKernelInfo* info, size_t bytes) {
  OrtAllocator* allocator = FindAllocator(api, info);
  if (!allocator) return nullptr;
  const Owned<OrtAllocator> owned = Own(allocator, api.ort->ReleaseAllocator);
  void* data = nullptr;
  DF_RETURN_IF_ERROR(Allocate(api, allocator, bytes, /*reserve=*/false, &data));
  allocator->Free(allocator, data);
  return nullptr;
}

Workspace::~Workspace() {
  if (held_) {
    held_->GiveBack();
    return;
  }
  if (data_) allocator_->Free(allocator_, data_);
  if (allocator_) api_.ort->ReleaseAllocator(allocator_);
}

OrtStatus* Workspace::Take(const OrtKernelContext* context, const OrtMemoryInfo* memory, size_t bytes,
                           HeldWorkspace* held, void* stream) {
  if (bytes == 0) return nullptr;
  if (held && (data_ = held->Borrow(bytes, stream))) {
    held_ = held;
    return nullptr;
  }
  DF_RETURN_IF_ERROR(api_.ort->KernelContext_GetAllocator(context, memory, &allocator_));
  OrtStatus* status = api_.ort->KernelContext_GetScratchBuffer(context, memory, bytes, &data_);
  if (status) data_ = nullptr;
  return data_ ? nullptr : NoMemory(api_, kWhat, bytes, allocator_, status);
}

}  // namespace deltafuse::ep
