// A few tokens' routing in a block's shared memory, and the list of experts that they use.
#pragma once

#include "moe_decode.h"
#include "moe_select.cuh"

namespace deltafuse::moe {

constexpr int kRoutedTogether = 8;  // tokens whose scores are in shared memory at once
constexpr int kItemTokens = 4;      // of an expert, in one product

// Every block makes its own: cheaper than a launch, and nothing has to be reset.
struct Routing {
  int* ids;        // [N, k]
  float* weights;  // [N, k]
  int* items;      // [N, k] an expert that is used
  int* places;     // [N, k] the pair's expert among the items
  int* slots;      // [N, k] which of its expert's pairs it is
  int16_t* rows;   // [N, k, kItemTokens] pairs of an item, then -1
  uint32_t* used;  // [32] bits, then how many are used before each word
  int* counts;     // items; experts that are used
  // Scratch, not needed once the routing is made.
  SoftmaxStats* stats;    // [kRoutedTogether]
  Candidate* candidates;  // [kRoutedTogether, kCandidates]
  float* scores;          // [kRoutedTogether, E], then choices, then [kRoutedTogether, n_group]

  static __host__ __device__ int together(const RouterArgs& a) {
    return a.tokens < kRoutedTogether ? a.tokens : kRoutedTogether;
  }
  static __host__ __device__ int kept_bytes(const RouterArgs& a) {
    return (4 * (7 * a.tokens * a.top_k + 66) + 127) / 128 * 128;
  }
  static __host__ __device__ int scratch_bytes(const RouterArgs& a) {
    const int each =
        static_cast<int>(sizeof(SoftmaxStats) + sizeof(Candidate) * kCandidates) + 4 * (2 * a.experts + a.n_group);
    return (together(a) * each + 127) / 128 * 128;
  }
  __device__ Routing(unsigned char* base, unsigned char* scratch, const RouterArgs& a) {
    const int pairs = a.tokens * a.top_k;
    ids = reinterpret_cast<int*>(base);
    weights = reinterpret_cast<float*>(ids + pairs);
    items = reinterpret_cast<int*>(weights + pairs);
    places = items + pairs;
    slots = places + pairs;
    rows = reinterpret_cast<int16_t*>(slots + pairs);
    used = reinterpret_cast<uint32_t*>(rows + pairs * kItemTokens);
    counts = reinterpret_cast<int*>(used + 64);
    stats = reinterpret_cast<SoftmaxStats*>(scratch);
    candidates = reinterpret_cast<Candidate*>(stats + together(a));
    scores = reinterpret_cast<float*>(candidates + together(a) * kCandidates);
  }
  // A pair's expert, its weight. write: also into the outputs ids and weights.
  __device__ __forceinline__ void take_id(const RouterArgs& a, int pair, int id) const {
    ids[pair] = id;
    if (a.tokens > 1) atomicOr(&used[id / 32], 1u << (id % 32));
  }
  __device__ __forceinline__ void take_weight(const RouterArgs& a, int pair, float weight, bool write) const {
    weights[pair] = weight;
    if (write && a.ids_out) a.ids_out[pair] = ids[pair];
    if (write && a.weights_out) a.weights_out[pair] = weight;
  }
};

// What several tokens use, from ids: ascending, experts of more than kItemTokens again after that; all threads.
__device__ __forceinline__ void list_items(const RouterArgs& a, const Routing& r) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = a.tokens * a.top_k;
#pragma unroll 1
  for (int i = threadIdx.x; i < pairs * kItemTokens; i += blockDim.x) r.rows[i] = -1;
  if (warp == 0) {
    const uint32_t own = r.used[lane];
    int upto = __popc(own);
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += below;
    }
    int at = upto - __popc(own);
    r.used[32 + lane] = at;
    if (lane == 31) r.counts[0] = r.counts[1] = upto;
    for (uint32_t bits = own; bits; bits &= bits - 1) r.items[at++] = lane * 32 + __ffs(static_cast<int>(bits)) - 1;
  }
  __syncthreads();
  bool more = false;
#pragma unroll 1
  for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
    const int id = r.ids[pair];
    const int place = static_cast<int>(r.used[32 + id / 32]) + __popc(r.used[id / 32] & ((1u << (id % 32)) - 1));
    int slot = 0;
#pragma unroll 4
    for (int i = 0; i < pair; ++i) slot += r.ids[i] == id;
    r.places[pair] = place, r.slots[pair] = slot;
    if (slot < kItemTokens) r.rows[place * kItemTokens + slot] = static_cast<int16_t>(pair);
    more |= slot >= kItemTokens;
  }
  if (!__syncthreads_or(more)) return;
  // Further items, in the order of their first pairs; slots become items.
  if (warp == 0) {
    int total = r.counts[1];
#pragma unroll 1
    for (int base = 0; base < pairs; base += 32) {
      const int pair = base + lane, slot = pair < pairs ? r.slots[pair] : 0;
      const bool first = slot >= kItemTokens && slot % kItemTokens == 0;
      const unsigned who = __ballot_sync(~0u, first);
      if (first) {
        const int item = total + __popc(who & ((1u << lane) - 1)), id = r.ids[pair];
        r.items[item] = id;
        int slots = 0;
#pragma unroll 1
        for (int i = pair; i < pairs && slots < kItemTokens; ++i) {
          if (r.ids[i] == id) r.rows[item * kItemTokens + slots++] = static_cast<int16_t>(i);
        }
      }
      total += __popc(who);
    }
    if (lane == 0) r.counts[0] = total;
  }
  __syncthreads();
}

// The choice from logits: softmax, many experts, groups that do not suit select_scored. All threads; apart, its
// registers would weigh on everything else.
static __device__ __noinline__ void route(const RouterArgs& a, const Routing& r, bool write) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int together = Routing::together(a);
  float* choices = r.scores + together * a.experts;
  float* kept = choices + together * a.experts;
  if (threadIdx.x < 32) r.used[threadIdx.x] = 0;
#pragma unroll 1
  for (int first = 0; first < a.tokens; first += together) {
    const int count = min(together, a.tokens - first);
    auto logit = [&](int token, int expert) { return logit_of(a, first + token, expert); };
    if (a.softmax) {
      for (int n = warp; n < count; n += warps) {
        softmax_stats(a.experts, [&](int expert) { return logit(n, expert); }, &r.stats[n]);
      }
      __syncthreads();
    }
    score_tokens(a, count, logit, r.stats, r.scores, choices, threadIdx.x, blockDim.x);
    __syncthreads();
#pragma unroll 1
    for (int n = warp; n < count; n += warps) {
      int id;
      float weight;
      select(a, r.scores + n * a.experts, choices + n * a.experts, kept + n * a.n_group, r.candidates + n * kCandidates,
             &id, &weight);
      const int pair = (first + n) * a.top_k + lane;
      if (lane < a.top_k) r.take_id(a, pair, id), r.take_weight(a, pair, weight, write);
    }
    __syncthreads();
  }
}

}  // namespace deltafuse::moe
