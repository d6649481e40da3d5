// The experts' products on Hopper: what is between the products becomes float8, by warps of their own.
#pragma once

#include "moe_float8_rows.cuh"
#include "moe_gemm_parts.cuh"

namespace deltafuse::moe {
namespace sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename T>
__device__ __forceinline__ void convert(const GemmPair& pair, Shared& shared, int thread) {
  const GemmArgs &from = pair.product[0], &to = pair.product[1];
  const int warp = thread / 32, lane = thread % 32;
  for (int n = 0;; ++n) {
    const int box = n % kBoxes;
    barrier_wait(&shared.box_full[box], n / kBoxes & 1);
    const Tokens tokens = shared.box[box];
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.box_empty[box]);
    if (tokens.tile < 0) break;
    const bool is_shared = to.shared.count && tokens.start >= to.shared_out;
    const Float8Args a{from.out,
                       from.out_stride,
                       (is_shared ? to.shared : to.weights).blocks() * 128,
                       static_cast<int32_t>(to.x_stride / 128),
                       0,
                       static_cast<uint8_t*>(const_cast<void*>(to.x)),
                       const_cast<float*>(to.x_scale)};
    constexpr int kWarps = kConverters / 32, kRows = 1;
#pragma unroll 1
    for (int r = warp; r < tokens.count; r += kRows * kWarps) {
      float8_rows<T, kRows, 3>(a, tokens.start + r, kWarps, (tokens.count - r + kWarps - 1) / kWarps);
    }
    __syncwarp();
    if (lane == 0) one_more(pair.converted + tokens.tile);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sm90
}  // namespace deltafuse::moe
