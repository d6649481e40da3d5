// Device helpers that the KDA kernels share: number formats, wide loads, gates, and which tokens a chunk holds.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kda_launch.h"
#include "kda_ptx.cuh"

#ifndef KDA_DYNAMIC_SHARED
#define KDA_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif

namespace deltafuse::kda {

// How a kernel computes: T is the tensors' element, E a matrix operand's, kTerms how many E stand for one number.
struct NumbersBF16 {
  using T = __nv_bfloat16;
  using E = __nv_bfloat16;
  static constexpr int kTerms = 1;
};
struct NumbersF16 {
  using T = __half;
  using E = __half;
  static constexpr int kTerms = 1;
};
struct NumbersF32 {  // two bf16 terms: 16 bits of mantissa and float32's range
  using T = float;
  using E = __nv_bfloat16;
  static constexpr int kTerms = 2;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Scalars whose type is known at run time only: the states', and everything of the decode kernel.
__device__ __forceinline__ float load_any(const void* p, int64_t i, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(p)[i];
  if (dtype == DType::kFloat16) return __half2float(static_cast<const __half*>(p)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
}
__device__ __forceinline__ void store_any(void* p, int64_t i, DType dtype, float x) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(p)[i] = x;
  } else if (dtype == DType::kFloat16) {
    static_cast<__half*>(p)[i] = __float2half_rn(x);
  } else {
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(x);
  }
}

// Two floats as a pair of E; with two terms, out[1] holds what out[0] lost. Half precision saturates: states past its
// range stay finite.
__device__ __forceinline__ uint32_t pack(float x, float y, __nv_bfloat16) {
  const __nv_bfloat162 p = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&p);
}
__device__ __forceinline__ uint32_t pack(float x, float y, __half) {
  const __half2 p = __floats2half2_rn(fminf(fmaxf(x, -65504.f), 65504.f), fminf(fmaxf(y, -65504.f), 65504.f));
  return *reinterpret_cast<const uint32_t*>(&p);
}
__device__ __forceinline__ float2 unpack(uint32_t p, __nv_bfloat16) {
  return make_float2(__uint_as_float(p << 16), __uint_as_float(p & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack(uint32_t p, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&p));
}
template <typename N>
__device__ __forceinline__ void split(float x, float y, uint32_t (&out)[N::kTerms]) {
  using E = typename N::E;
  out[0] = pack(x, y, E());
  if constexpr (N::kTerms == 2) {
    const float2 high = unpack(out[0], E());
    out[1] = pack(x - high.x, y - high.y, E());
  }
}
template <typename N>
__device__ __forceinline__ float2 join(const uint32_t (&p)[N::kTerms]) {
  using E = typename N::E;
  float2 x = unpack(p[0], E());
  if constexpr (N::kTerms == 2) {
    const float2 low = unpack(p[1], E());
    x.x += low.x;
    x.y += low.y;
  }
  return x;
}

// A 16 x 16 operand tile as one lane holds it: rows (lane / 4, + 8), pairs (2 (lane % 4), + 8):
// x row, first pair; y row + 8, first pair; z row, second pair; w row + 8, second pair.
template <typename N>
struct Tile {
  uint4 term[N::kTerms];
};
template <typename N>
__device__ __forceinline__ Tile<N> load_tile(const unsigned char* p, int64_t term_stride, int lane) {
  Tile<N> t;
#pragma unroll
  for (int i = 0; i < N::kTerms; ++i) t.term[i] = *reinterpret_cast<const uint4*>(p + i * term_stride + lane * 16);
  return t;
}
template <typename N>
__device__ __forceinline__ void store_tile(unsigned char* p, int64_t term_stride, int lane, const Tile<N>& t) {
#pragma unroll
  for (int i = 0; i < N::kTerms; ++i) *reinterpret_cast<uint4*>(p + i * term_stride + lane * 16) = t.term[i];
}
// From float32: (row, first pair), (row + 8, first), (row, second), (row + 8, second).
template <typename N>
__device__ __forceinline__ Tile<N> make_tile(float x0, float x1, float y0, float y1, float z0, float z1, float w0,
                                             float w1) {
  uint32_t x[N::kTerms], y[N::kTerms], z[N::kTerms], w[N::kTerms];
  split<N>(x0, x1, x), split<N>(y0, y1, y), split<N>(z0, z1, z), split<N>(w0, w1, w);
  Tile<N> t;
#pragma unroll
  for (int i = 0; i < N::kTerms; ++i) t.term[i] = make_uint4(x[i], y[i], z[i], w[i]);
  return t;
}
template <typename N>
__device__ __forceinline__ Tile<N> transpose_parts(const Tile<N>& t) {  // each 8 x 8 part by itself
  Tile<N> r;
#pragma unroll
  for (int i = 0; i < N::kTerms; ++i) {
    r.term[i] = make_uint4(ptx::transpose8(t.term[i].x), ptx::transpose8(t.term[i].y), ptx::transpose8(t.term[i].z),
                           ptx::transpose8(t.term[i].w));
  }
  return r;
}
// As a right operand a tile is wanted with the two pairs of a row side by side: (row, first), (row, second), (row + 8,
// first), (row + 8, second). Its columns are the tile's rows.
template <typename N>
__device__ __forceinline__ Tile<N> as_right(const Tile<N>& t) {
  Tile<N> r;
#pragma unroll
  for (int i = 0; i < N::kTerms; ++i) r.term[i] = make_uint4(t.term[i].x, t.term[i].z, t.term[i].y, t.term[i].w);
  return r;
}
template <typename N>
__device__ __forceinline__ void multiply_terms(float (&d)[4], const Tile<N>& a, const uint2 (&b)[N::kTerms]) {
  using E = typename N::E;
  ptx::mma(d, a.term[0].x, a.term[0].y, a.term[0].z, a.term[0].w, b[0].x, b[0].y, E());
  if constexpr (N::kTerms == 2) {  // high high + high low + low high
    ptx::mma(d, a.term[0].x, a.term[0].y, a.term[0].z, a.term[0].w, b[1].x, b[1].y, E());
    ptx::mma(d, a.term[1].x, a.term[1].y, a.term[1].z, a.term[1].w, b[0].x, b[0].y, E());
  }
}
// d0, d1 += A B for columns 0-7 and 8-15 of a right operand.
template <typename N>
__device__ __forceinline__ void multiply_low(float (&d)[4], const Tile<N>& a, const Tile<N>& right) {
  uint2 b[N::kTerms];
#pragma unroll
  for (int i = 0; i < N::kTerms; ++i) b[i] = make_uint2(right.term[i].x, right.term[i].y);
  multiply_terms<N>(d, a, b);
}
template <typename N>
__device__ __forceinline__ void multiply_high(float (&d)[4], const Tile<N>& a, const Tile<N>& right) {
  uint2 b[N::kTerms];
#pragma unroll
  for (int i = 0; i < N::kTerms; ++i) b[i] = make_uint2(right.term[i].z, right.term[i].w);
  multiply_terms<N>(d, a, b);
}
template <typename N>
__device__ __forceinline__ void multiply(float (&d0)[4], float (&d1)[4], const Tile<N>& a, const Tile<N>& right) {
  multiply_low<N>(d0, a, right);
  multiply_high<N>(d1, a, right);
}

// Element m (0..15) of an operand tile's pair axis is channel perm(m): a lane's four elements are neighbours in memory.
// Key channels: two tiles of a group of 32, eight neighbours a lane. Value channels: one tile of 16, four a lane.
__device__ __forceinline__ int key_channel(int tile, int m) {
  return (tile >> 1) * 32 + ((m & 7) >> 1) * 8 + (tile & 1) * 4 + (m >> 3) * 2 + (m & 1);
}
__device__ __forceinline__ int value_channel(int tile, int m) {
  return tile * 16 + ((m & 7) >> 1) * 4 + (m >> 3) * 2 + (m & 1);
}

// Wide loads: 8 or 4 neighbours as float32.
template <typename T>
__device__ __forceinline__ void load8(const T* p, float (&x)[8]) {
  if constexpr (sizeof(T) == 4) {
    const float4 a = *reinterpret_cast<const float4*>(p), b = *reinterpret_cast<const float4*>(p + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else {
    const uint4 a = *reinterpret_cast<const uint4*>(p);
    const uint32_t w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = unpack(w[i], T());
      x[2 * i] = f.x, x[2 * i + 1] = f.y;
    }
  }
}
template <typename T>
__device__ __forceinline__ void load4(const T* p, float (&x)[4]) {
  if constexpr (sizeof(T) == 4) {
    const float4 a = *reinterpret_cast<const float4*>(p);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
  } else {
    const uint2 a = *reinterpret_cast<const uint2*>(p);
    const float2 f = unpack(a.x, T()), g = unpack(a.y, T());
    x[0] = f.x, x[1] = f.y, x[2] = g.x, x[3] = g.y;
  }
}
template <typename T>
__device__ __forceinline__ void store4(T* p, const float (&x)[4]) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    const T y[4] = {from_float<T>(x[0]), from_float<T>(x[1]), from_float<T>(x[2]), from_float<T>(x[3])};
    *reinterpret_cast<uint2*>(p) = *reinterpret_cast<const uint2*>(y);
  }
}

