// Memory that a kernel needs while it runs, from the session's allocators: the CUDA EP's arena where that EP is in the
// session, else the EP's own; on the CPU ORT's.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "ort.h"

namespace deltafuse::ep {

// One block that the nodes of a session share, held from the session's creation on: as large as the largest workspace
// of the nodes whose shapes are known by then. Safe because it is lent to one node at a time and on one stream only,
// where the next node's work is queued behind this one's.
class HeldWorkspace {
 public:
  explicit HeldWorkspace(const Api& api) : api_(api) {}
  ~HeldWorkspace();
  HeldWorkspace(const HeldWorkspace&) = delete;
  HeldWorkspace& operator=(const HeldWorkspace&) = delete;

  // Makes the block at least this large. For when kernels are created.
  OrtStatus* Grow(const OrtKernelInfo* info, size_t bytes);
  // The block, or null: too small, lent to another node, or in use on another stream.
  void* Borrow(size_t bytes, void* stream);
  void GiveBack() { lent_.store(false, std::memory_order_release); }
  // Gives the memory back. For when the session's last kernel goes: its allocator goes soon after.
  void Release();

 private:
  const Api& api_;
  std::mutex mutex_;
  OrtAllocator* allocator_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  std::atomic<bool> lent_{false};
  bool bound_ = false;  // to stream_
  void* stream_ = nullptr;
};

// Allocates once and gives back, so that the session's arena has that much.
OrtStatus* WarmArena(const Api& api, const OrtKernelInfo* info, size_t bytes);

// The workspace of one call.
class Workspace {
 public:
  explicit Workspace(const Api& api) : api_(api) {}
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace();
  // The held block if it can be had (`held` may be null), else one from the session's allocator. That is given back
  // when the call is over, on a device in stream order: what takes the memory next is queued behind the kernels that
  // use it.
  OrtStatus* Take(const OrtKernelContext* context, const OrtMemoryInfo* memory, size_t bytes,
                  HeldWorkspace* held = nullptr, void* stream = nullptr);
  void* data() const { return data_; }

 private:
  const Api& api_;
  OrtAllocator* allocator_ = nullptr;
  HeldWorkspace* held_ = nullptr;
  void* data_ = nullptr;
};

// "no memory for WHAT of N bytes (limit ..., in use ...)", with the reason that ORT gave. Takes `cause` over.
OrtStatus* NoMemory(const Api& api, const std::string& what, size_t bytes, const OrtAllocator* allocator,
                    OrtStatus* cause);
OrtStatus* NoMemory(const Api& api, const OrtKernelContext* context, const OrtMemoryInfo* memory,
                    const std::string& what, size_t bytes, OrtStatus* cause);

}  // namespace deltafuse::ep
