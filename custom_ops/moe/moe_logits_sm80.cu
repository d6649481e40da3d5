// Router logits: float32 roundings of float64 sums, for a few tokens and for prompts.
#include "moe_decode.h"
#include "moe_logits_few.cuh"

namespace deltafuse::moe {
namespace {

// -- a few tokens ------------------------------------------------------------------------------------------------
constexpr int kFewTokens = 16;

template <typename T, typename W, int kTokens>
__global__ void __launch_bounds__(kLogitsThreads) logits_few_kernel(const __grid_constant__ RouterArgs a) {
  const int expert = blockIdx.x * kLogitsExperts;
  prefetch_weights<W>(a, expert);
  wait_previous();
  release_next();
  make_logits<T, W, kTokens>(a, expert,
                             [&](int token, int e, float logit) { a.logits[int64_t(token) * a.experts + e] = logit; });
}

template <typename T, typename W>
cudaError_t launch_logits_few(const RouterArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const LaunchForm form{dim3((a.experts + kLogitsExperts - 1) / kLogitsExperts), kLogitsThreads};
  return launch_dependent(a.tokens == 1 ? logits_few_kernel<T, W, 1> : logits_few_kernel<T, W, 4>, form, device, stream,
                          a);
}

// -- more tokens: the float64 tensor cores ---------------------------------------------------------------------------
// D += A B: A 16 x 16, B 16 x 8; rows lane / 4 and + 8, columns along k lane % 4, + 4, ..
__device__ __forceinline__ void mma64(double (&d)[4], const double (&a)[8], const double (&b)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7,%8,%9,%10,%11}, "
      "{%12,%13,%14,%15}, "
      "{%0,%1,%2,%3};\n"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]),
        "d"(b[2]), "d"(b[3]));
#else
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};\n"
                   : "+d"(d[2 * half]), "+d"(d[2 * half + 1])
                   : "d"(a[2 * k + half]), "d"(b[k]));
    }
  }
#endif
}

__device__ __forceinline__ void store_logit(const RouterArgs& a, int token, int expert, double total) {
  if (token >= a.tokens || expert >= a.experts) return;
  if (a.router_bias) total += static_cast<double>(a.router_bias[expert]);
  a.logits[int64_t(token) * a.experts + expert] = static_cast<float>(total);
}

// Up to about a thousand: 32 tokens by 32 experts a block, the columns dealt out to its warps, operands straight from
// global memory.
constexpr int kSome = 32;

template <typename W>
__global__ void __launch_bounds__(256) logits_some_kernel(RouterArgs a) {
  extern __shared__ __align__(16) double partial[];  // [8 warps][32][32]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int token0 = blockIdx.x * kSome, expert0 = blockIdx.y * kSome;
  const W* weight = static_cast<const W*>(a.weight);
  double sum[2][4][4] = {};
#pragma unroll 1
  for (int k = warp * 16; k < a.hidden; k += 128) {
    float x[2][8], w[4][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int token = token0 + m * 16 + g + (i & 1) * 8, col = k + t + (i >> 1) * 4;
        x[m][i] = token < a.tokens && col < a.hidden ? load_any(a.x, int64_t(token) * a.hidden + col, a.x_type) : 0.0f;
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int expert = expert0 + n * 8 + g, col = k + t + i * 4;
        w[n][i] = expert < a.experts && col < a.hidden ? to_float(weight[int64_t(expert) * a.hidden + col]) : 0.0f;
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      double left[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) left[i] = static_cast<double>(x[m][i]);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        double right[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) right[i] = static_cast<double>(w[n][i]);
        mma64(sum[m][n], left, right);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        partial[(warp * 32 + m * 16 + g + (i >> 1) * 8) * 32 + n * 8 + 2 * t + (i & 1)] = sum[m][n][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kSome * kSome; i += 256) {
    double total = partial[i];
#pragma unroll
    for (int w = 1; w < 8; ++w) total += partial[w * 1024 + i];
    store_logit(a, token0 + i / 32, expert0 + i % 32, total);
  }
}

// Prompts: 128 tokens by 128 experts a block, a warp 32 by 64; two stages in shared memory.
constexpr int kTile = 128, kDepth = 32;
constexpr int kStride = kDepth + 4;  // doubles: no bank conflicts

template <typename W>
__global__ void __launch_bounds__(256, 1) logits_many_kernel(RouterArgs a) {
  extern __shared__ __align__(16) double stage[];  // [2][tokens, then experts][kTile][kStride]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int token0 = blockIdx.x * kTile, expert0 = blockIdx.y * kTile;
  const W* weight = static_cast<const W*>(a.weight);
  constexpr int kRows = kTile / 8;  // a warp fetches
  float x[kRows], w[kRows];
  auto fetch = [&](int k0) {
    const int col = k0 + lane;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int token = token0 + warp + i * 8, expert = expert0 + warp + i * 8;
      x[i] = token < a.tokens && col < a.hidden ? load_any(a.x, int64_t(token) * a.hidden + col, a.x_type) : 0.0f;
      w[i] = expert < a.experts && col < a.hidden ? to_float(weight[int64_t(expert) * a.hidden + col]) : 0.0f;
    }
  };
  auto put = [&](double* to) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      to[(warp + i * 8) * kStride + lane] = static_cast<double>(x[i]);
      to[(kTile + warp + i * 8) * kStride + lane] = static_cast<double>(w[i]);
    }
  };
  double sum[2][8][4] = {};
  fetch(0);
  put(stage);
  __syncthreads();
