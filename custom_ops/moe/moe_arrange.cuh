// A token as the right operand of the first product.
#pragma once

#include "moe_decode_parts.cuh"

namespace deltafuse::moe {

// Where a token goes: [cols] numbers of 16 bits each, or as many pairs of digits with their scales and sums (see
// Operand).
struct Arranged {
  void* data;
  float *scales, *sums;
  __device__ Arranged(const Operand& to, int token)
      : data(static_cast<unsigned char*>(to.data) + int64_t(token) * to.cols * 2),
        scales(to.scales + token * (to.cols / 128)),
        sums(to.sums ? to.sums + token * (to.cols / 32) : nullptr) {}
  __device__ Arranged(void* data, float* scales, float* sums) : data(data), scales(scales), sums(sums) {}
};

// For floating-point weights, by threads of which this is `thread`.
template <typename T>
__device__ __forceinline__ void arrange(const Arranged& to, Pack pack, int cols, const T* x, int hidden, int thread,
                                        int threads) {
#pragma unroll 1
  for (int chunk = thread; chunk < cols / 8; chunk += threads) {
    __align__(16) T values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int col = chunk / 16 * 128 + operand_column(pack, chunk % 16 * 8 + i);
      values[i] = col < hidden ? x[col] : from_float<T>(0.0f);
    }
    reinterpret_cast<uint4*>(to.data)[chunk] = *reinterpret_cast<const uint4*>(values);
  }
}

// For integer weights: a warp takes 128 columns, a lane columns 16 s + 2 t + {0, 8, 1, 9} of them.
template <typename T>
__device__ __forceinline__ void arrange_digits(const Arranged& to, int cols, const T* x, int hidden, int warp,
                                               int warps) {
  const int lane = threadIdx.x % 32, step = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int block = warp; block < cols / 128; block += warps) {
    float values[4];
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int col = block * 128 + step * 16 + 2 * t + i / 2 + i % 2 * 8;
      values[i] = col < hidden ? to_float(x[col]) : 0.0f;
      most = max(most, __float_as_uint(values[i]) & 0x7fffffffu);
    }
    const Digits digits(__reduce_max_sync(~0u, most));
    uint32_t high, low;
    digits.split(values, &high, &low);
    auto* out =
        reinterpret_cast<uint32_t*>(static_cast<unsigned char*>(to.data) + block * 256 + step / 4 * 128 + t * 16) +
        step % 4;
    out[0] = high, out[16] = low;
    if (lane == 0) to.scales[block] = digits.scale;
    if (to.sums) {
      float sum = (values[0] + values[1]) + (values[2] + values[3]);
      for (int by = 1; by < 8; by *= 2) sum += __shfl_xor_sync(~0u, sum, by);
      if (lane % 8 == 0) to.sums[block * 4 + lane / 8] = sum;
    }
  }
}

// Either, by whole warps.
template <typename T>
__device__ __forceinline__ void arrange_any(const Arranged& to, const Operand& like, const T* x, int hidden, int thread,
                                            int threads) {
  if (like.digits()) {
    arrange_digits(to, like.cols, x, hidden, thread / 32, threads / 32);
  } else {
    arrange(to, like.pack, like.cols, x, hidden, thread, threads);
  }
}

}  // namespace deltafuse::moe
