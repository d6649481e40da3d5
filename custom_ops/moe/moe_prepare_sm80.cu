// Before a few tokens' products: router logits, four experts a block, and the tokens as right operands with the sums
// that integer weights need.
#include "moe_arrange.cuh"
#include "moe_logits_few.cuh"
#include "moe_select.cuh"

namespace deltafuse::moe {
namespace {

constexpr int kThreads = kLogitsThreads, kWarps = kThreads / 32;

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
  __syncthreads();
}

// The block's share of the tokens as right operands. The warps that make scores come last.
template <typename T>
__device__ __forceinline__ void arrange_share(const Operand& to, const RouterArgs& r) {
  const int blocks = to.cols / 128, warp = kWarps - 1 - static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
  for (int i = blockIdx.x + gridDim.x * warp; i < r.tokens * blocks; i += gridDim.x * kWarps) {
    const int token = i / blocks;
    arrange(Arranged(to, token), to, static_cast<const T*>(r.x) + int64_t(token) * r.hidden, r.hidden,
            i - token * blocks);
  }
}

// kTokens: of which logits are made together; 1: see one_at_once. That takes half of a multiprocessor's registers: the
// next kernel's blocks come beside.
template <typename T, typename W, int kTokens>
__global__ void __launch_bounds__(kThreads, kTokens == 1 ? 2 : 1) prepare_kernel(const __grid_constant__ DecodeArgs a) {
  const RouterArgs& r = a.router;
  const int expert = blockIdx.x * kLogitsExperts;
  auto place_of = [&](int e) { return a.polled ? e : scored_at(a.each, e); };
  auto store = [&](int token, int e, float logit, bool write) {
    if (a.each) {
      store_scored(r, a.scored + token * (2 * kScored), place_of(e), e, logit, write);
    } else if (write) {
      r.logits[int64_t(token) * r.experts + e] = logit;
    }
  };
  if constexpr (kTokens == 1) {
    if (blockIdx.x == 0) to_l2(r.x, int64_t(r.hidden) * sizeof(T), threadIdx.x, kThreads);
    uint32_t answer = 0;
    auto wait = [&] {
      wait_previous();
      if (!a.polled) {
        release_next();
      } else if (threadIdx.x < kLogitsExperts && expert + static_cast<int>(threadIdx.x) < r.experts) {
        answer = atomicExch(reinterpret_cast<uint32_t*>(a.scored) + kScored + expert + threadIdx.x, 0u);
      } else if (const int i = static_cast<int>(threadIdx.x) - kLogitsExperts;
                 blockIdx.x == 0 && i >= 0 && i <= r.top_k) {
        answer = static_cast<uint32_t>(atomicExch(a.routed + i, 0));
      }
    };
    // Where keys are polled the next kernel does not wait for this one, so it must not start before they are zero: what
    // an atomic operation has answered is done. A thread's word is its block's, so it is for the first warp to say.
    auto loading = [&] {
      if (a.polled && threadIdx.x < 32 && __all_sync(~0u, answer != 0x5a5a1234u)) release_next();  // else at the end
    };
    make_logits_one<T, W>(r, expert, wait, loading, [&](int e, float logit, bool write) { store(0, e, logit, write); });
  } else {
    if (r.weight && (a.tuning.prefetch & 1) && expert < r.experts) prefetch_weights<W>(r, expert);
    wait_previous();
    release_next();
    if (r.weight) {
      if (expert < r.experts) {
        make_logits<T, W, kTokens>(r, expert, [&](int token, int e, float logit) { store(token, e, logit, true); });
      }
    } else if (a.each) {
#pragma unroll 1
      for (int i = blockIdx.x * kThreads + threadIdx.x; i < r.tokens * r.experts; i += gridDim.x * kThreads) {
        const int token = i / r.experts, e = i - token * r.experts;
        store(token, e, logit_of(r, token, e), true);
      }
    }
  }
  if (blockIdx.x == 0) {  // the second product waits for them
    if (static_cast<int>(threadIdx.x) <= r.top_k && !a.polled) a.routed[threadIdx.x] = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < a.flag_count; i += kThreads) a.flags[i] = 0;
  }
  if (!a.polled) arrange_share<T>(a.x, r);
  if (a.shared_x.data) arrange_share<T>(a.shared_x, r);
  if (a.shared_gate) {
#pragma unroll 1
    for (int token = blockIdx.x; token < r.tokens; token += gridDim.x) {
      make_gate(a, static_cast<const T*>(r.x) + int64_t(token) * r.hidden, token);
    }
  }
}

template <typename T, typename W>
cudaError_t prepare(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const RouterArgs& r = a.router;
  const LaunchForm form{dim3((r.experts + kLogitsExperts - 1) / kLogitsExperts), kThreads};
  return launch_few(r.weight && one_at_once<W>(r) ? prepare_kernel<T, W, 1>
                    : r.tokens <= 4               ? prepare_kernel<T, W, 4>
                                                  : prepare_kernel<T, W, 8>,
                    form, a, device, stream);
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