#pragma unroll 1
  for (int k0 = 0, at = 0; k0 < a.hidden; k0 += kDepth, at ^= 1) {
    const bool more = k0 + kDepth < a.hidden;
    if (more) fetch(k0 + kDepth);
    const double* left = stage + at * 2 * kTile * kStride + (warp / 2 * 32 + g) * kStride + t;
    const double* right = stage + (at * 2 * kTile + kTile + warp % 2 * 64 + g) * kStride + t;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      double rows[2][8];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 8; ++i) rows[m][i] = left[(m * 16 + (i & 1) * 8) * kStride + k + (i >> 1) * 4];
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        double cols[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) cols[i] = right[n * 8 * kStride + k + i * 4];
        mma64(sum[0][n], rows[0], cols);
        mma64(sum[1][n], rows[1], cols);
      }
    }
    if (more) put(stage + (at ^ 1) * 2 * kTile * kStride);
    __syncthreads();
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_logit(a, token0 + warp / 2 * 32 + m * 16 + g + (i >> 1) * 8,
                    expert0 + warp % 2 * 64 + n * 8 + 2 * t + (i & 1), sum[m][n][i]);
      }
    }
  }
}

template <typename W>
cudaError_t launch_tiles(void (*kernel)(RouterArgs), const RouterArgs& a, int tile, size_t shared,
                         cudaStream_t stream) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (status != cudaSuccess) return status;
  const dim3 grid(static_cast<unsigned>((a.tokens + tile - 1) / tile),
                  static_cast<unsigned>((a.experts + tile - 1) / tile));
  kernel<<<grid, 256, shared, stream>>>(a);
  return cudaGetLastError();
}

template <typename W>
cudaError_t launch(const RouterArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  if (a.tokens <= kFewTokens) {
    switch (a.x_type) {
      case DType::kFloat32:
        return launch_logits_few<float, W>(a, device, stream);
      case DType::kFloat16:
        return launch_logits_few<__half, W>(a, device, stream);
      case DType::kBFloat16:
        return launch_logits_few<__nv_bfloat16, W>(a, device, stream);
    }
    return cudaErrorInvalidValue;
  }
  const size_t tiles = sizeof(double) * 4 * kTile * kStride;
  if (a.tokens < 1024 || tiles + 1024 > static_cast<size_t>(device.shared_bytes)) {
    return launch_tiles<W>(logits_some_kernel<W>, a, kSome, sizeof(double) * 8 * kSome * kSome, stream);
  }
  return launch_tiles<W>(logits_many_kernel<W>, a, kTile, tiles, stream);
}

}  // namespace

cudaError_t launch_logits(const RouterArgs& args, const DeviceInfo& device, cudaStream_t stream) {
  switch (args.weight_type) {
    case DType::kFloat32:
      return launch<float>(args, device, stream);
    case DType::kFloat16:
      return launch<__half>(args, device, stream);
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(args, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace deltafuse::moe
