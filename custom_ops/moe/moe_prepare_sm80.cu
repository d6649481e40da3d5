// Before a few tokens' products: router logits, and the tokens as right operands with the sums that integer weights
// need. A block takes four experts, or one token.
#include "moe_decode_parts.cuh"

namespace deltafuse::moe {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kExperts = 4;  // of a block

// Sums over a warp of kCount (a power of two up to 32) numbers a lane; a lane gets that of number `*which`.
template <int kCount>
__device__ __forceinline__ double sum_over_warp(double (&values)[kCount], int* which) {
  const int lane = threadIdx.x % 32;
  int index = 0;
#pragma unroll
  for (int level = 0; level < 5; ++level) {
    const int step = 16 >> level, half = kCount >> (level + 1);
    if (half > 0) {
      const bool upper = lane & step;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const double given = upper ? values[i] : values[i + half], kept = upper ? values[i + half] : values[i];
        values[i] = kept + __shfl_xor_sync(~0u, given, step);
      }
      if (upper) index += half;
    } else {
      values[0] += __shfl_xor_sync(~0u, values[0], step);
    }
  }
  *which = index;
  return values[0];
}

// Logits of kExperts experts: float64 sums, rounded once. kTokens at a time.
template <typename T, typename W, int kTokens>
__device__ __forceinline__ void make_logits(const RouterArgs& r, int first_expert) {
  __shared__ double partial[kWarps][kExperts * kTokens];
  constexpr int kWide = 16 / sizeof(W);  // columns of a load
  constexpr int kAhead = sizeof(W) == 4 ? 3 : 2;
  struct alignas(kWide * sizeof(T)) Columns {
    T v[kWide];
  };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const W* weight = static_cast<const W*>(r.weight);
  const T* x = static_cast<const T*>(r.x);
  const int pieces = r.hidden % kWide == 0 ? r.hidden / kWide : 0;
  const int64_t stride = r.hidden;
  const W* rows[kExperts];
#pragma unroll
  for (int e = 0; e < kExperts; ++e) rows[e] = weight + min(first_expert + e, r.experts - 1) * stride;
#pragma unroll 1
  for (int base = 0; base < r.tokens; base += kTokens) {
    double sum[kExperts * kTokens] = {};
#pragma unroll 1
    for (int first = threadIdx.x; first < pieces; first += kAhead * kThreads) {
      uint4 w[kAhead][kExperts];
      Columns c[kAhead][kTokens];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int piece = min(first + i * kThreads, pieces - 1);
#pragma unroll
        for (int e = 0; e < kExperts; ++e) w[i][e] = *(reinterpret_cast<const uint4*>(rows[e]) + piece);
#pragma unroll
        for (int n = 0; n < kTokens; ++n) {
          c[i][n] = *reinterpret_cast<const Columns*>(x + min(base + n, r.tokens - 1) * stride + piece * kWide);
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i * kThreads < pieces) {
#pragma unroll
          for (int j = 0; j < kWide; ++j) {
            double token[kTokens];
#pragma unroll
            for (int n = 0; n < kTokens; ++n) token[n] = static_cast<double>(to_float(c[i][n].v[j]));
#pragma unroll
            for (int e = 0; e < kExperts; ++e) {
              const double value = static_cast<double>(to_float(reinterpret_cast<const W*>(&w[i][e])[j]));
#pragma unroll
              for (int n = 0; n < kTokens; ++n) sum[e * kTokens + n] = fma(value, token[n], sum[e * kTokens + n]);
            }
          }
        }
      }
    }
    if (pieces == 0) {  // rows that no load of 16 bytes fits
#pragma unroll 1
      for (int k = threadIdx.x; k < r.hidden; k += kThreads) {
#pragma unroll
        for (int n = 0; n < kTokens; ++n) {
          const double token = static_cast<double>(to_float(x[min(base + n, r.tokens - 1) * stride + k]));
#pragma unroll
          for (int e = 0; e < kExperts; ++e) {
            sum[e * kTokens + n] = fma(static_cast<double>(to_float(rows[e][k])), token, sum[e * kTokens + n]);
          }
        }
      }
    }
    int which;
    const double total = sum_over_warp(sum, &which);
    if (lane % (32 / (kExperts * kTokens)) == 0) partial[warp][which] = total;
    __syncthreads();
    if (threadIdx.x < kExperts * kTokens) {
      const int expert = first_expert + threadIdx.x / kTokens, token = base + threadIdx.x % kTokens;
      if (expert < r.experts && token < r.tokens) {
        double all = partial[0][threadIdx.x];
#pragma unroll
        for (int i = 1; i < kWarps; ++i) all += partial[i][threadIdx.x];
        if (r.router_bias) all += static_cast<double>(r.router_bias[expert]);
        r.logits[int64_t(token) * r.experts + expert] = static_cast<float>(all);
      }
    }
    __syncthreads();
  }
}

