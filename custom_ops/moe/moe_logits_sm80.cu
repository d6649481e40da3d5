// Router logits: float32 roundings of float64 sums, for a few tokens and for prompts.
#include "moe_device.cuh"

namespace deltafuse::moe {
namespace {

// -- a few tokens: two warps an expert, the weights are read once for four tokens ----------------------------------
constexpr int kFewExperts = 4;
constexpr int kFewTokens = 4;

template <typename W>
__global__ void __launch_bounds__(256) logits_few_kernel(RouterArgs a) {
  extern __shared__ __align__(16) double tokens[];  // [kFewTokens][hidden]
  __shared__ double partial[8][kFewTokens];
  release_next();
  constexpr int kWide = 16 / sizeof(W);
  constexpr int kAhead = 10;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int expert = blockIdx.x * kFewExperts + warp / 2, half = warp % 2;
  const W* row = static_cast<const W*>(a.weight) + int64_t(min(expert, a.experts - 1)) * a.hidden;
  const bool wide = a.hidden % kWide == 0;
  const int pieces = wide ? a.hidden / kWide : 0;
  for (int base = 0; base < a.tokens; base += kFewTokens) {
    const int count = min(kFewTokens, a.tokens - base);
    uint4 ahead[kAhead];  // of the weights, while the tokens are fetched
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int piece = half * 32 + lane + i * 64;
      if (piece < pieces) ahead[i] = __ldg(reinterpret_cast<const uint4*>(row) + piece);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * a.hidden; i += 256) {
      tokens[i] = static_cast<double>(load_any(a.x, int64_t(base) * a.hidden + i, a.x_type));
    }
    __syncthreads();
    double sum[kFewTokens] = {};
    auto take = [&](const uint4& words, int piece) {
      const W* w = reinterpret_cast<const W*>(&words);
#pragma unroll
      for (int j = 0; j < kWide; ++j) {
        const double value = static_cast<double>(to_float(w[j]));
#pragma unroll
        for (int n = 0; n < kFewTokens; ++n) {
          if (n < count) sum[n] = fma(value, tokens[n * a.hidden + piece * kWide + j], sum[n]);
        }
      }
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int piece = half * 32 + lane + i * 64;
      if (piece < pieces) take(ahead[i], piece);
    }
    for (int piece = half * 32 + lane + kAhead * 64; piece < pieces; piece += 64) {
      take(__ldg(reinterpret_cast<const uint4*>(row) + piece), piece);
    }
    for (int k = pieces * kWide + half * 32 + lane; k < a.hidden; k += 64) {
      for (int n = 0; n < count; ++n)
        sum[n] = fma(static_cast<double>(to_float(row[k])), tokens[n * a.hidden + k], sum[n]);
    }
#pragma unroll
    for (int n = 0; n < kFewTokens; ++n) {
      for (int step = 16; step > 0; step /= 2) sum[n] += __shfl_xor_sync(~0u, sum[n], step);
      if (lane == 0) partial[warp][n] = sum[n];
    }
    __syncthreads();
    if (threadIdx.x < kFewExperts * kFewTokens) {
      const int e = threadIdx.x / kFewTokens, n = threadIdx.x % kFewTokens, id = blockIdx.x * kFewExperts + e;
      if (n < count && id < a.experts) {
        double total = partial[2 * e][n] + partial[2 * e + 1][n];
        if (a.router_bias) total += static_cast<double>(a.router_bias[id]);
        a.logits[int64_t(base + n) * a.experts + id] = static_cast<float>(total);
      }
    }
  }
}

// -- prompts: the float64 tensor cores, 128 tokens by 64 experts a block ----------------------------------------------
constexpr int kTokens = 128, kExperts = 64, kDepth = 32;
constexpr int kStride = kDepth + 4;  // doubles: no bank conflicts

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

template <typename W>
__global__ void __launch_bounds__(256, 2) logits_many_kernel(RouterArgs a) {
  extern __shared__ __align__(16) double stage[];
  double* left = stage;                       // [kTokens][kStride]
  double* right = stage + kTokens * kStride;  // [kExperts][kStride]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int token0 = blockIdx.x * kTokens, expert0 = blockIdx.y * kExperts;
  const W* weight = static_cast<const W*>(a.weight);
  constexpr int kLeft = kTokens * kDepth / 256, kRight = kExperts * kDepth / 256;
  float next_left[kLeft], next_right[kRight];
  auto fetch = [&](int k0) {
    const int col = k0 + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const int row = token0 + threadIdx.x / 32 + i * 8;
      next_left[i] = row < a.tokens && col < a.hidden ? load_any(a.x, int64_t(row) * a.hidden + col, a.x_type) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kRight; ++i) {
      const int row = expert0 + threadIdx.x / 32 + i * 8;
      next_right[i] = row < a.experts && col < a.hidden ? to_float(weight[int64_t(row) * a.hidden + col]) : 0.0f;
    }
  };
  double sum[kExperts / 8][4] = {};
  fetch(0);
  for (int k0 = 0; k0 < a.hidden; k0 += kDepth) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kLeft; ++i)
      left[(threadIdx.x / 32 + i * 8) * kStride + lane] = static_cast<double>(next_left[i]);
