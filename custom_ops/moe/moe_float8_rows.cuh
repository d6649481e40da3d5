// Rows of 16-bit numbers as float8 with one scale a row.
#pragma once

#include <cuda_fp8.h>

#include "moe_device.cuh"

namespace deltafuse::moe {

// Eight numbers, divided by the scale.
template <typename T>
__device__ __forceinline__ uint2 eight_float8(const uint4& words, float times) {
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
  uint32_t bytes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 low = unpack_pair(w[2 * i], T()), high = unpack_pair(w[2 * i + 1], T());
    const uint32_t a = __nv_cvt_float2_to_fp8x2(make_float2(low.x * times, low.y * times), __NV_SATFINITE, __NV_E4M3);
    const uint32_t b = __nv_cvt_float2_to_fp8x2(make_float2(high.x * times, high.y * times), __NV_SATFINITE, __NV_E4M3);
    bytes[i] = a | b << 16;
  }
  return make_uint2(bytes[0], bytes[1]);
}

// Pairs of numbers: the larger sizes of both so far.
__device__ __forceinline__ uint32_t larger(uint32_t most, uint32_t pair, __nv_bfloat16) {
  const __nv_bfloat162 x = *reinterpret_cast<const __nv_bfloat162*>(&most);
  const __nv_bfloat162 y = __habs2(*reinterpret_cast<const __nv_bfloat162*>(&pair)), z = __hmax2(x, y);
  return *reinterpret_cast<const uint32_t*>(&z);
}
__device__ __forceinline__ uint32_t larger(uint32_t most, uint32_t pair, __half) {
  const __half2 x = *reinterpret_cast<const __half2*>(&most);
  const __half2 y = __habs2(*reinterpret_cast<const __half2*>(&pair)), z = __hmax2(x, y);
  return *reinterpret_cast<const uint32_t*>(&z);
}
template <typename T>
__device__ __forceinline__ uint32_t larger(uint32_t most, const uint4& words) {
  return larger(larger(larger(larger(most, words.x, T()), words.y, T()), words.z, T()), words.w, T());
}

// A warp's rows, `step` apart, kRows of them at most: the largest of a row becomes 448. Float8's smallest normal number
// is 2^-15 of that, so one scale does for a row. A lane keeps kPieces pieces of eight of each; beyond them rows are
// read twice. What other blocks stored is read from the L2.
template <typename T, int kRows, int kPieces>
__device__ __forceinline__ void float8_rows(const Float8Args& a, int64_t first, int step, int count) {
  const int lane = threadIdx.x % 32, pieces = a.cols / 8, all = a.blocks * 16;
  const uint4* x = reinterpret_cast<const uint4*>(static_cast<const T*>(a.x) + first * a.x_stride) + lane;
  uint2* out = reinterpret_cast<uint2*>(a.out + first * a.blocks * 128) + lane;
  const int64_t x_step = step * a.x_stride / 8, out_step = int64_t(step) * a.blocks * 16;
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  uint4 kept[kRows][kPieces];
  uint32_t most[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      kept[r][i] = r < count && lane + 32 * i < pieces ? __ldcg(x + r * x_step + 32 * i) : zeros;
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    most[r] = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) most[r] = larger<T>(most[r], kept[r][i]);
    if (r < count) {
      for (int i = 32 * kPieces; i < pieces - lane; i += 32) most[r] = larger<T>(most[r], __ldcg(x + r * x_step + i));
    }
  }
#pragma unroll
  for (int by = 16; by > 0; by /= 2) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) most[r] = larger(most[r], __shfl_xor_sync(~0u, most[r], by), T());
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= count) break;
    // Unpacked here, not before in twice the registers.
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      asm volatile("" : "+r"(kept[r][i].x), "+r"(kept[r][i].y), "+r"(kept[r][i].z), "+r"(kept[r][i].w));
    }
    const float2 both = unpack_pair(most[r], T());
    const float largest = fmaxf(both.x, both.y);
    const bool tiny = !(largest > 1e-30f);
    const float scale = tiny ? 1.0f : largest * (1.0f / 448.0f), times = tiny ? 1.0f : __fdividef(448.0f, largest);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (lane + 32 * i < all) out[r * out_step + 32 * i] = eight_float8<T>(kept[r][i], times);
    }
    for (int i = 32 * kPieces; i < all - lane; i += 32) {
      out[r * out_step + i] = eight_float8<T>(i < pieces - lane ? __ldcg(x + r * x_step + i) : zeros, times);
    }
    if (lane == 0) a.scale[first + r * step] = scale;
  }
}

}  // namespace deltafuse::moe
