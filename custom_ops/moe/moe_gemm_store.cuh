// The experts' products on Hopper: what becomes of a tile's sums. Rows of the result lie as anybody would store them.
#pragma once

#include "moe_gemm_parts.cuh"

namespace deltafuse::moe {
namespace sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ float lesser(float x, float y) {  // NaN stays
  float z;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float greater(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// The activation and its limits without branches: this code is unrolled over all sums, and code that runs once a tile
// costs its fetching. SiLU, GELU by tanh (which is x sigmoid(..)) and squared ReLU; GELU by erf takes the other kernel.
struct Smooth {
  float linear, cubic;        // of the sigmoid's argument, times -log2 e
  float before, after, most;  // limits of the gate and of the other
  bool relu2;
  __device__ __forceinline__ explicit Smooth(const Activity& a) {
    constexpr float kLog2 = -1.4426950408889634f, kInfinity = __builtin_huge_valf();
    const bool silu = a.kind == Activation::kSilu;
    linear = kLog2 * (silu ? 1.0f : 1.5957691216057308f);
    cubic = kLog2 * (silu ? 0.0f : 0.07135481282553f);
    before = a.clamp == Clamp::kBefore ? a.gate_limit : kInfinity;
    after = a.clamp == Clamp::kAfter ? a.gate_limit : kInfinity;
    most = a.clamp == Clamp::kNone ? kInfinity : a.up_limit;
    relu2 = a.kind == Activation::kRelu2;
  }
  __device__ __forceinline__ float operator()(float x) const {
    float power, share;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(power) : "f"(x * fmaf(cubic * x, x, linear)));
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(share) : "f"(1.0f + power));
    const float positive = greater(x, 0.0f);
    return (relu2 ? positive : x) * (relu2 ? positive : share);
  }
  __device__ __forceinline__ float operator()(float gate, float up) const {
    return lesser((*this)(lesser(gate, before)), after) * lesser(greater(up, -most), most);
  }
};

// The lane, read again where it is used: addresses made from it are not kept in registers over the products.
__device__ __forceinline__ int fresh_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;\n" : "=r"(lane));
  return lane;
}

// Four lanes hold a row's words of two groups, a word a lane: each gets two neighbouring words of group t % 2, those
// from 2 (t / 2) on.
__device__ __forceinline__ uint2 join(uint32_t x, uint32_t y, int t) {
  const bool odd = t & 1;
  const uint32_t other = __shfl_xor_sync(~0u, odd ? x : y, 1);
  return odd ? make_uint2(other, y) : make_uint2(x, other);
}
// The same of four groups: lane t gets all of group t.
__device__ __forceinline__ uint4 join(const uint32_t (&w)[4], int t) {
  const uint2 x = join(w[0], w[1], t), y = join(w[2], w[3], t);
  const bool high = t & 2;
  const uint32_t first = __shfl_xor_sync(~0u, high ? x.x : y.x, 2), second = __shfl_xor_sync(~0u, high ? x.y : y.y, 2);
  return high ? make_uint4(first, second, y.x, y.y) : make_uint4(x.x, x.y, first, second);
}
// Two tokens' values of one channel a lane become two channels of one token: token lane / 4 then, channels 2t, 2t + 1.
template <typename T>
__device__ __forceinline__ uint32_t turned(float x, float y) {
  return transpose8(pack_pair(x, y, T()));
}

// Rows as they are: of the second product, or where there is no gate.
template <typename T, int N>
__device__ __forceinline__ void store_rows(const GemmArgs& a, const Work& work, int lane, float (&d)[2][N / 2]) {
  const int t = lane % 4;
  const int channel = work.row_tile * 256 + threadIdx.x / 32 * 32 + t * 8;
  int token = lane / 4;
  T* to = static_cast<T*>(a.out) + int64_t(work.start + token) * a.out_stride + channel;
  const bool inside = channel < a.out_cols;
#pragma unroll
  for (int b = 0; b < N / 8; ++b) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = turned<T>(d[i / 2][4 * b + i % 2 * 2], d[i / 2][4 * b + i % 2 * 2 + 1]);
    }
    const uint4 all = join(words, t);
    if (inside && token < work.count) *reinterpret_cast<uint4*>(to) = all;
    to += 8 * a.out_stride, token += 8;
  }
}

