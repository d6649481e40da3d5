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
  int* items;      // [N, k] an expert that is used, and 65536 times the first of 4 of its tokens
  int* places;     // [N, k] the pair's expert among the items
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
    return (4 * (4 * a.tokens * a.top_k + 66) + 127) / 128 * 128;
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
    used = reinterpret_cast<uint32_t*>(places + pairs);
    counts = reinterpret_cast<int*>(used + 64);
    stats = reinterpret_cast<SoftmaxStats*>(scratch);
    candidates = reinterpret_cast<Candidate*>(stats + together(a));
    scores = reinterpret_cast<float*>(candidates + together(a) * kCandidates);
  }
  // A pair's expert and weight. write: also into the outputs ids and weights.
  __device__ __forceinline__ void take(const RouterArgs& a, int pair, int id, float weight, bool write) const {
    ids[pair] = id, weights[pair] = weight;
    if (a.tokens > 1) atomicOr(&used[id / 32], 1u << (id % 32));
    if (write && a.ids_out) a.ids_out[pair] = id;
    if (write && a.weights_out) a.weights_out[pair] = weight;
  }
};

// The pairs of an expert from the `begin`-th on, at most kItemTokens, into list, in order; the whole warp. Returns how many there
// are from there on.
__device__ __forceinline__ int pairs_of(const Routing& r, int pairs, int expert, int begin, int* list) {
  const int lane = threadIdx.x % 32;
  int count = -begin;
#pragma unroll 1
  for (int base = 0; base < pairs; base += 32) {
    const bool match = base + lane < pairs && r.ids[base + lane] == expert;
    const unsigned matches = __ballot_sync(~0u, match);
    const int at = count + __popc(matches & ((1u << lane) - 1));
    if (match && list && at >= 0 && at < kItemTokens) list[at] = base + lane;
    count += __popc(matches);
  }
  __syncwarp();
  return count;
}

// What several tokens use, from ids: ascending, experts of more than kItemTokens again after that; all threads.
__device__ __forceinline__ void list_items(const RouterArgs& a, const Routing& r) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = a.tokens * a.top_k;
  if (warp == 0) {
    const uint32_t own = r.used[lane];
    int upto = __popc(own);
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += below;
    }
    int total = __shfl_sync(~0u, upto, 31), at = upto - __popc(own);
    r.used[32 + lane] = at;
    if (lane == 0) r.counts[1] = total;
    for (uint32_t bits = own; bits; bits &= bits - 1) r.items[at++] = lane * 32 + __ffs(static_cast<int>(bits)) - 1;
    __syncwarp();
    if (a.tokens > kItemTokens) {
      const int experts = total;
#pragma unroll 1
      for (int i = 0; i < experts; ++i) {
        const int expert = r.items[i], count = pairs_of(r, pairs, expert, 0, nullptr);
        for (int begin = kItemTokens; begin < count; begin += kItemTokens) {
          if (lane == 0) r.items[total] = expert | begin << 16;
          ++total;
        }
      }
    }
    if (lane == 0) r.counts[0] = total;
  }
  __syncthreads();
#pragma unroll 1
  for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
    const int id = r.ids[pair];
    r.places[pair] = static_cast<int>(r.used[32 + id / 32]) + __popc(r.used[id / 32] & ((1u << (id % 32)) - 1));
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
      if (lane < a.top_k) r.take(a, (first + n) * a.top_k + lane, id, weight, write);
    }
    __syncthreads();
  }
}

}  // namespace deltafuse::moe
