// A few tokens' choice by a block. Experts lie in parts, its groups (or, where all of those stay, runs of experts): a
// warp a part sorts the best of it, whether or not its group stays, then one warp ranks the best of those that do. Keys
// that are equal among the best are left to a warp alone (select_scored).
#pragma once

#include "moe_select.cuh"

namespace deltafuse::moe {

constexpr int kPartsTokens = 8;           // of a call at most
constexpr int kParts = 8, kPartBest = 8;  // at most: parts; how many of each
constexpr int kPartEach = 4;              // experts of a lane at most
constexpr uint32_t kUnclear = ~0u;        // instead of a part's key: equal ones

struct Parts8 {
  int count, size, each;  // parts, experts of each, of each lane
  int stay;               // as many of them stay
  __host__ __device__ explicit Parts8(const RouterArgs& a) {
    const bool grouped = a.topk_group < a.n_group;
    count = grouped ? a.n_group : min_of(kParts, 32 / a.top_k);
    size = (a.experts + count - 1) / count, each = (size + 31) / 32;
    stay = grouped ? a.topk_group : count;
  }
  __host__ __device__ static int min_of(int x, int y) { return x < y ? x : y; }
};
__host__ __device__ inline bool chooses_by_parts(const RouterArgs& a) {
  if (a.tokens > kPartsTokens || a.softmax || a.experts > kScored || a.top_k > kPartBest) return false;
  const Parts8 parts(a);
  const bool grouped = a.topk_group < a.n_group;
  return parts.count <= kParts && parts.each <= kPartEach && parts.stay * a.top_k <= 32 &&
         (!grouped || (a.group_top <= 2 && parts.size >= a.group_top));
}

struct PartsChoice {                 // in shared memory
  uint32_t keys[kParts][kPartBest];  // of each part's best, in order; 0: there are no more
  int experts[kParts][kPartBest];
  uint32_t totals[kParts];  // parts' own keys
  int ids[kPartBest];       // what was chosen
};

// The lane's keys of part `part`; the whole warp. key(e): an expert's.
template <typename Key>
__device__ __forceinline__ void part_keys(const RouterArgs& a, const Parts8& parts, int part, Key key,
                                          uint32_t (&keys)[kPartEach]) {
  const int lane = threadIdx.x % 32, first = part * parts.size + lane * parts.each;
  const int end = min(a.experts, (part + 1) * parts.size);
#pragma unroll
  for (int i = 0; i < kPartEach; ++i) keys[i] = i < parts.each && first + i < end ? key(first + i) : 0;
}
// The same from global memory, where all lie in order.
__device__ __forceinline__ void load_part(const RouterArgs& a, const Parts8& parts, int part, const uint32_t* all,
                                          uint32_t (&keys)[kPartEach]) {
  if (parts.each == 2 && parts.size == 64) {
    const uint2 two = __ldcg(reinterpret_cast<const uint2*>(all + part * 64) + threadIdx.x % 32);
    keys[0] = two.x, keys[1] = two.y, keys[2] = keys[3] = 0;
  } else {
    part_keys(a, parts, part, [&](int e) { return __ldcg(all + e); }, keys);
  }
}

// The best of a part; the whole warp. keys: the lane's `each` neighbouring experts, 0: no expert.
__device__ __forceinline__ void sort_part(const RouterArgs& a, const Parts8& parts, int part,
                                          uint32_t (&keys)[kPartEach], PartsChoice& s) {
  const int lane = threadIdx.x % 32, first = part * parts.size + lane * parts.each;
  int experts[kPartEach];
#pragma unroll
  for (int i = 0; i < kPartEach; ++i) experts[i] = first + i;
  auto order = [&](int i, int j) {  // the larger one first
    const bool turn = keys[j] > keys[i];
    const uint32_t key = turn ? keys[j] : keys[i];
    const int expert = turn ? experts[j] : experts[i];
    keys[j] = turn ? keys[i] : keys[j], experts[j] = turn ? experts[i] : experts[j];
    keys[i] = key, experts[i] = expert;
  };
  if (parts.each > 2) order(0, 2), order(1, 3), order(0, 1), order(2, 3), order(1, 2);
  if (parts.each == 2) order(0, 1);
  if (lane < kPartBest) s.keys[part][lane] = 0;
  __syncwarp();
  const int rounds = max(a.top_k, a.group_top);
  uint32_t one = 0, two = 0, last = 0;
  bool equal = false;
#pragma unroll 1
  for (int j = 0; j < rounds; ++j) {
    const uint32_t most = __reduce_max_sync(~0u, keys[0]);
    const bool mine = keys[0] == most;
    const unsigned who = __ballot_sync(~0u, mine);
    equal |= most != 0 && ((who & (who - 1)) != 0 || most == last);
    if (mine) {
      s.keys[part][j] = most, s.experts[part][j] = experts[0];
      keys[0] = keys[1], keys[1] = keys[2], keys[2] = keys[3], keys[3] = 0;
      experts[0] = experts[1], experts[1] = experts[2], experts[2] = experts[3];
    }
    one = j == 0 ? most : one, two = j == 1 ? most : two, last = most;
  }
  equal |= last != 0 && __any_sync(~0u, keys[0] == last);
  if (lane == 0) {
    const float total = a.group_top == 2 ? key_number(one) + key_number(two) : key_number(one);
    s.totals[part] = equal ? kUnclear : order_of(comparable(total));
  }
}

// The choice from the parts' best, which all lanes can see: s.ids. False: it is not clear. One warp.
__device__ __forceinline__ bool merge_parts(const RouterArgs& a, const Parts8& parts, PartsChoice& s) {
  const int lane = threadIdx.x % 32;
  int turn = 0;  // the lane's candidate: number j of the turn-th part that stays
#pragma unroll
  for (int i = 1; i < kParts; ++i) turn += lane >= i * a.top_k;
  const int j = lane - turn * a.top_k;
  const uint32_t own = lane < parts.count ? s.totals[lane] : 0;
  unsigned staying = (1u << parts.count) - 1;
  if (parts.stay < parts.count) {
    int better = 0;
#pragma unroll
    for (int g = 0; g < kParts; ++g) {
      const uint32_t other = __shfl_sync(~0u, own, g);
      better += other > own || (other == own && g < lane);
    }
    staying &= __ballot_sync(~0u, better < parts.stay);
  }
  unsigned left = staying;
#pragma unroll
  for (int i = 1; i < kParts; ++i) left = i <= turn ? left & (left - 1) : left;
  const int part = __ffs(static_cast<int>(left)) - 1;
  const bool in = lane < parts.stay * a.top_k;
  const uint32_t key = in ? s.keys[part][j] : 0;
  const int expert = in ? s.experts[part][j] : 0;
  int place = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) place += __shfl_sync(~0u, key, i) > key;
  // The last one has to be better than those of parts that do not stay.
  const uint32_t masked =
      parts.stay < parts.count ? order_of(a.masked_score_zero ? 0.0f : __int_as_float(0xff800000)) : 0;
  const bool chosen = key > masked && place < a.top_k;
  if (chosen) s.ids[place] = expert;
  const bool clear = __reduce_or_sync(~0u, chosen ? 1u << place : 0u) == (1u << a.top_k) - 1 &&
                     __popc(__ballot_sync(~0u, chosen)) == a.top_k;
  __syncwarp();  // what is not clear may use the place for other things
  return clear && !__any_sync(~0u, own == kUnclear);
}

}  // namespace deltafuse::moe