// Gates with their ups: 16 channels of a warp.
template <typename T, int N>
__device__ __forceinline__ void store_joined(const GemmArgs& a, const Work& work, int lane, float (&d)[2][N / 2]) {
  const int t = lane % 4;
  const int channel = work.row_tile * 128 + threadIdx.x / 32 * 16 + (t & 1) * 8 + t / 2 * 4;
  int token = lane / 4;
  T* to = static_cast<T*>(a.out) + int64_t(work.start + token) * a.out_stride + channel;
  const bool inside = channel < a.out_cols;
#pragma unroll
  for (int b = 0; b < N / 8; ++b) {
    const uint2 both = join(turned<T>(d[0][4 * b], d[0][4 * b + 1]), turned<T>(d[1][4 * b], d[1][4 * b + 1]), t);
    if (inside && token < work.count) *reinterpret_cast<uint2*>(to) = both;
    to += 8 * a.out_stride, token += 8;
  }
}

// The same as float8: the tile's 128 channels of a token share a scale.
template <int N>
__device__ __forceinline__ void store_float8(const GemmArgs& a, const Work& work, int lane,
                                             float (*largest)[most_tokens(Pack::kFloat8)], float* inverse,
                                             float (&d)[2][N / 2]) {
  const int consumer = threadIdx.x, t = lane % 4;
#pragma unroll
  for (int b = 0; b < N / 8; ++b) {
    float x = fmaxf(fabsf(d[0][4 * b]), fabsf(d[1][4 * b])), y = fmaxf(fabsf(d[0][4 * b + 1]), fabsf(d[1][4 * b + 1]));
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      x = fmaxf(x, __shfl_xor_sync(~0u, x, step)), y = fmaxf(y, __shfl_xor_sync(~0u, y, step));
    }
    if (lane < 4) *reinterpret_cast<float2*>(&largest[consumer / 32][b * 8 + 2 * t]) = make_float2(x, y);
  }
  named_barrier(1, kConsumers);
  if (consumer < N) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, largest[i][consumer]);
    inverse[consumer] = most > 0.0f ? 448.0f / most : 1.0f;
    if (consumer < work.count) {
      a.out_scale[int64_t(work.start + consumer) * a.out_blocks + work.row_tile] = most > 0.0f ? most / 448.0f : 1.0f;
    }
  }
  named_barrier(1, kConsumers);
  const int channel = work.row_tile * 128 + consumer / 32 * 16 + (t & 1) * 8 + t / 2 * 4;
  int token = lane / 4;
  uint8_t* to = static_cast<uint8_t*>(a.out) + int64_t(work.start + token) * a.out_stride + channel;
#pragma unroll
  for (int b = 0; b < N / 8; ++b) {
    const float2 by = *reinterpret_cast<const float2*>(&inverse[b * 8 + 2 * t]);
    uint32_t bytes[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair = turned<__half>(d[half][4 * b] * by.x, d[half][4 * b + 1] * by.y);
      uint16_t two;
      asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;\n" : "=h"(two) : "r"(pair));
      bytes[half] = two;
    }
    const uint2 both = join(bytes[0], bytes[1], t);
    if (token < work.count) *reinterpret_cast<uint32_t*>(to) = both.x | both.y << 16;
    to += 8 * a.out_stride, token += 8;
  }
}

template <typename T, Pack P, int N>
__device__ __forceinline__ void store(const GemmArgs& a, const Work& work, float (*largest)[most_tokens(Pack::kFloat8)],
                                      float* inverse, float (&d)[2][N / 2]) {
  const int lane = fresh_lane();
  if (a.weights.multiplier) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[0][i] *= work.factor, d[1][i] *= work.factor;
  }
  const Smooth smooth(a.activity);
  if (!(a.activate && a.weights.gated)) {
    if (a.activate) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) d[0][i] = smooth(d[0][i]), d[1][i] = smooth(d[1][i]);
      pin(d[0]), pin(d[1]);
    }
    return store_rows<T, N>(a, work, lane, d);
  }
#pragma unroll
  for (int b = 0; b < N / 8; ++b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      d[half][4 * b] = smooth(d[half][4 * b], d[half][4 * b + 2]);
      d[half][4 * b + 1] = smooth(d[half][4 * b + 1], d[half][4 * b + 3]);
    }
  }
  if constexpr (P == Pack::kFloat8) {
    if (a.out_scale) return store_float8<N>(a, work, lane, largest, inverse, d);
  }
  store_joined<T, N>(a, work, lane, d);
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sm90
}  // namespace deltafuse::moe
