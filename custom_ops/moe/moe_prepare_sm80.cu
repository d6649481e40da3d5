// Before a few tokens' products: router logits, and the tokens as right operands with the sums that integer weights
// need. A block takes four experts, or one token.
#include "moe_decode_parts.cuh"
#include "moe_logits_few.cuh"

namespace deltafuse::moe {
namespace {

constexpr int kThreads = kLogitsThreads, kWarps = kThreads / 32;

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
  const int expert = blockIdx.x * kLogitsExperts;
  if (static_cast<int>(blockIdx.x) < expert_blocks) {
    if (a.tuning.prefetch & 1) prefetch_weights<W>(r, expert);
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
  const int expert_blocks = a.router.weight ? (a.router.experts + kLogitsExperts - 1) / kLogitsExperts : 0;
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
