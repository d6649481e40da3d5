#include "arena.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace deltafuse::ep {
namespace {

// `bytes` in whole units of alignment, or 0 where that is more than can be counted.
size_t RoundUp(size_t bytes) {
  if (bytes > std::numeric_limits<size_t>::max() - Arena::kAlignment) return 0;
  return (bytes + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
}

}  // namespace

Arena::Arena(const Backend& backend, size_t limit_bytes, bool keep)
    : backend_(backend), limit_(limit_bytes), keep_(keep) {
  stats_.limit = limit_bytes;
}

Arena::~Arena() {
  for (const auto& [address, region] : regions_) backend_.release(backend_.user, reinterpret_cast<void*>(address));
}

void* Arena::Take(size_t bytes) noexcept {
  if (bytes == 0) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    const size_t size = RoundUp(bytes);
    Chunks::iterator chunk = chunks_.end();
    if (size != 0) chunk = FindFree(size);
    if (size != 0 && chunk == chunks_.end()) chunk = Extend(size, /*reserved=*/!keep_);
    if (chunk != chunks_.end()) {
      ++stats_.blocks;
      return HandOut(chunk, size);
    }
  } catch (...) {  // no memory for the arena's own records
  }
  ++stats_.failures;
  return nullptr;
}

void* Arena::Reserve(size_t bytes) noexcept {
  if (bytes == 0) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    const size_t size = RoundUp(bytes);
    const Chunks::iterator chunk = size != 0 ? Extend(size, /*reserved=*/true) : chunks_.end();
    if (chunk != chunks_.end()) {
      ++stats_.reserves;
      return HandOut(chunk, size);
    }
  } catch (...) {
  }
  ++stats_.failures;
  return nullptr;
}

void Arena::GiveBack(void* block) noexcept {
  if (!block) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  auto chunk = chunks_.find(reinterpret_cast<Address>(block));
  if (chunk == chunks_.end() || chunk->second.free) return;
  stats_.in_use -= chunk->second.size;
  if (regions_.at(chunk->second.region).reserved) return DropRegion(chunk->second.region);
  try {
    const auto next = std::next(chunk);
    if (next != chunks_.end() && next->second.free && next->second.region == chunk->second.region)
      chunk = Merge(chunk, next);
    if (chunk != chunks_.begin()) {
      const auto previous = std::prev(chunk);
      if (previous->second.free && previous->second.region == chunk->second.region) chunk = Merge(previous, chunk);
    }
    free_.emplace(chunk->second.size, chunk->first);
    chunk->second.free = true;
  } catch (...) {  // no memory to remember it by: it stays out until the arena goes
    chunk->second.free = false;
  }
}

void Arena::Shrink() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  DropFreeRegions();
  growth_ = kSmallestRegion;
}

Arena::Stats Arena::GetStats() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

Arena::Chunks::iterator Arena::FindFree(size_t size) {
  const auto found = free_.lower_bound({size, 0});
  return found == free_.end() ? chunks_.end() : chunks_.find(found->second);
}

// First with room for more, then as small as can be, then after all that is free has gone back to the system.
Arena::Chunks::iterator Arena::Extend(size_t size, bool reserved) {
  Chunks::iterator chunk = chunks_.end();
  if (!reserved && growth_ > size && AddRegion(growth_, false, &chunk)) {
    growth_ = std::min(2 * growth_, kLargestGrowth);
    return chunk;
  }
  if (AddRegion(size, reserved, &chunk)) return chunk;
  if (free_.empty()) return chunks_.end();
  DropFreeRegions();
  return AddRegion(size, reserved, &chunk) ? chunk : chunks_.end();
}

bool Arena::AddRegion(size_t size, bool reserved, Chunks::iterator* chunk) {
  if (limit_ != 0 && (size > limit_ || stats_.total > limit_ - size)) return false;
  void* region = backend_.allocate(backend_.user, size);
  if (!region) return false;
  const auto address = reinterpret_cast<Address>(region);
  try {
    regions_[address] = {size, reserved};
    *chunk = chunks_.emplace(address, Chunk{size, address, false}).first;
    free_.emplace(size, address);
  } catch (...) {
    regions_.erase(address);
    chunks_.erase(address);
    backend_.release(backend_.user, region);
    throw;
  }
  (*chunk)->second.free = true;
  stats_.total += size;
  ++stats_.extensions;
  return true;
}

// The front of a free chunk; what is over stays free.
void* Arena::HandOut(Chunks::iterator chunk, size_t size) {
  const Address address = chunk->first;
  const size_t over = chunk->second.size - size;
  if (over != 0) {
    const auto rest = chunks_.emplace(address + size, Chunk{over, chunk->second.region, true}).first;
    try {
      free_.emplace(over, address + size);
    } catch (...) {
      chunks_.erase(rest);
      throw;
    }
  }
  free_.erase({chunk->second.size, address});
  chunk->second.size = size;
  chunk->second.free = false;
  stats_.in_use += size;
  stats_.max_in_use = std::max(stats_.max_in_use, stats_.in_use);
  stats_.max_block = std::max(stats_.max_block, size);
  return reinterpret_cast<void*>(address);
}

// Two neighbours of one region become one chunk, which is in nobody's list.
Arena::Chunks::iterator Arena::Merge(Chunks::iterator left, Chunks::iterator right) {
  for (const auto& side : {left, right})
    if (side->second.free) free_.erase({side->second.size, side->first});
  left->second.size += right->second.size;
  left->second.free = false;
  chunks_.erase(right);
  return left;
}

void Arena::DropFreeRegions() {
  for (auto region = regions_.begin(); region != regions_.end();) {
    const Address address = region->first;
    const Chunk& first = chunks_.at(address);
    const bool whole = first.free && first.size == region->second.size;
    ++region;
    if (whole) DropRegion(address);
  }
}

void Arena::DropRegion(Address region) {
  const auto chunk = chunks_.find(region);
  if (chunk->second.free) free_.erase({chunk->second.size, region});
  stats_.total -= chunk->second.size;
  ++stats_.shrinkages;
  chunks_.erase(chunk);
  regions_.erase(region);
  backend_.release(backend_.user, reinterpret_cast<void*>(region));
}

}  // namespace deltafuse::ep
