// A few tokens' routing in a block's shared memory, and the list of experts that they use.
#pragma once

#include "moe_decode.h"
#include "moe_select_block.cuh"

namespace deltafuse::moe {

constexpr int kRoutedTogether = 8;  // tokens whose scores are in shared memory at once
constexpr int kItemTokens = 4;      // of an expert, in one product
static_assert(kDecodeTokens <= 32, "tokens are bits");

// Every block makes its own: cheaper than a launch, and nothing has to be reset.
struct Routing {
  int* ids;        // [N, k]
  float* weights;  // [N, k]
  int* items;      // [N, k] an expert that is used
  int* places;     // [N, k] the pair's expert among the items
  int* experts;    // [N, k] those that are used
  int16_t* rows;   // [N, k, kItemTokens] pairs of an item, then -1
  int* counts;     // items; experts that are used
  // Scratch, not needed once the routing is made.
  uint32_t* masks;        // [E] tokens that use it, where there are several
  int* firsts;            // [E] its place among those that are used, and 2^16 times its first item's
  int* sums;              // [32]
  unsigned char* choice;  // what follows, or what else the choice needs
  SoftmaxStats* stats;    // [kRoutedTogether]
  Candidate* candidates;  // [kRoutedTogether, kCandidates]
  float* scores;          // [kRoutedTogether, E], then choices, then [kRoutedTogether, n_group]

  static __host__ __device__ int together(const RouterArgs& a) {
    return a.tokens < kRoutedTogether ? a.tokens : kRoutedTogether;
  }
  static __host__ __device__ int kept_bytes(const RouterArgs& a) {
    return (4 * (7 * a.tokens * a.top_k + 2) + 127) / 128 * 128;
  }
  static __host__ __device__ int scratch_bytes(const RouterArgs& a) {
    const int each =
        static_cast<int>(sizeof(SoftmaxStats) + sizeof(Candidate) * kCandidates) + 4 * (2 * a.experts + a.n_group);
    return (together(a) * each + 127) / 128 * 128;
  }
  // Before the choice's scratch.
  static __host__ __device__ int lists_bytes(const RouterArgs& a) {
    return a.tokens > 1 ? (4 * (2 * a.experts + 32) + 127) / 128 * 128 : 0;
  }
  __device__ Routing(unsigned char* base, unsigned char* scratch, const RouterArgs& a) {
    const int pairs = a.tokens * a.top_k;
    ids = reinterpret_cast<int*>(base);
    weights = reinterpret_cast<float*>(ids + pairs);
    items = reinterpret_cast<int*>(weights + pairs);
    places = items + pairs;
    experts = places + pairs;
    rows = reinterpret_cast<int16_t*>(experts + pairs);
    counts = reinterpret_cast<int*>(rows + pairs * kItemTokens);
    masks = reinterpret_cast<uint32_t*>(scratch);
    firsts = reinterpret_cast<int*>(masks + a.experts);
    sums = firsts + a.experts;
    choice = scratch + lists_bytes(a);
    stats = reinterpret_cast<SoftmaxStats*>(choice);
    candidates = reinterpret_cast<Candidate*>(stats + together(a));
    scores = reinterpret_cast<float*>(candidates + together(a) * kCandidates);
  }
  // Before the choice; all threads.
  __device__ __forceinline__ void clear(const RouterArgs& a) const {
    if (a.tokens == 1) return;
#pragma unroll 1
    for (int e = threadIdx.x; e < a.experts; e += blockDim.x) masks[e] = 0;
  }
  // A pair's expert, its weight. write: also into the outputs ids and weights.
  __device__ __forceinline__ void take_id(const RouterArgs& a, int token, int pair, int id) const {
    ids[pair] = id;
    if (a.tokens > 1) atomicOr(&masks[id], 1u << token);
  }
  __device__ __forceinline__ void take_weight(const RouterArgs& a, int pair, float weight, bool write) const {
    weights[pair] = weight;
    if (write && a.ids_out) a.ids_out[pair] = ids[pair];
    if (write && a.weights_out) a.weights_out[pair] = weight;
  }
};

// What several tokens use, from the masks: experts and items ascending; all threads.
__device__ __forceinline__ void list_items(const RouterArgs& a, const Routing& r, const Divider& by_top_k) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32, pairs = a.tokens * a.top_k;
#pragma unroll 1
  for (int i = threadIdx.x; i < pairs * kItemTokens / 2; i += blockDim.x) reinterpret_cast<int*>(r.rows)[i] = -1;
  int before = 0;  // how many experts are used, and 2^16 times the items
#pragma unroll 1
  for (int base = 0; base < a.experts; base += blockDim.x) {
    const int e = base + static_cast<int>(threadIdx.x);
    const uint32_t mask = e < a.experts ? r.masks[e] : 0;
    const int own = (__popc(mask) + kItemTokens - 1) / kItemTokens * 65536 + (mask != 0);
    int upto = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += below;
    }
    if (lane == 31) r.sums[warp] = upto;
    __syncthreads();
    const int sum = lane < warps ? r.sums[lane] : 0;
    const int at = before + upto - own + __reduce_add_sync(~0u, lane < warp ? sum : 0);
    before += __reduce_add_sync(~0u, sum);
    if (mask) {
      r.firsts[e] = at, r.experts[at & 65535] = e;
      for (int i = 0; i < own >> 16; ++i) r.items[(at >> 16) + i] = e;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) r.counts[0] = before >> 16, r.counts[1] = before & 65535;
#pragma unroll 1
  for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
    const int id = r.ids[pair], at = r.firsts[id];
    const int slot = __popc(r.masks[id] & ((1u << by_top_k(pair)) - 1));
    r.places[pair] = at & 65535;
    r.rows[(at >> 16) * kItemTokens + slot] = static_cast<int16_t>(pair);  // items of an expert are neighbours
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
      if (lane < a.top_k) r.take_id(a, first + n, pair, id), r.take_weight(a, pair, weight, write);
    }
    __syncthreads();
  }
}

}  // namespace deltafuse::moe