__device__ __forceinline__ float fast_exp(float x) { return ptx::exp2(x * 1.4426950408889634f); }
__device__ __forceinline__ float sigmoid(float x) { return ptx::reciprocal(1.f + fast_exp(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
// exp(x) for x <= 0 without a systematic error near 0, where thousands of these are multiplied up.
__device__ __forceinline__ float exp_decay(float x) {
  const float near = fmaf(x, fmaf(x, fmaf(x, fmaf(x, 1.f / 24, 1.f / 6), 0.5f), 1.f), 1.f);
  const float far = fast_exp(x);
  return fabsf(x) < 0.0625f ? near : far;
}
__device__ __forceinline__ float softplus(float x) {
  const float e = fast_exp(-fabsf(x));
  const float tail = e < 0.03125f ? e * fmaf(e, fmaf(e, 1.f / 3, -0.5f), 1.f) : __logf(1.f + e);
  return fmaxf(x, 0.f) + tail;
}
__device__ __forceinline__ float log_decay_sigmoid(float x, float rate, float lower_bound) {
  return lower_bound * ptx::reciprocal(1.f + fast_exp(-rate * x));
}
// exp of the log decay of one channel. rate: exp(A_log) of the head.
__device__ __forceinline__ float decay_of(float x, GateActivation activation, float rate, float lower_bound) {
  if (activation == GateActivation::kSoftplus) x = -rate * softplus(x);
  if (activation == GateActivation::kSigmoid) x = log_decay_sigmoid(x, rate, lower_bound);
  return exp_decay(x);
}
__device__ __forceinline__ float norm_factor(float sum, L2Norm kind, float eps) {
  if (kind == L2Norm::kSum) return rsqrtf(sum + eps);
  if (kind == L2Norm::kMax) return 1.f / fmaxf(sqrtf(sum), eps);
  return 1.f;
}

// Where sequence n lies: rows [begin, end), chunks' slots from `slot`. Lengths that make no sense are cut to size.
struct Span {
  int64_t begin, end, slot;
};
__device__ __forceinline__ int64_t boundary(const Sequences& s, int64_t n) {
  const int64_t x = s.is_int64 ? static_cast<const int64_t*>(s.cu_seqlens)[n]
                               : static_cast<int64_t>(static_cast<const int32_t*>(s.cu_seqlens)[n]);
  return x < 0 ? 0 : x > s.seq_len ? s.seq_len : x;
}
__device__ __forceinline__ Span span_of(const Sequences& s, int64_t n) {
  if (!s.cu_seqlens) return {n * s.seq_len, (n + 1) * s.seq_len, n * ((s.seq_len + kChunk - 1) / kChunk)};
  const int64_t begin = boundary(s, n), end = boundary(s, n + 1);
  return {begin, end < begin ? begin : end, begin / kChunk + n};
}
// The sequence whose slots hold `slot`; the slot may lie past its last chunk.
__device__ __forceinline__ int64_t sequence_of_slot(const Sequences& s, int64_t slot) {
  if (!s.cu_seqlens) return slot / ((s.seq_len + kChunk - 1) / kChunk);
  int64_t low = 0, high = s.num_seqs;  // the last n with boundary(n) / kChunk + n <= slot
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (boundary(s, middle) / kChunk + middle <= slot) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace deltafuse::kda
