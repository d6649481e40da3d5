// Prefill, first kernel: its arguments, its shared memory, and the small steps it is made of.
#pragma once

#include "kda_device.cuh"

namespace deltafuse::kda {

struct PrepareArgs {
  Sequences seqs;
  Rows rows;
  const void *g, *beta;
  const float *A_log, *dt_bias;
  unsigned char *units, *u;
  int32_t heads, v_heads, k, v;
  float scale, l2norm_eps, lower_bound, beta_scale;
  L2Norm l2norm;
  GateActivation gate;
  int32_t beta_sigmoid;
  int32_t staged;  // q, k and g of the chunk are copied to shared memory first
};

// Shared memory of a block, in bytes.
struct PrepareShared {
  int terms, k;
  __host__ __device__ int column_buffer() const { return terms * 3 * 2 * kTileBytes; }  // keys of three earlier blocks
  __host__ __device__ int totals_offset() const { return 2 * column_buffer(); }
  __host__ __device__ int a_offset() const { return totals_offset() + 2 * 4 * 32 * 4; }
  __host__ __device__ int inverse_offset() const { return a_offset() + terms * 6 * kTileBytes; }
  __host__ __device__ int square_offset() const { return inverse_offset() + terms * 4 * kTileBytes; }
  __host__ __device__ int beta_offset() const { return square_offset() + 4 * 16 * 16 * 4; }
  __host__ __device__ int bias_offset() const { return beta_offset() + kChunk * 4; }
  __host__ __device__ int keys_offset() const { return bias_offset() + k * 4; }
  // Decayed keys, and what of q, k and g is staged: a region each, keys over k.
  __host__ __device__ int region() const { return terms * 4 * (k / 16) * kTileBytes; }
  __host__ __device__ int bytes(bool staged) const { return keys_offset() + (staged ? 3 : 1) * region(); }
};

// Eight neighbouring channels as a lane staged them for itself: pieces of 16 bytes, lane by lane.
template <typename N>
__device__ __forceinline__ void stage8(unsigned char* at, int64_t stride, const typename N::T* from) {
#pragma unroll
  for (int i = 0; i < N::kTerms; ++i) ptx::cp_async16(at + i * stride, reinterpret_cast<const char*>(from) + 16 * i);
}
template <typename N>
__device__ __forceinline__ void unstage8(const unsigned char* at, int64_t stride, float (&x)[8]) {
  typename N::T y[8];
#pragma unroll
  for (int i = 0; i < N::kTerms; ++i) reinterpret_cast<uint4*>(y)[i] = *reinterpret_cast<const uint4*>(at + i * stride);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = to_float(y[i]);
}

// Decays exp(g) of 2 x 8 elements; one branch for all of them, so that their long chains overlap. kPrecise: no
// systematic error near 1 (16-bit results do not show it).
template <bool kPrecise>
__device__ __forceinline__ void make_decays(float (&x)[2][8], const float (&bias)[8], GateActivation activation,
                                            float rate, float lower_bound) {
  constexpr float kLog2e = 1.4426950408889634f;
  if (activation == GateActivation::kSigmoid) {
    const float slope = -rate * kLog2e;
    float offset[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) offset[i] = slope * bias[i];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[s][i] = ptx::reciprocal(1.f + ptx::exp2(fmaf(x[s][i], slope, offset[i])));
    }
  } else {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[s][i] += bias[i];
    }
    if (activation == GateActivation::kSoftplus) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[s][i] = softplus(x[s][i]);
      }
    }
  }
  const float factor = activation == GateActivation::kSigmoid    ? lower_bound
                       : activation == GateActivation::kSoftplus ? -rate
                                                                 : 1.f;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[s][i] = kPrecise ? exp_decay(factor * x[s][i]) : ptx::exp2(factor * kLog2e * x[s][i]);
    }
  }
}

// An operand tile of 16 tokens and 16 channels: x[token row][the lane's eight channels], `half` 0 or 1 of the 32.
template <typename N>
__device__ __forceinline__ Tile<N> token_tile(const float (&x)[2][8], int half) {
  const int i = 4 * half;
  return make_tile<N>(x[0][i], x[0][i + 1], x[1][i], x[1][i + 1], x[0][i + 2], x[0][i + 3], x[1][i + 2], x[1][i + 3]);
}
// Rows 0-7 from x, rows 8-15 from y, eight tokens each.
template <typename N>
__device__ __forceinline__ Tile<N> stacked_tile(const float (&x)[8], const float (&y)[8], int half) {
  const int i = 4 * half;
  return make_tile<N>(x[i], x[i + 1], y[i], y[i + 1], x[i + 2], x[i + 3], y[i + 2], y[i + 3]);
}
}  // namespace deltafuse::kda
