// What both decode kernels do: route a few tokens in each block, stream weights through shared memory, and multiply 16
// weight rows by 8 tokens in a warp. Loops stay rolled: each instruction runs a few times only, and fetching it costs
// more.
#pragma once

#include "moe_fragment.cuh"
#include "moe_select.cuh"

namespace deltafuse::moe {

constexpr int kRoutedTogether = 8;  // tokens whose scores are in shared memory at once

// A call's routing in shared memory. Every block makes its own: cheaper than a launch, and nothing has to be reset.
struct Routing {
  SoftmaxStats* stats;  // [kRoutedTogether]
  float* scores;        // [kRoutedTogether, E], then choices, then [kRoutedTogether, n_group]
  int* ids;             // [N, k]
  float* weights;       // [N, k]
  int* items;           // [N, k] an expert that is used, ascending, and 65536 times the first of 8 of its tokens
  uint32_t* used;       // [32] bits
  int* num_items;

  static __host__ __device__ int together(const RouterArgs& a) {
    return a.tokens < kRoutedTogether ? a.tokens : kRoutedTogether;
  }
  static __host__ __device__ size_t bytes(const RouterArgs& a) {
    const size_t pairs = size_t(a.tokens) * a.top_k;
    const size_t all =
        together(a) * (sizeof(SoftmaxStats) + sizeof(float) * (2 * a.experts + a.n_group)) + 4 * (3 * pairs + 36);
    return (all + 127) / 128 * 128;
  }
  __device__ Routing(unsigned char* base, const RouterArgs& a) {
    const int pairs = a.tokens * a.top_k;
    stats = reinterpret_cast<SoftmaxStats*>(base);
    scores = reinterpret_cast<float*>(stats + together(a));
    ids = reinterpret_cast<int*>(scores + together(a) * (2 * a.experts + a.n_group));
    weights = reinterpret_cast<float*>(ids + pairs);
    items = reinterpret_cast<int*>(weights + pairs);
    used = reinterpret_cast<uint32_t*>(items + pairs);
    num_items = reinterpret_cast<int*>(used + 32);
  }
};

// The pairs of an expert into list, in order; the whole warp. Returns how many.
__device__ __forceinline__ int pairs_of(const Routing& r, int pairs, int expert, int* list) {
  const int lane = threadIdx.x % 32;
  int count = 0;
#pragma unroll 1
  for (int base = 0; base < pairs; base += 32) {
    const bool match = base + lane < pairs && r.ids[base + lane] == expert;
    const unsigned matches = __ballot_sync(~0u, match);
    if (match && list) list[count + __popc(matches & ((1u << lane) - 1))] = base + lane;
    count += __popc(matches);
  }
  __syncwarp();
  return count;
}

// All threads. `write`: also the outputs ids and weights.
static __device__ __noinline__ void route(const RouterArgs& a, const Routing& r, bool write) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int together = Routing::together(a), pairs = a.tokens * a.top_k;
  float* choices = r.scores + together * a.experts;
  float* kept = choices + together * a.experts;
  if (threadIdx.x < 32) r.used[threadIdx.x] = 0;
#pragma unroll 1
  for (int first = 0; first < a.tokens; first += together) {
    const int count = min(together, a.tokens - first);
    if (a.softmax) {
      for (int n = warp; n < count; n += warps) softmax_stats(a, first + n, &r.stats[n]);
      __syncthreads();
    }
    score_tokens(a, first, count, r.stats, r.scores, choices, threadIdx.x, blockDim.x);
    __syncthreads();
#pragma unroll 1
    for (int n = warp; n < count; n += warps) {
      int id;
      float weight;
      select(a, r.scores + n * a.experts, choices + n * a.experts, kept + n * a.n_group, &id, &weight);
      if (lane < a.top_k) {
        const int pair = (first + n) * a.top_k + lane;
        r.ids[pair] = id, r.weights[pair] = weight;
        atomicOr(&r.used[id / 32], 1u << (id % 32));
        if (write && a.ids_out) a.ids_out[pair] = id;
        if (write && a.weights_out) a.weights_out[pair] = weight;
      }
    }
    __syncthreads();
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
    for (uint32_t bits = own; bits; bits &= bits - 1) r.items[at++] = lane * 32 + __ffs(static_cast<int>(bits)) - 1;
    __syncwarp();
    if (a.tokens > 8) {  // experts of more than 8 tokens come again
      const int experts = total;
#pragma unroll 1
      for (int i = 0; i < experts; ++i) {
        const int expert = r.items[i], count = pairs_of(r, pairs, expert, nullptr);
        for (int begin = 8; begin < count; begin += 8) r.items[total++] = expert | begin << 16;
      }
    }
    if (lane == 0) *r.num_items = total;
  }
  __syncthreads();
}

// How a warp's 16 rows of a stage come into shared memory: payload, then scales and zero points, then the next.
struct Slot {
  static __host__ __device__ int bytes(const Packed& w) { return w.payload / 4 + w.tail / 4; }
};

