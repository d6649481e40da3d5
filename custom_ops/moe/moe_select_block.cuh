// One token's choice by a block. Its experts lie in parts, its groups (or, where all of those stay, runs of
// experts), a warp for each. The two best of every part tell which groups stay, and a key that top_k of theirs reach at
// least: few others do, and those are ranked. What that does not make clear is left to a warp alone (select_unclear).
#pragma once

#include "moe_select.cuh"

namespace deltafuse::moe {

struct BlockChoice {                                         // in shared memory
  uint32_t totals[kParts], firsts[kParts], seconds[kParts];  // keys of a part, of its two best
  Candidate candidates[kCandidates];
  int count;  // of those; more than there is room for: it is not clear
};

// The lane's keys of part `part`; the whole warp. key(e): an expert's.
template <typename Key>
__device__ __forceinline__ void part_keys(const RouterArgs& a, const ExpertParts& parts, int part, Key key,
                                          uint32_t (&keys)[kPartEach]) {
  const int first = part * parts.size + threadIdx.x % 32 * parts.each, end = min(a.experts, (part + 1) * parts.size);
#pragma unroll
  for (int i = 0; i < kPartEach; ++i) keys[i] = i < parts.each && first + i < end ? key(first + i) : 0;
}

// The same from global memory, where all lie in order and may not be there yet.
__device__ __forceinline__ void peek_part(const RouterArgs& a, const ExpertParts& parts, int part, const uint32_t* all,
                                          uint32_t (&keys)[kPartEach]) {
  auto peek = [&](int e) {
    uint32_t key;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];\n" : "=r"(key) : "l"(all + e) : "memory");
    return key;
  };
  part_keys(a, parts, part, peek, keys);
}
// Whether all are there; for the whole warp.
__device__ __forceinline__ bool part_there(const RouterArgs& a, const ExpertParts& parts, int part,
                                           const uint32_t (&keys)[kPartEach]) {
  const int first = part * parts.size + threadIdx.x % 32 * parts.each, end = min(a.experts, (part + 1) * parts.size);
  bool there = true;
#pragma unroll
  for (int i = 0; i < kPartEach; ++i) there = there && (keys[i] != 0 || i >= parts.each || first + i >= end);
  return __all_sync(~0u, there);
}

// First: the two best of a part; the whole warp. Then all have to meet.
__device__ __forceinline__ void find_best(const RouterArgs& a, const ExpertParts& parts, int part,
                                          const uint32_t (&keys)[kPartEach], BlockChoice& s) {
  const int lane = threadIdx.x % 32;
  uint32_t one = max(keys[0], keys[1]), two = min(keys[0], keys[1]);
  if (parts.each > 2) {
#pragma unroll
    for (int i = 2; i < kPartEach; ++i) two = max(two, min(one, keys[i])), one = max(one, keys[i]);
  }
  const uint32_t first = __reduce_max_sync(~0u, one);
  const bool here = one == first;
  const unsigned who = __ballot_sync(~0u, here);
  uint32_t second = __reduce_max_sync(~0u, here ? two : one);
  if (who & (who - 1)) second = first;
  if (lane == 0) {
    const float total = a.group_top == 2 ? key_number(first) + key_number(second) : key_number(first);
    s.totals[part] = order_of(comparable(total)), s.firsts[part] = first, s.seconds[part] = second;
    if (part == 0) s.count = 0;
  }
}

// Second: those of a part that may be among the chosen; the whole warp. Then all have to meet again.
__device__ __forceinline__ void find_candidates(const RouterArgs& a, const ExpertParts& parts, int part,
                                                const uint32_t (&keys)[kPartEach], BlockChoice& s) {
  const int lane = threadIdx.x % 32, own = lane % kParts;
  unsigned staying = (1u << parts.count) - 1;
  uint32_t least = 1;
  if (parts.stay < parts.count) {
    const uint32_t total = s.totals[own];
    int better = 0;
#pragma unroll
    for (int g = 0; g < kParts; ++g) better += g < parts.count && s.totals[g] > total;
    staying &= __ballot_sync(~0u, better < parts.stay);
    least = order_of(a.masked_score_zero ? 0.0f : __int_as_float(0xff800000)) + 1;
    if (part == 0 && lane == 0 && __popc(staying) != parts.stay) atomicAdd(&s.count, 2 * kCandidates);  // equal groups
  }
  const bool stays = (staying >> own) & 1;
  if (parts.stay * 2 == a.top_k) {
    least = max(least, __reduce_min_sync(~0u, stays ? s.seconds[own] : ~0u));
  } else {  // the top_k-th of the two best
    const uint32_t key = !stays ? 0 : lane < kParts ? s.firsts[own] : lane < 2 * kParts ? s.seconds[own] : 0;
    int better = 0;
#pragma unroll 4
    for (int i = 0; i < 2 * kParts; ++i) better += __shfl_sync(~0u, key, i) > key;
    least = max(least, __reduce_min_sync(~0u, better < a.top_k ? key : ~0u));
  }
  if (!((staying >> part) & 1)) return;
  unsigned who[kPartEach];
  int many = 0;
#pragma unroll
  for (int i = 0; i < kPartEach; ++i) {
    who[i] = i < parts.each ? __ballot_sync(~0u, keys[i] >= least) : 0;
    many += __popc(who[i]);
  }
  if (many == 0) return;
  int at = 0;
  if (lane == 0) at = atomicAdd(&s.count, many);
  at = __shfl_sync(~0u, at, 0);
#pragma unroll
  for (int i = 0; i < kPartEach; ++i) {
    const int place = at + __popc(who[i] & ((1u << lane) - 1));
    if ((who[i] >> lane) & 1 && place < kCandidates) {
      s.candidates[place] = Candidate{keys[i], part * parts.size + lane * parts.each + i};
    }
    at += __popc(who[i]);
  }
}

// Third: take(j, expert) for the j-th of the chosen, by one lane; warp number `turn` of `turns`. False: it
// is not clear.
template <typename Take>
__device__ __forceinline__ bool rank_parts(const RouterArgs& a, const BlockChoice& s, int turn, int turns, Take take) {
  const int lane = threadIdx.x % 32, count = s.count;
  if (count < a.top_k || count > kCandidates) return false;
  const Candidate own = lane < count ? s.candidates[lane] : Candidate{0, 0};
#pragma unroll 1
  for (int j = turn; j < count; j += turns) {
    const Candidate other = s.candidates[j];
    const bool ahead = own.key > other.key || (own.key == other.key && own.expert < other.expert);
    const int place = __popc(__ballot_sync(~0u, ahead));
    if (place < a.top_k && lane == 0) take(place, other.expert);
  }
  return true;
}

}  // namespace deltafuse::moe