#pragma unroll
    for (int i = 0; i < kRight; ++i)
      right[(threadIdx.x / 32 + i * 8) * kStride + lane] = static_cast<double>(next_right[i]);
    __syncthreads();
    if (k0 + kDepth < a.hidden) fetch(k0 + kDepth);
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      double x[8], w[4];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = left[(warp * 16 + g + (i & 1) * 8) * kStride + k + t + (i >> 1) * 4];
#pragma unroll
      for (int n = 0; n < kExperts / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = right[(n * 8 + g) * kStride + k + t + i * 4];
        mma64(sum[n], x, w);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kExperts / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = token0 + warp * 16 + g + (i >> 1) * 8, expert = expert0 + n * 8 + 2 * t + (i & 1);
      if (token < a.tokens && expert < a.experts) {
        double total = sum[n][i];
        if (a.router_bias) total += static_cast<double>(a.router_bias[expert]);
        a.logits[int64_t(token) * a.experts + expert] = static_cast<float>(total);
      }
    }
  }
}

template <typename W>
cudaError_t launch(const RouterArgs& a, const DeviceInfo& device, bool few, cudaStream_t stream) {
  if (few) {
    const size_t shared = sizeof(double) * kFewTokens * a.hidden;
    cudaError_t status = cudaFuncSetAttribute(logits_few_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              static_cast<int>(shared));
    if (status != cudaSuccess) return status;
    const int tokens = a.tokens < kFewTokens ? a.tokens : kFewTokens;
    logits_few_kernel<W><<<static_cast<unsigned>((a.experts + kFewExperts - 1) / kFewExperts), 256,
                           sizeof(double) * tokens * a.hidden, stream>>>(a);
    return cudaGetLastError();
  }
  const int shared = static_cast<int>(sizeof(double) * (kTokens + kExperts) * kStride);
  const cudaError_t status =
      cudaFuncSetAttribute(logits_many_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  const dim3 grid(static_cast<unsigned>((a.tokens + kTokens - 1) / kTokens),
                  static_cast<unsigned>((a.experts + kExperts - 1) / kExperts));
  logits_many_kernel<W><<<grid, 256, shared, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_logits(const RouterArgs& args, const DeviceInfo& device, bool few, cudaStream_t stream) {
  // The few tokens' kernel holds them in shared memory.
  few = few && sizeof(double) * kFewTokens * args.hidden <= static_cast<size_t>(device.shared_bytes) - 1024;
  switch (args.weight_type) {
    case DType::kFloat32:
      return launch<float>(args, device, few, stream);
    case DType::kFloat16:
      return launch<__half>(args, device, few, stream);
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(args, device, few, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace deltafuse::moe
