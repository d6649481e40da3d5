// The first pass of prompts' router logits: products of bfloat16 terms on Hopper's tensor cores. A block takes 256
// experts by 128 tokens; the sums of 64 columns are added up in float32, so that errors stay small and known.
#include "moe_dependent.h"
#include "moe_device.cuh"
#include "moe_gemm_parts.cuh"
#include "moe_logits_fast.h"

namespace deltafuse::moe {
namespace {

using namespace sm90;

constexpr int kTokens = 128, kTermBytes = 32768, kRightBytes = kTokens * 128;
constexpr int kStagesHere = 4;                                                  // at most
constexpr int kMultiply = 256, kFetch = 128, kSumThreads = kMultiply + kFetch;  // threads: two warpgroups, and one

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct Barriers {
  uint64_t full[kStagesHere], empty[kStagesHere];
};

__device__ __forceinline__ void fetch(const RouterArgs& a, const FastLogits& f, uint32_t base, int stages,
                                      Barriers& barriers) {
  const int thread = threadIdx.x - kMultiply, chunk = thread % 8, row0 = thread / 8;
  const int first = blockIdx.y * kTokens;
  const uint32_t weight_bytes = f.terms * kTermBytes, stage_bytes = weight_bytes + kRightBytes;
  const unsigned char* weights = f.weights + int64_t(blockIdx.x) * f.stages * weight_bytes;
  const auto* x = static_cast<const __nv_bfloat16*>(a.x) + int64_t(first + row0) * a.hidden + chunk * 8;
  const int rows = (min(kTokens, a.tokens - first) - row0 + 15) / 16;
  const uint64_t policy = evict_normal_policy();
  Pipeline at;
  for (int k = 0; k < f.stages; ++k) {
    barrier_wait(&barriers.empty[at.stage], at.phase ^ 1);
    const uint32_t stage = base + at.stage * stage_bytes;
    uint64_t* bar = &barriers.full[at.stage];
    if (thread == 0) {
      barrier_expect(bar, weight_bytes);
      bulk_copy(stage, weights, weight_bytes, bar, policy);
    }
    const uint32_t to = stage + weight_bytes + row0 * 128 + ((chunk ^ (row0 & 7)) * 16);
    const bool inside = k * 64 + chunk * 8 < a.hidden;
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) {
      if (i < rows) copy16(to + i * 2048, x + (inside ? int64_t(i) * 16 * a.hidden + k * 64 : 0), inside ? 16 : 0);
    }
    barrier_arrive_copied(bar);
    weights += weight_bytes;
    at.next(stages);
  }
}

template <int kTerms>
__device__ __forceinline__ void add_up(const RouterArgs& a, const FastLogits& f, uint32_t base, int stages,
                                       Barriers& barriers) {
  const int unit0 = threadIdx.x / 128 * 2, lane = threadIdx.x % 32;
  constexpr uint32_t weight_bytes = kTerms * kTermBytes, stage_bytes = weight_bytes + kRightBytes;
  float d[2][kTokens / 2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) d[half][i] = 0.0f;
  }
  float part[kTokens / 2] = {};
  pin(part);
  Pipeline at;
  for (int k = 0; k < f.stages; ++k) {
    barrier_wait(&barriers.full[at.stage], at.phase);
    tensor_fence();
    const uint32_t stage = base + at.stage * stage_bytes, right = stage + weight_bytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The smaller terms first.
      const uint32_t left = place(stage + (unit0 + half) * 8192), b = place(right);
      constexpr int kLast = (kTerms - 1) * kTermBytes;
      fence();
      Product<kTokens>::fresh<__nv_bfloat16>(part, descriptor(left, kLast), descriptor(b, 0));
#pragma unroll
      for (int s = 1; s < 4; ++s) {
        Product<kTokens>::shared<__nv_bfloat16>(part, descriptor(left, kLast + s * 32), descriptor(b, s * 32));
      }
      if constexpr (kTerms == 2) {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          Product<kTokens>::shared<__nv_bfloat16>(part, descriptor(left, s * 32), descriptor(b, s * 32));
        }
      }
      commit();
      wait<0>();
      pin(part);
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) d[half][i] += part[i];
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&barriers.empty[at.stage]);
    at.next(stages);
  }
  const int row = blockIdx.x * 256 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int token0 = blockIdx.y * kTokens + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int expert = row + (unit0 + half) * 64 + second * 8;
      if (expert >= a.experts) continue;
      const float bias = a.router_bias ? a.router_bias[expert] : 0.0f;
      float* to = a.logits + int64_t(token0) * a.experts + expert;
#pragma unroll
      for (int b = 0; b < kTokens / 8; ++b) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (token0 + b * 8 + i < a.tokens)
            to[int64_t(b * 8 + i) * a.experts] = d[half][4 * b + 2 * second + i] + bias;
        }
      }
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <int kTerms>
__global__ void __launch_bounds__(kSumThreads, 1)
    sums_kernel(const __grid_constant__ RouterArgs a, const __grid_constant__ FastLogits f, int stages) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ Barriers barriers;
  const uint32_t base = (address(dynamic) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      barrier_init(&barriers.full[i], kFetch + 1);
      barrier_init(&barriers.empty[i], kMultiply / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_previous();
  release_next();
  if (threadIdx.x >= kMultiply) {
    fewer_registers<40>();
    fetch(a, f, base, stages, barriers);
  } else {
    more_registers<232>();
    add_up<kTerms>(a, f, base, stages, barriers);
  }
#else
  __trap();  // compiled without Hopper's own instructions: never launched
#endif
}

}  // namespace

cudaError_t launch_sums_sm90(const RouterArgs& args, const FastLogits& f, const DeviceInfo& device,
                             cudaStream_t stream) {
  const int stage_bytes = f.terms * kTermBytes + kRightBytes;
  const int room = (device.shared_bytes - 2048) / stage_bytes, stages = room < kStagesHere ? room : kStagesHere;
  const size_t bytes = static_cast<size_t>(stages) * stage_bytes + 1024;
  const auto kernel = f.terms == 2 ? sums_kernel<2> : sums_kernel<1>;
  const dim3 grid(static_cast<unsigned>(f.tiles), static_cast<unsigned>((args.tokens + kTokens - 1) / kTokens));
  return launch_dependent(kernel, {grid, kSumThreads, bytes}, device, stream, args, f, stages);
}

}  // namespace deltafuse::moe
