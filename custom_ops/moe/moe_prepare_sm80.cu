// Before a few tokens' products: router logits, and the tokens as right operands with the sums that integer weights
// need. A block takes four experts, or part of a token.
#include "moe_arrange.cuh"
#include "moe_logits_few.cuh"
#include "moe_select.cuh"

namespace deltafuse::moe {
namespace {

// How a call's logits are made.
enum class Way { kOne, kMma, kAny };
template <Way kWay>
constexpr int kThreads = kWay == Way::kMma ? kMmaThreads : kLogitsThreads;
template <Way kWay>
constexpr int kExperts = kWay == Way::kMma ? kMmaExperts : kLogitsExperts;  // of a block

template <typename T>
__device__ __forceinline__ void make_gate(const DecodeArgs& a, const T* x, int token) {
  __shared__ float parts[32];
  float sum = 0.0f;
#pragma unroll 4
  for (int k = threadIdx.x; k < a.router.hidden; k += blockDim.x) {
    sum = fmaf(to_float(x[k]), load_any(a.shared_gate, k, a.shared_gate_type), sum);
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float all = parts[0];
    for (int i = 1; i < static_cast<int>(blockDim.x) / 32; ++i) all += parts[i];
    a.gates[token] = 1.0f / (1.0f + expf(-all));
  }
}

__device__ __forceinline__ int scored_place(const DecodeArgs& a, int expert) {
  return a.polled ? expert : scored_at(a.each, expert);
}

// Half of a multiprocessor's registers: the next kernel's blocks come beside.
template <typename T, typename W, Way kWay>
__global__ void __launch_bounds__(kThreads<kWay>, kWay == Way::kOne ? 2 : 1)
    prepare_kernel(const __grid_constant__ DecodeArgs a, int expert_blocks, int parts) {
  constexpr int kBlock = kThreads<kWay>;
  const RouterArgs& r = a.router;
  const int expert = blockIdx.x * kExperts<kWay>;
  const bool scored = a.each != 0;
  if (kWay == Way::kOne && blockIdx.x == 0) to_l2(r.x, int64_t(r.hidden) * sizeof(T), threadIdx.x, kBlock);
  // Where keys are polled the next kernel does not wait for this one, so it must not start before they are zero: what
  // an atomic operation has answered is done. One thread's word is a block's, so it is for the first warp to say.
  uint32_t answer = 0;
  auto release_polled = [&] {
    if (threadIdx.x < 32 && __all_sync(~0u, answer != 0x5a5a1234u)) release_next();  // else at the end
  };
  if (static_cast<int>(blockIdx.x) < expert_blocks) {
    auto store = [&](int token, int e, float logit, bool write) {
      if (scored) {
        store_scored(r, a.scored + token * (2 * kScored), scored_place(a, e), e, logit, write);
      } else if (write) {
        r.logits[int64_t(token) * r.experts + e] = logit;
      }
    };
    if constexpr (kWay == Way::kOne) {
      auto wait = [&] {
        wait_previous();
        if (!a.polled) {
          release_next();
        } else if (threadIdx.x < kExperts<kWay> && expert + static_cast<int>(threadIdx.x) < r.experts) {
          answer = atomicExch(reinterpret_cast<uint32_t*>(a.scored) + kScored + expert + threadIdx.x, 0u);
        }
      };
      auto loading = [&] {
        if (a.polled) release_polled();
      };
      make_logits_one<T, W>(r, expert, wait, loading,
                            [&](int e, float logit, bool write) { store(0, e, logit, write); });
    } else {
      auto wait = [&] {
        wait_previous();
        release_next();
      };
      auto put = [&](int token, int e, float logit) { store(token, e, logit, true); };
      if constexpr (kWay == Way::kMma) {
        make_logits_mma<T, W>(r, expert, wait, put);
      } else {
        if (a.tuning.prefetch & 1) prefetch_weights<W>(r, expert);
        wait();
        make_logits<T, W, 4>(r, expert, put);
      }
    }
  } else {
    wait_previous();
    if (!a.polled) {
      release_next();
    } else {
      if (threadIdx.x == 0) answer = static_cast<uint32_t>(atomicExch(a.routed, 0));
      release_polled();
    }
    const int token = (blockIdx.x - expert_blocks) / parts, part = (blockIdx.x - expert_blocks) % parts;
    if (token == 0 && part == 0) {  // the second product waits for them
      if (threadIdx.x == 0 && !a.polled) *a.routed = 0;
#pragma unroll 1
      for (int i = threadIdx.x; i < a.flag_count; i += kBlock) a.flags[i] = 0;
    }
    const T* x = static_cast<const T*>(r.x) + int64_t(token) * r.hidden;
    if (scored && !r.weight) {
#pragma unroll 1
      for (int e = part * kBlock + static_cast<int>(threadIdx.x); e < r.experts; e += parts * kBlock) {
        store_scored(r, a.scored + token * (2 * kScored), scored_place(a, e), e, logit_of(r, token, e));
      }
    }
    const int thread = part * kBlock + static_cast<int>(threadIdx.x), threads = parts * kBlock;
    if (!a.polled) arrange_any(Arranged(a.x, token), a.x, x, r.hidden, thread, threads);
    if (a.shared_x.data) arrange_any(Arranged(a.shared_x, token), a.shared_x, x, r.hidden, thread, threads);
    if (a.shared_gate && part == 0) make_gate(a, x, token);
  }
}

template <typename T, typename W, Way kWay>
cudaError_t prepare(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  constexpr int kWarps = kThreads<kWay> / 32;
  const int expert_blocks = a.router.weight ? (a.router.experts + kExperts<kWay> - 1) / kExperts<kWay> : 0;
  const bool dependent = device.capability >= 90 && a.tuning.dependent;
  const int parts = a.polled ? 1 : (a.x.cols / 128 + kWarps - 1) / kWarps;  // of a token
  return launch_kernel(prepare_kernel<T, W, kWay>, expert_blocks + a.router.tokens * parts, kThreads<kWay>, 0,
                       dependent, stream, a, expert_blocks, parts);
}
template <typename T, typename W>
cudaError_t prepare_any(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  return one_at_once<W>(a.router) ? prepare<T, W, Way::kOne>(a, device, stream)
         : suits_mma<W>(a.router) ? prepare<T, W, Way::kMma>(a, device, stream)
                                  : prepare<T, W, Way::kAny>(a, device, stream);
}

}  // namespace

cudaError_t launch_prepare(const DecodeArgs& a, DType dtype, const DeviceInfo& device, cudaStream_t stream) {
  const bool wide = a.router.weight_type == DType::kFloat32;
  if (dtype == DType::kFloat16) {
    return wide ? prepare_any<__half, float>(a, device, stream) : prepare_any<__half, __half>(a, device, stream);
  }
  return wide ? prepare_any<__nv_bfloat16, float>(a, device, stream)
              : prepare_any<__nv_bfloat16, __nv_bfloat16>(a, device, stream);
}

}  // namespace deltafuse::moe
