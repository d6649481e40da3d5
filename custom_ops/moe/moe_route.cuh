// A few tokens' routing in a block's shared memory, and the list of experts that they use.
#pragma once

#include "moe_decode.h"
#include "moe_select.cuh"

namespace deltafuse::moe {

constexpr int kRoutedTogether = 8;  // tokens whose scores are in shared memory at once

// Every block makes its own: cheaper than a launch, and nothing has to be reset.
struct Routing {
  int* ids;        // [N, k]
  float* weights;  // [N, k]
  int* items;      // [N, k] an expert that is used, and 65536 times the first of 8 of its tokens
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
  __device__ Routing(unsigned char* base, const RouterArgs& a) {
    const int pairs = a.tokens * a.top_k;
    ids = reinterpret_cast<int*>(base);
    weights = reinterpret_cast<float*>(ids + pairs);
    items = reinterpret_cast<int*>(weights + pairs);
    places = items + pairs;
    used = reinterpret_cast<uint32_t*>(places + pairs);
    counts = reinterpret_cast<int*>(used + 64);
    stats = reinterpret_cast<SoftmaxStats*>(base + kept_bytes(a));
    candidates = reinterpret_cast<Candidate*>(stats + together(a));
    scores = reinterpret_cast<float*>(candidates + together(a) * kCandidates);
  }
};

// The pairs of an expert from the `begin`-th on, at most 8, into list, in order; the whole warp. Returns how many there
// are from there on.
__device__ __forceinline__ int pairs_of(const Routing& r, int pairs, int expert, int begin, int* list) {
  const int lane = threadIdx.x % 32;
  int count = -begin;
#pragma unroll 1
  for (int base = 0; base < pairs; base += 32) {
    const bool match = base + lane < pairs && r.ids[base + lane] == expert;
    const unsigned matches = __ballot_sync(~0u, match);
    const int at = count + __popc(matches & ((1u << lane) - 1));
    if (match && list && at >= 0 && at < 8) list[at] = base + lane;
    count += __popc(matches);
  }
  __syncwarp();
  return count;
}

// What the tokens use, from ids: ascending, experts of more than 8 tokens again after that; all threads.
__device__ __forceinline__ void list_items(const RouterArgs& a, const Routing& r) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = a.tokens * a.top_k;
  if (a.tokens == 1) {  // as they are
    if (static_cast<int>(threadIdx.x) < pairs) {
      r.items[threadIdx.x] = r.ids[threadIdx.x];
      r.places[threadIdx.x] = threadIdx.x;
    }
    if (threadIdx.x == 0) r.counts[0] = r.counts[1] = pairs;
    __syncthreads();
    return;
  }
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
    if (a.tokens > 8) {
      const int experts = total;
#pragma unroll 1
      for (int i = 0; i < experts; ++i) {
        const int expert = r.items[i], count = pairs_of(r, pairs, expert, 0, nullptr);
        for (int begin = 8; begin < count; begin += 8) {
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

// All threads. `rehearse`: the same instructions on other numbers, to have them in the cache when the logits come.
// `write`: also the outputs ids and weights.
__device__ __forceinline__ void route(const RouterArgs& a, const Routing& r, bool rehearse, bool write) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int together = Routing::together(a), tokens = rehearse ? together : a.tokens;
  float* choices = r.scores + together * a.experts;
  float* kept = choices + together * a.experts;
  if (threadIdx.x < 32) r.used[threadIdx.x] = 0;
#pragma unroll 1
  for (int first = 0; first < tokens; first += together) {
    const int count = min(together, tokens - first);
    auto logit = [&](int token, int expert) {  // rehearsed: numbers without order
      return rehearse ? static_cast<float>(static_cast<uint32_t>(expert) * 0x9e3779b1u >> 16) * 0x1p-16f
                      : logit_of(a, first + token, expert);
    };
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
      if (lane < a.top_k) {
        const int pair = (first + n) * a.top_k + lane;
        r.ids[pair] = id, r.weights[pair] = weight;
        if (a.tokens > 1) atomicOr(&r.used[id / 32], 1u << (id % 32));
        if (write && a.ids_out) a.ids_out[pair] = id;
        if (write && a.weights_out) a.weights_out[pair] = weight;
      }
    }
    __syncthreads();
  }
  if (tokens == a.tokens) list_items(a, r);
}

}  // namespace deltafuse::moe
