// Device helpers that the LatentAttention kernels share: number formats, rotation, masks, faults.
#pragma once

#include <cuda_fp8.h>

#include "mla_launch.h"
#include "mla_ptx.cuh"

namespace deltafuse::mla {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kFloat8Max = 448.0f;

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
__device__ __forceinline__ uint32_t pack(float x, float y, __nv_bfloat16) {
  const __nv_bfloat162 p = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&p);
}
__device__ __forceinline__ uint32_t pack(float x, float y, __half) {
  const __half2 p = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&p);
}

__device__ __forceinline__ float float8_value(uint8_t code) {
  const __half_raw h = __nv_cvt_fp8_to_halfraw(code, __NV_E4M3);
  return __half2float(__half(h));
}
__device__ __forceinline__ uint8_t float8_code(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

// One channel of the latent of the token at `row`.
template <typename T>
__device__ __forceinline__ float load_latent(const View& v, int64_t row, int channel, int width) {
  const int64_t i = row * v.latent_row + channel;
  if (v.type == CacheType::kSame) return to_float(static_cast<const T*>(v.latent)[i]);
  if (v.type == CacheType::kInt8) return static_cast<const int8_t*>(v.latent)[i] * v.scale[channel];
  const int groups = (width + kFloat8Group - 1) / kFloat8Group;
  return float8_value(static_cast<const uint8_t*>(v.latent)[i]) * v.scale[row * groups + channel / kFloat8Group];
}

__device__ __forceinline__ void report(const Params& p, Fault fault) {
  if (p.fault) *const_cast<volatile uint32_t*>(p.fault) = static_cast<uint32_t>(fault);
}

// What is added to a score (negative infinity where it is masked out).
template <typename T, typename Masked>
__device__ __forceinline__ float mask_value(const Masked& p, int64_t i) {
  switch (p.mask_type) {
    case MaskType::kT:
      return to_float(static_cast<const T*>(p.attn_mask)[i]);
    case MaskType::kFloat32:
      return static_cast<const float*>(p.attn_mask)[i];
    case MaskType::kBool:
      return static_cast<const uint8_t*>(p.attn_mask)[i] ? 0.0f : -INFINITY;
    default:
      return 0.0f;
  }
}

template <typename T>
__device__ __forceinline__ float mask_value(const Params& p, int64_t b, int64_t h, int64_t s, int64_t t) {
  return mask_value<T>(p,
                       b * p.mask_strides[0] + h * p.mask_strides[1] + s * p.mask_strides[2] + t * p.mask_strides[3]);
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// exp2(x - y) where both may be minus infinity.
__device__ __forceinline__ float ratio(float x, float y) { return x == y ? 1.0f : ptx::exp2(x - y); }

// One pair of the rotation: which channels are read (i0, i1), which written (o0, o1), and their cosines and sines.
struct Pair {
  int i0, i1, o0, o1;
  float c0, c1, s0, s1;
};
template <typename T>
__device__ __forceinline__ Pair pair_of(const Params& p, int64_t table_row, int j) {
  Pair r;
  const int half = p.qk_rope_head_dim / 2;
  r.i0 = p.rope == Rope::kHalf ? j : 2 * j;
  r.i1 = p.rope == Rope::kHalf ? j + half : 2 * j + 1;
  r.o0 = p.rope == Rope::kInterleaved ? 2 * j : j;
  r.o1 = p.rope == Rope::kInterleaved ? 2 * j + 1 : j + half;
  const bool whole = p.cos_width == p.qk_rope_head_dim;
  const int64_t at0 = table_row * p.cos_width + (whole ? r.o0 : j);
  const int64_t at1 = table_row * p.cos_width + (whole ? r.o1 : j);
  if (p.cos_float32) {
    const float *c = static_cast<const float*>(p.cos), *s = static_cast<const float*>(p.sin);
    r.c0 = c[at0], r.c1 = c[at1], r.s0 = s[at0], r.s1 = s[at1];
  } else {
    const T *c = static_cast<const T*>(p.cos), *s = static_cast<const T*>(p.sin);
    r.c0 = to_float(c[at0]), r.c1 = to_float(c[at1]), r.s0 = to_float(s[at0]), r.s1 = to_float(s[at1]);
  }
  return r;
}

// Launches a kernel without shared memory of its own; with pdl it may begin while the one before ends.
template <typename... Args>
cudaError_t launch(void (*kernel)(Args...), dim3 grid, int threads, bool pdl, cudaStream_t stream, Args... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = pdl ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace deltafuse::mla
