// The first pass of prompts' router logits: products of bfloat16 terms on Hopper's tensor cores. A block takes 256
// experts by 128 tokens; the sums of 64 columns are added up in float32, so that errors stay small and known. Two
// blocks with the same experts fetch half of the weights each, for both: the L2's bandwidth would be the limit.
#include "moe_dependent.h"
#include "moe_device.cuh"
#include "moe_gemm_parts.cuh"
#include "moe_logits_fast.h"

namespace deltafuse::moe {
namespace {

using namespace sm90;

constexpr int kTokens = 128, kRightBytes = kTokens * 128;
constexpr int kBlocks = 2;                                                      // of a cluster
constexpr int kLefts = 5, kRights = 3;                                          // stages of weights and of tokens
constexpr int kMultiply = 256, kFetch = 128, kSumThreads = kMultiply + kFetch;  // threads: two warpgroups, and one

// 64 columns of the weights are two stages: the warpgroups' first units, and their second ones.
__host__ __device__ constexpr uint32_t left_bytes(int terms) { return terms * kFastStage; }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct Barriers {
  uint64_t left_full[kLefts], left_empty[kLefts], right_full[kRights], right_empty[kRights];
};

__device__ __forceinline__ void fetch(const RouterArgs& a, const FastLogits& f, uint32_t lefts, uint32_t rights,
                                      Barriers& barriers) {
  const int thread = threadIdx.x - kMultiply, chunk = thread % 8, row0 = thread / 8;
  const int first = blockIdx.y * kTokens;
  const uint32_t bytes = left_bytes(f.terms), half = bytes / kBlocks, own = cluster_rank() * half;
  const unsigned char* weights = f.weights + int64_t(blockIdx.x) * f.stages * 2 * bytes + own;
  const auto* x = static_cast<const __nv_bfloat16*>(a.x) + int64_t(first + row0) * a.hidden + chunk * 8;
  const int rows = (min(kTokens, a.tokens - first) - row0 + 15) / 16;
  const uint64_t policy = evict_normal_policy();
  Pipeline left, right;
  for (int k = 0; k < f.stages; ++k) {
    barrier_wait(&barriers.right_empty[right.stage], right.phase ^ 1);
    const uint32_t to = rights + right.stage * kRightBytes + row0 * 128 + ((chunk ^ (row0 & 7)) * 16);
    const bool inside = k * 64 + chunk * 8 < a.hidden;
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) {
      if (i < rows) copy16(to + i * 2048, x + (inside ? int64_t(i) * 16 * a.hidden + k * 64 : 0), inside ? 16 : 0);
    }
    barrier_arrive_copied(&barriers.right_full[right.stage]);
    right.next(kRights);
    if (thread != 0) continue;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      barrier_wait(&barriers.left_empty[left.stage], left.phase ^ 1);  // in both blocks
      uint64_t* bar = &barriers.left_full[left.stage];
      barrier_expect(bar, bytes);
      bulk_copy_to_all(lefts + left.stage * bytes + own, weights, half, bar, (1 << kBlocks) - 1, policy);
      weights += bytes;
      left.next(kLefts);
    }
  }
}

template <int kTerms>
__device__ __forceinline__ void add_up(const RouterArgs& a, const FastLogits& f, uint32_t lefts, uint32_t rights,
                                       Barriers& barriers) {
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  constexpr uint32_t kBytes = left_bytes(kTerms);
  float d[2][kTokens / 2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) d[half][i] = 0.0f;
  }
  float part[kTokens / 2] = {};
  pin(part);
  Pipeline left, right;
  for (int k = 0; k < f.stages; ++k) {
    barrier_wait(&barriers.right_full[right.stage], right.phase);
    const uint32_t b = place(rights + right.stage * kRightBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      barrier_wait(&barriers.left_full[left.stage], left.phase);
      tensor_fence();
      // The smaller terms first.
      const uint32_t at = place(lefts + left.stage * kBytes + warpgroup * 8192);
      constexpr int kLast = (kTerms - 1) * kFastStage;
      fence();
      Product<kTokens>::fresh<__nv_bfloat16>(part, descriptor(at, kLast), descriptor(b, 0));
#pragma unroll
      for (int s = 1; s < 4; ++s) {
        Product<kTokens>::shared<__nv_bfloat16>(part, descriptor(at, kLast + s * 32), descriptor(b, s * 32));
      }
      if constexpr (kTerms == 2) {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          Product<kTokens>::shared<__nv_bfloat16>(part, descriptor(at, s * 32), descriptor(b, s * 32));
        }
      }
      commit();
      wait<0>();
      if (lane < kBlocks) barrier_arrive_at(&barriers.left_empty[left.stage], lane);
      if (half == 1 && lane == 0) barrier_arrive(&barriers.right_empty[right.stage]);
      left.next(kLefts);
      pin(part);
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) d[half][i] += part[i];
    }
    right.next(kRights);
  }
  const int row = blockIdx.x * 256 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int token0 = blockIdx.y * kTokens + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int expert = row + (warpgroup * 2 + half) * 64 + second * 8;
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
    sums_kernel(const __grid_constant__ RouterArgs a, const __grid_constant__ FastLogits f) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ Barriers barriers;
  const uint32_t rights = (address(dynamic) + 1023) & ~1023u, lefts = rights + kRights * kRightBytes;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kLefts; ++i) {
      barrier_init(&barriers.left_full[i], 1);
      barrier_init(&barriers.left_empty[i], kBlocks * kMultiply / 32);
    }
    for (int i = 0; i < kRights; ++i) {
      barrier_init(&barriers.right_full[i], kFetch);
      barrier_init(&barriers.right_empty[i], kMultiply / 32);
    }
    barrier_init_fence();
  }
  cluster_sync();
  wait_previous();
  release_next();
  if (threadIdx.x >= kMultiply) {
    fewer_registers<40>();
    fetch(a, f, lefts, rights, barriers);
  } else {
    more_registers<232>();
    add_up<kTerms>(a, f, lefts, rights, barriers);
  }
  cluster_sync();  // nobody leaves while the other one's copies and arrivals are on their way
#else
  __trap();  // compiled without Hopper's own instructions: never launched
#endif
}

}  // namespace

cudaError_t launch_sums_sm90(const RouterArgs& args, const FastLogits& f, const DeviceInfo& device,
                             cudaStream_t stream) {
  const size_t bytes = kLefts * left_bytes(f.terms) + kRights * kRightBytes + 1024;
  const auto kernel = f.terms == 2 ? sums_kernel<2> : sums_kernel<1>;
  const int token_tiles = (args.tokens + kTokens - 1) / kTokens;
  LaunchForm form{dim3(static_cast<unsigned>(f.tiles), static_cast<unsigned>((token_tiles + 1) / kBlocks * kBlocks)),
                  kSumThreads, bytes};
  form.cluster_y = kBlocks;
  return launch_dependent(kernel, form, device, stream, args, f);
}

}  // namespace deltafuse::moe
