// An arena: blocks cut from large regions, free neighbours merged, a limit on what is taken from the system. It knows
// nothing of CUDA or ORT: where regions come from is passed in. Any number of threads may use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace deltafuse::ep {

class Arena {
 public:
  // Where regions come from. Called with the arena locked.
  struct Backend {
    void* user = nullptr;
    void* (*allocate)(void* user, size_t bytes) = nullptr;  // null: there is no memory left
    void (*release)(void* user, void* region) = nullptr;
  };
  struct Stats {
    size_t limit = 0;   // of `total`; 0: none
    size_t in_use = 0;  // bytes of the blocks that are out
    size_t max_in_use = 0;
    size_t total = 0;  // bytes of all regions, reserved ones included
    size_t max_block = 0;
    uint64_t blocks = 0;  // handed out, ever
    uint64_t reserves = 0;
    uint64_t extensions = 0;  // regions taken
    uint64_t shrinkages = 0;  // regions given back
    uint64_t failures = 0;
  };

  // `keep`: regions stay for the next request; otherwise each block is a region of its own. Whoever takes a block that
  // was given back must be ordered behind the work that still uses it: with `keep`, all work must be on one stream.
  Arena(const Backend& backend, size_t limit_bytes, bool keep);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Null when `bytes` is 0, when the limit would be passed, or when the system has no more.
  void* Take(size_t bytes) noexcept;
  // A region of exactly this size, which goes back to the system when it is given back.
  void* Reserve(size_t bytes) noexcept;
  void GiveBack(void* block) noexcept;
  // Gives back to the system all regions that hold no block.
  void Shrink() noexcept;
  Stats GetStats() const noexcept;

  static constexpr size_t kAlignment = 256;
  static constexpr size_t kSmallestRegion = size_t{2} << 20;
  static constexpr size_t kLargestGrowth = size_t{64} << 20;

 private:
  using Address = uintptr_t;
  struct Chunk {
    size_t size;
    Address region;
    bool free;
  };
  struct Region {
    size_t size;
    bool reserved;
  };
  using Chunks = std::map<Address, Chunk>;

  // A free chunk that holds `size` bytes, or the end.
  Chunks::iterator FindFree(size_t size);
  // A new region for `size` bytes, as one free chunk, or the end.
  Chunks::iterator Extend(size_t size, bool reserved);
  bool AddRegion(size_t size, bool reserved, Chunks::iterator* chunk);
  void* HandOut(Chunks::iterator chunk, size_t size);
  Chunks::iterator Merge(Chunks::iterator left, Chunks::iterator right);
  void DropFreeRegions();
  void DropRegion(Address region);

  const Backend backend_;
  const size_t limit_;
  const bool keep_;
  mutable std::mutex mutex_;
  Chunks chunks_;  // every region's chunks, without gaps
  std::map<Address, Region> regions_;
  std::set<std::pair<size_t, Address>> free_;
  size_t growth_ = kSmallestRegion;
  Stats stats_;
};

}  // namespace deltafuse::ep
