// What both decode kernels do: route a few tokens in each block, and products of 16 weight rows by 8 tokens in a warp.
#pragma once

#include "moe_fragment.cuh"
#include "moe_select.cuh"

namespace deltafuse::moe {

// A call's routing in shared memory. Every block makes its own: cheaper than a launch, and nothing has to be reset.
struct Routing {
  SoftmaxStats* stats;  // [N]
  uint32_t* keys;       // [N, E + n_group]
  int* ids;             // [N, k]
  float* weights;       // [N, k]
  int* items;           // the experts that are used, ascending
  uint32_t* used;       // [32] bits
  int* num_items;

  static __host__ __device__ size_t bytes(const RouterArgs& a) {
    const size_t pairs = size_t(a.tokens) * a.top_k;
    const size_t all =
        sizeof(SoftmaxStats) * a.tokens + 4 * (size_t(a.tokens) * (a.experts + a.n_group) + 3 * pairs + 36);
    return (all + 127) / 128 * 128;
  }
  __device__ Routing(unsigned char* base, const RouterArgs& a) {
    const int pairs = a.tokens * a.top_k;
    stats = reinterpret_cast<SoftmaxStats*>(base);
    keys = reinterpret_cast<uint32_t*>(stats + a.tokens);
    ids = reinterpret_cast<int*>(keys + a.tokens * (a.experts + a.n_group));
    weights = reinterpret_cast<float*>(ids + pairs);
    items = reinterpret_cast<int*>(weights + pairs);
    used = reinterpret_cast<uint32_t*>(items + pairs);
    num_items = reinterpret_cast<int*>(used + 32);
  }
};

// All threads. `write`: also the outputs ids and weights.
__device__ __forceinline__ void route(const RouterArgs& a, const Routing& r, bool write) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int row = a.experts + a.n_group;
  if (a.softmax) {
    for (int n = warp; n < a.tokens; n += warps) {
      const SoftmaxStats stats = softmax_stats(a, n, lane);
      if (lane == 0) r.stats[n] = stats;
    }
  }
  if (threadIdx.x < 32) r.used[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < a.tokens * a.experts; i += blockDim.x) {
    const int n = i / a.experts, e = i % a.experts;
    r.keys[n * row + e] = choice_of(a, a.softmax ? r.stats[n] : SoftmaxStats{}, n, e);
  }
  __syncthreads();
  for (int n = warp; n < a.tokens; n += warps) {
    int id;
    float weight;
    uint32_t* keys = r.keys + n * row;
    select(a, a.softmax ? r.stats[n] : SoftmaxStats{}, n, keys, keys + a.experts, lane, &id, &weight);
    if (lane < a.top_k) {
      const int pair = n * a.top_k + lane;
      r.ids[pair] = id, r.weights[pair] = weight;
      atomicOr(&r.used[id / 32], 1u << (id % 32));
      if (write && a.ids_out) a.ids_out[pair] = id;
      if (write && a.weights_out) a.weights_out[pair] = weight;
    }
  }
  __syncthreads();
  if (warp == 0) {
    uint32_t bits = r.used[lane];
    int upto = __popc(bits);
    const int own = upto;
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += below;
    }
    if (lane == 31) *r.num_items = upto;
    for (int at = upto - own; bits; bits &= bits - 1) r.items[at++] = lane * 32 + __ffs(bits) - 1;
  }
  __syncthreads();
}

// A lane's words and scales of 128 columns of 16 weight rows.
template <typename T, Pack P>
struct Block {
  static constexpr int kUnits = Shape<P>::kUnitsPerBlock;
  uint4 words[kUnits][Shape<P>::kWords];
  T scale[2], zero[2];  // rows g, g + 8; integers with one scale a block
  float wide[2];        // float8

  // `stage`: the block's first stage; `row`: g in the unit.
  __device__ __forceinline__ void load(const Packed& w, const unsigned char* stage, int unit, int warp, int lane) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      load_unit<P>(words[u], stage + u * w.stage_bytes() + unit * w.payload, warp, lane);
    }
    const unsigned char* tail = stage + 4 * w.payload + unit * w.tail;
    const int row = warp * 16 + lane / 4;
    if constexpr (Raw<T, P>::kInteger) {
      if (w.sub == 1) {
        const T* values = reinterpret_cast<const T*>(tail);
        scale[0] = values[row], scale[1] = values[row + 8];
        if (w.zeros) zero[0] = values[64 + row], zero[1] = values[64 + row + 8];
      }
    } else if constexpr (P == Pack::kFloat8) {
      wide[0] = reinterpret_cast<const float*>(tail)[row], wide[1] = reinterpret_cast<const float*>(tail)[row + 8];
    }
  }

  // total += weights times 8 tokens. right(p): the lane's right operand of steps 2p and 2p + 1.
  template <typename Right>
  __device__ __forceinline__ void multiply(const Packed& w, const unsigned char* stage, int unit, int warp, int lane,
                                           Right right, float factor, float (&total)[4]) const {
    float sum[4] = {}, high[4] = {}, ones[4] = {};
    auto step = [&](int s, uint32_t b0, uint32_t b1) {
      uint32_t a[4], h[4];
      Raw<T, P>::step(words[s / Shape<P>::kSteps], s % Shape<P>::kSteps, a, h);
      mma(sum, a, b0, b1, T());
      if constexpr (Raw<T, P>::kHalves) mma(high, h, b0, b1, T());
      if constexpr (Raw<T, P>::kInteger) {
        const uint32_t one = twice<T>(1.0f);
        const uint32_t o[4] = {one, one, one, one};
        mma(ones, o, b0, b1, T());
      }
    };
    auto flush = [&](float s0, float s1, float z0, float z1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float all = Raw<T, P>::kHalves ? fmaf(16.0f, high[i], sum[i]) : sum[i];
        total[i] += (i < 2 ? s0 : s1) * factor * fmaf(-(Raw<T, P>::kBase + (i < 2 ? z0 : z1)), ones[i], all);
        sum[i] = high[i] = ones[i] = 0.0f;
      }
    };
    const bool coarse = !Raw<T, P>::kInteger || w.sub == 1;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const uint4 b = right(p);
      step(2 * p, b.x, b.y);
      step(2 * p + 1, b.z, b.w);
      if constexpr (Raw<T, P>::kInteger) {
        if (!coarse) {  // four scales a block
          const T* values =
              reinterpret_cast<const T*>(stage + 4 * w.payload + unit * w.tail) + p * 64 + warp * 16 + lane / 4;
          flush(to_float(values[0]), to_float(values[8]), w.zeros ? to_float(values[256]) : Raw<T, P>::kMiddle,
                w.zeros ? to_float(values[264]) : Raw<T, P>::kMiddle);
        }
      }
    }
    if constexpr (Raw<T, P>::kInteger) {
      if (coarse) {
        flush(to_float(scale[0]), to_float(scale[1]), w.zeros ? to_float(zero[0]) : Raw<T, P>::kMiddle,
              w.zeros ? to_float(zero[1]) : Raw<T, P>::kMiddle);
      }
    } else if constexpr (P == Pack::kFloat8) {
      flush(wide[0] * Raw<T, P>::kFactor, wide[1] * Raw<T, P>::kFactor, 0.0f, 0.0f);
    } else {
      flush(1.0f, 1.0f, 0.0f, 0.0f);
    }
  }
};

// Blocks whose loads are in flight together.
template <Pack P>
constexpr int kBlocksAhead = P == Pack::kInt4    ? 3
                             : P == Pack::kPlain ? 1
                                                 : 2;

}  // namespace deltafuse::moe
