// Before a few tokens' products: router logits, and the tokens as right operands with the sums that integer weights
// need. A block takes four experts, or part of a token.
#include "moe_decode_parts.cuh"
#include "moe_logits_few.cuh"
#include "moe_select.cuh"

namespace deltafuse::moe {
namespace {

constexpr int kThreads = kLogitsThreads, kWarps = kThreads / 32;

// Part `part` of `parts` of a token for floating-point weights.
template <typename T>
__device__ __forceinline__ void arrange(const Operand& to, const T* x, int hidden, int token, int part, int parts) {
#pragma unroll 1
  for (int chunk = part * kThreads + static_cast<int>(threadIdx.x); chunk < to.cols / 8; chunk += parts * kThreads) {
    __align__(16) T values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int col = chunk / 16 * 128 + operand_column(to.pack, chunk % 16 * 8 + i);
      values[i] = col < hidden ? x[col] : from_float<T>(0.0f);
    }
    *reinterpret_cast<uint4*>(static_cast<T*>(to.data) + int64_t(token) * to.cols + chunk * 8) =
        *reinterpret_cast<const uint4*>(values);
  }
}

// The same for integer weights: a warp takes 128 columns, a lane columns 16 s + 2 t + {0, 8, 1, 9} of them.
template <typename T>
__device__ __forceinline__ void arrange_digits(const Operand& to, const T* x, int hidden, int token, int part,
                                               int parts) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = to.cols / 128, step = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int block = part * kWarps + warp; block < blocks; block += parts * kWarps) {
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
    auto* out = reinterpret_cast<uint32_t*>(static_cast<unsigned char*>(to.data) +
                                            (int64_t(token) * blocks + block) * 256 + step / 4 * 128 + t * 16) +
                step % 4;
    out[0] = high, out[16] = low;
    if (lane == 0) to.scales[token * blocks + block] = digits.scale;
    if (to.sums) {
      float sum = (values[0] + values[1]) + (values[2] + values[3]);
      for (int by = 1; by < 8; by *= 2) sum += __shfl_xor_sync(~0u, sum, by);
      if (lane % 8 == 0) to.sums[(token * blocks + block) * 4 + lane / 8] = sum;
    }
  }
}
template <typename T>
__device__ __forceinline__ void arrange_any(const Operand& to, const T* x, int hidden, int token, int part, int parts) {
  if (to.digits()) {
    arrange_digits(to, x, hidden, token, part, parts);
  } else {
    arrange(to, x, hidden, token, part, parts);
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

__device__ __forceinline__ int scored_place(const DecodeArgs& a, int expert) {
  return a.together ? expert : scored_at(a.each, expert);
}

template <typename T, typename W, int kTokens>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ DecodeArgs a, int expert_blocks, int parts) {
  const RouterArgs& r = a.router;
  const int expert = blockIdx.x * kLogitsExperts;
  const bool scored = a.each || a.together;
  if ((a.tuning.prefetch & 8) && blockIdx.x == 0 && kTokens == 1)
    to_l2(r.x, int64_t(r.hidden) * sizeof(T), threadIdx.x, kThreads);
  if (a.tuning.prefetch & 4) release_next();
  if (static_cast<int>(blockIdx.x) < expert_blocks) {
    auto store = [&](int token, int e, float logit, bool write) {
      if (scored) {
        store_scored(r, a.scored + token * (2 * kScored), scored_place(a, e), e, logit, write);
      } else if (write) {
        r.logits[int64_t(token) * r.experts + e] = logit;
      }
    };
    if (kTokens == 1 && one_at_once<W>(r)) {
      auto wait = [&] {
        wait_previous();
        release_next();
      };
      make_logits_one<T, W>(r, expert, wait, [&](int e, float logit, bool write) { store(0, e, logit, write); });
    } else {
      if (a.tuning.prefetch & 1) prefetch_weights<W>(r, expert);
      wait_previous();
      release_next();
      make_logits<T, W, kTokens>(r, expert, [&](int token, int e, float logit) { store(token, e, logit, true); });
    }
  } else {
    wait_previous();
    release_next();
    const int token = (blockIdx.x - expert_blocks) / parts, part = (blockIdx.x - expert_blocks) % parts;
    if (token == 0 && part == 0) {  // the second product waits for them
      if (threadIdx.x == 0) *a.routed = 0;
#pragma unroll 1
      for (int i = threadIdx.x; i < a.flag_count; i += kThreads) a.flags[i] = 0;
    }
    const T* x = static_cast<const T*>(r.x) + int64_t(token) * r.hidden;
    if (scored && !r.weight) {
#pragma unroll 1
      for (int e = part * kThreads + static_cast<int>(threadIdx.x); e < r.experts; e += parts * kThreads) {
        store_scored(r, a.scored + token * (2 * kScored), scored_place(a, e), e, logit_of(r, token, e));
      }
    }
    arrange_any(a.x, x, r.hidden, token, part, parts);
    if (a.shared_x.data) arrange_any(a.shared_x, x, r.hidden, token, part, parts);
    if (a.shared_gate && part == 0) make_gate(a, x, token);
  }
}

template <typename T, typename W>
cudaError_t prepare(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const int expert_blocks = a.router.weight ? (a.router.experts + kLogitsExperts - 1) / kLogitsExperts : 0;
  const bool dependent = device.capability >= 90 && a.tuning.dependent;
  const int tokens = a.router.tokens, parts = (a.x.cols / 128 + kWarps - 1) / kWarps;
  return launch_kernel(tokens == 1   ? prepare_kernel<T, W, 1>
                       : tokens <= 4 ? prepare_kernel<T, W, 4>
                                     : prepare_kernel<T, W, 8>,
                       expert_blocks + tokens * parts, kThreads, 0, dependent, stream, a, expert_blocks, parts);
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