template <typename T>
__device__ __forceinline__ void arrange(const Operand& to, const T* x, int hidden, int token) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = to.cols / 128;
#pragma unroll 1
  for (int chunk = threadIdx.x; chunk < to.cols / 8; chunk += kThreads) {
    __align__(16) T values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int col = chunk / 16 * 128 + operand_column(to.pack, chunk % 16 * 8 + i);
      values[i] = col < hidden ? x[col] : from_float<T>(0.0f);
    }
    *reinterpret_cast<uint4*>(static_cast<T*>(to.data) + int64_t(token) * to.cols + chunk * 8) =
        *reinterpret_cast<const uint4*>(values);
  }
  if (to.sub == 0) return;
#pragma unroll 1
  for (int block = warp; block < blocks; block += kWarps) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int col = block * 128 + lane * 4 + i;
      if (col < hidden) sum += to_float(x[col]);
    }
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    float* out = to.sums + (int64_t(token) * blocks + block) * to.sub;
    if (to.sub == 4) {
      if (lane % 8 == 0) out[lane / 8] = sum;
    } else {
      for (int step = 8; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane == 0) *out = sum;
    }
  }
}

template <typename T>
__device__ __forceinline__ void make_gate(const DecodeArgs& a, const T* x, int token) {
  __shared__ float parts[kWarps];
  float sum = 0.0f;
#pragma unroll 4
  for (int k = threadIdx.x; k < a.router.hidden; k += kThreads) {
    sum = fmaf(to_float(x[k]), load_any(a.shared_gate, k, a.shared_gate_type), sum);
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float all = parts[0];
    for (int i = 1; i < kWarps; ++i) all += parts[i];
    a.gates[token] = 1.0f / (1.0f + expf(-all));
  }
}

template <typename T, typename W, int kTokens>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ DecodeArgs a, int expert_blocks) {
  const RouterArgs& r = a.router;
  const int expert = blockIdx.x * kExperts;
  if (static_cast<int>(blockIdx.x) < expert_blocks) {
    if (a.tuning.prefetch) {
      const int64_t row = int64_t(r.hidden) * sizeof(W);
      to_l2(static_cast<const unsigned char*>(r.weight) + expert * row, min(kExperts, r.experts - expert) * row,
            threadIdx.x, kThreads);
    }
    wait_previous();
    release_next();
    make_logits<T, W, kTokens>(r, expert);
  } else {
    wait_previous();
    release_next();
    const int token = blockIdx.x - expert_blocks;
    const T* x = static_cast<const T*>(r.x) + int64_t(token) * r.hidden;
    arrange(a.x, x, r.hidden, token);
    if (a.shared_x.data) arrange(a.shared_x, x, r.hidden, token);
    if (a.shared_gate) make_gate(a, x, token);
  }
}

template <typename T, typename W>
cudaError_t prepare(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const int expert_blocks = a.router.weight ? (a.router.experts + kExperts - 1) / kExperts : 0;
  const bool dependent = device.capability >= 90 && a.tuning.dependent;
  return launch_kernel(a.router.tokens == 1 ? prepare_kernel<T, W, 1> : prepare_kernel<T, W, 4>,
                       expert_blocks + a.router.tokens, kThreads, 0, dependent, stream, a, expert_blocks);
}

}  // namespace

cudaError_t launch_prepare(const DecodeArgs& a, DType dtype, const DeviceInfo& device, cudaStream_t stream) {
  const bool wide = a.router.weight_type == DType::kFloat32;
  if (dtype == DType::kFloat16) {
    return wide ? prepare<__half, float>(a, device, stream) : prepare<__half, __half>(a, device, stream);
  }
  return wide ? prepare<__nv_bfloat16, float>(a, device, stream)
              : prepare<__nv_bfloat16, __nv_bfloat16>(a, device, stream);
}

}  // namespace deltafuse::moe
