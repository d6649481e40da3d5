// The experts' products on Hopper's tensor cores: four warps fetch, two warpgroups multiply 128 rows each. Integers
// become T in registers; float8 sums are scaled into float32 every 128 columns. Blocks stay and take tiles from the
// list that the router left on the device.
#pragma once

#include "moe_dependent.h"
#include "moe_device.cuh"
#include "moe_gemm_multiply.cuh"
#include "moe_gemm_store.cuh"

namespace deltafuse::moe {
namespace sm90 {

template <typename T, Pack P, int U, bool kPlainScales>
__global__ void __launch_bounds__(consumers(U) + kProducers, 1)
    gemm_kernel(const __grid_constant__ GemmPair pair, const __grid_constant__ StageLayout layout) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kConsumers = consumers(U), kMost = U == 2 ? most_tokens(P) : kFewTokens;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ Shared shared;
  __shared__ __align__(8) RowScales row_scales[P == Pack::kFloat8 ? kSlots : 1];
  unsigned char* memory = dynamic + (1024 - (address(dynamic) & 1023)) % 1024;
  if (threadIdx.x == 0) init_barriers(shared, layout.stages, kConsumers);
  __syncthreads();
  wait_previous();
  release_next();
  if (threadIdx.x >= kConsumers) {
    // With the multiplying warps' 232 these are all that the block was started with, 168 a thread: one more, and the
    // last of them would wait for ever.
    if constexpr (U == 2) fewer_registers<40>();
    const int thread = static_cast<int>(threadIdx.x) - (kConsumers + kProducers - kFetchers);
    if (thread >= 0) {
      fetch_tokens<P, kMost>(pair, layout, address(memory), shared, row_scales, thread);
    } else if (threadIdx.x == kConsumers) {
      fetch_weights(pair, layout, address(memory), shared);
    }
  } else {
    if constexpr (U == 2) more_registers<232>();
    Reader reader;
    for (int turn = 0;; ++turn) {
      const int slot = turn % kSlots;
      barrier_wait(&shared.ready[slot], turn / kSlots & 1);
      const int count = shared.work[slot].count;
      if (count == 0) break;
      auto consume = [&](auto size) {
        constexpr int N = decltype(size)::value;
        if constexpr (N <= kMost && tile_columns(P, N) == N) {
          const Work& work = shared.work[slot];
          const Packed& packed = pair.product[0].weights;
          float d[U][N / 2];
          multiply<T, P, N, U, kPlainScales>(packed, layout, memory, shared, reader, work.stages, d);
          const Corner<P, U> corner(address(memory) + reader.before * layout.bytes, packed);
          store<T, P, N, U>(pair.product[work.product], work, corner, row_scales[P == Pack::kFloat8 ? slot : 0], d);
          tensor_fence();  // copies will write where this did
          reader.release_before(shared);
        }
      };
      switch (tile_columns(P, count) / 16) {
#define DF_SIZE(N)                             \
  case N / 16:                                 \
    consume(std::integral_constant<int, N>()); \
    break;
        DF_SIZE(32)
        DF_SIZE(64)
        DF_SIZE(80)
        DF_SIZE(96)
        DF_SIZE(112)
        DF_SIZE(128)
        DF_SIZE(144)
        DF_SIZE(160)
        DF_SIZE(176)
        DF_SIZE(192)
#undef DF_SIZE
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&shared.free[slot]);
    }
  }
#else
  __trap();  // compiled without Hopper's own instructions: never launched (see launch)
#endif
}

template <typename T, Pack P, int U, bool kPlainScales>
cudaError_t launch_kernel(const GemmPair& pair, const DeviceInfo& device, cudaStream_t stream) {
  const auto kernel = gemm_kernel<T, P, U, kPlainScales>;
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status != cudaSuccess) return status;
  const int fixed = static_cast<int>(attributes.sharedSizeBytes);
  const StageLayout layout = stage_layout(pair.product[0], device.shared_bytes, fixed);
  const LaunchForm form{static_cast<unsigned>(device.multiprocessors), consumers(U) + kProducers,
                        static_cast<size_t>(layout.stages) * layout.bytes + 1024};
  return launch_dependent(kernel, form, device, stream, pair, layout);
}

template <typename T, Pack P>
cudaError_t launch(const GemmPair& pair, const DeviceInfo& device, cudaStream_t stream) {
  if constexpr (P == Pack::kInt4 || P == Pack::kInt8) {
    const bool few = pair.product[0].tile_tokens <= kFewTokens;
    const Packed& w = pair.product[0].weights;
    if (w.sub != 1 || w.zeros) {
      return few ? launch_kernel<T, P, 1, false>(pair, device, stream)
                 : launch_kernel<T, P, 2, false>(pair, device, stream);
    }
    if (few) return launch_kernel<T, P, 1, true>(pair, device, stream);
  }
  return launch_kernel<T, P, 2, true>(pair, device, stream);
}

}  // namespace sm90
}  // namespace deltafuse::moe