// 16 bytes to shared memory, not waited for.
__device__ __forceinline__ void copy16(unsigned char* shared, const unsigned char* global) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global)
      : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// Starts copying 16 rows (those of `slab` in `unit`) of a stage; the whole warp.
__device__ __forceinline__ void fetch_slab(const Packed& w, const unsigned char* stage, int unit, int slab,
                                           unsigned char* slot) {
  const int lane = threadIdx.x % 32;
  const bool rows = w.pack == Pack::kPlain || w.pack == Pack::kFloat8;  // else in the order of lanes
  const unsigned char* payload = stage + unit * w.payload + slab * (rows ? 2048 : 512) + lane * 16;
  const int step = rows ? 512 : 2048;
#pragma unroll 1
  for (int i = 0; i < w.payload / 2048; ++i) copy16(slot + i * 512 + lane * 16, payload + i * step);
  const unsigned char* tail = stage + 4 * w.payload + unit * w.tail;
  const int bytes = w.pack == Pack::kFloat8 ? 64 : 32;  // of 16 rows' scales
#pragma unroll 1
  for (int i = lane; i < w.tail / 64; i += 32) {
    const int part = i * 16 / bytes, within = i * 16 % bytes;
    copy16(slot + w.payload / 4 + i * 16, tail + part * 4 * bytes + slab * bytes + within);
  }
}

// total += factor * weights of a slot times 8 tokens. right(p): the lane's right operand of steps 2p and 2p + 1.
template <typename T, Pack P, typename Right>
__device__ __forceinline__ void multiply_slot(const Packed& w, const unsigned char* slot, Right right, float factor,
                                              float (&total)[4]) {
  constexpr bool kInteger = Raw<T, P>::kInteger;
  constexpr int kSteps = Shape<P>::kSteps;
  constexpr int kPerPiece = P == Pack::kInt4 || P == Pack::kFloat8 ? 4 : 2;  // steps of a lane's 16 bytes
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const unsigned char* tail = slot + w.payload / 4;
  float sum[4] = {}, high[4] = {}, ones[4] = {};
  auto flush = [&](float s0, float s1, float z0, float z1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float all = Raw<T, P>::kHalves ? fmaf(16.0f, high[i], sum[i]) : sum[i];
      total[i] += (i < 2 ? s0 : s1) * factor * fmaf(-(Raw<T, P>::kBase + (i < 2 ? z0 : z1)), ones[i], all);
      sum[i] = high[i] = ones[i] = 0.0f;
    }
  };
  auto flush_integers = [&](int sub) {
    const T* values = reinterpret_cast<const T*>(tail) + sub * 16 + g;
    flush(to_float(values[0]), to_float(values[8]), w.zeros ? to_float(values[w.sub * 16]) : Raw<T, P>::kMiddle,
          w.zeros ? to_float(values[w.sub * 16 + 8]) : Raw<T, P>::kMiddle);
  };
  const bool fine = kInteger && w.sub != 1;
#pragma unroll
  for (int piece = 0; piece < kSteps / kPerPiece; ++piece) {
    uint4 x, y;
    if constexpr (kInteger) {
      x = *reinterpret_cast<const uint4*>(slot + piece * 512 + lane * 16);
    } else {
      const unsigned char* row = slot + g * 128 + ((piece * 4 + t) ^ g) * 16;
      x = *reinterpret_cast<const uint4*>(row), y = *reinterpret_cast<const uint4*>(row + 1024);
    }
#pragma unroll
    for (int i = 0; i < kPerPiece; i += 2) {
      const int p = (piece * kPerPiece + i) / 2;
      const uint4 b = right(p);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t a[4], h[4];
        const uint32_t b0 = j ? b.z : b.x, b1 = j ? b.w : b.y;
        if constexpr (kInteger) {
          Raw<T, P>::integers(x, i + j, a, h);
        } else {
          Raw<T, P>::floats(x, y, i + j, a);
        }
        mma(sum, a, b0, b1, T());
        if constexpr (Raw<T, P>::kHalves) mma(high, h, b0, b1, T());
        if constexpr (kInteger) {
          const uint32_t one = twice<T>(1.0f);
          const uint32_t o[4] = {one, one, one, one};
          mma(ones, o, b0, b1, T());
        }
      }
      if constexpr (kInteger) {
        if (fine) flush_integers(p);
      }
    }
  }
  if constexpr (kInteger) {
    if (!fine) flush_integers(0);
  } else if constexpr (P == Pack::kFloat8) {
    const float* scale = reinterpret_cast<const float*>(tail) + g;
    flush(scale[0] * Raw<T, P>::kFactor, scale[8] * Raw<T, P>::kFactor, 0.0f, 0.0f);
  } else {
    flush(1.0f, 1.0f, 0.0f, 0.0f);
  }
}

// Columns of a stage.
template <Pack P>
constexpr int kStageCols = P == Pack::kPlain ? 64 : 128;

}  // namespace deltafuse::moe
