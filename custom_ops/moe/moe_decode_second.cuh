// A few tokens: down, the weighted sum (weights are in the activations) and the shared expert.
//
// A block owns 16 rows of the result and walks over the stages of all experts, a warp taking every so many; their sums
// meet in shared memory at the end, in a fixed order. It starts when the choice is made, and its weights are on their
// way while the activations are not there yet.
#pragma once

#include "moe_decode_parts.cuh"

namespace deltafuse::moe {

// One token: all activations lie in shared memory, and nearly all weights are in flight. More: activations come as they
// are needed.
constexpr int kOneThreads = 256, kOneDepth = 7;
constexpr int kManyThreads = 512, kManyDepth = 4;
constexpr int kOneBytes = 32768;  // of activations at most

struct SecondShared {
  static __host__ __device__ int slot_bytes(const DecodeArgs& a) { return slot_bytes_of(a.down, a.shared_down); }
  static __host__ __device__ int h_row_bytes(const DecodeArgs& a) {
    const int own = a.down.blocks(), other = a.shared_down.count ? a.shared_down.blocks() : 0;
    return (own > other ? own : other) * 256;
  }
  static __host__ __device__ int64_t h_bytes(const DecodeArgs& a) {
    return int64_t(a.router.top_k + (a.shared_down.count ? 1 : 0)) * h_row_bytes(a);
  }
  static __host__ __device__ bool one(const DecodeArgs& a) { return a.router.tokens == 1 && h_bytes(a) <= kOneBytes; }
  static __host__ __device__ int ring_at(const DecodeArgs& a) {  // experts; table [experts, tokens] of int16
    const int pairs = a.router.tokens * a.router.top_k;
    return (pairs * 4 + (one(a) ? 0 : pairs * a.router.tokens * 2) + 127) / 128 * 128;
  }
  static __host__ __device__ size_t bytes(const DecodeArgs& a, int warps, int depth) {
    const size_t ring = size_t(warps) * depth * slot_bytes(a), sums = size_t(warps) * 512;
    return ring_at(a) + (ring > sums ? ring : sums) + (one(a) ? static_cast<size_t>(h_bytes(a)) : 0);
  }
};

template <typename T, Pack P, Pack S, bool kOne, bool kMultiply>
__global__ void __launch_bounds__(kOne ? kOneThreads : kManyThreads, kOne ? 4 : 1)
    decode_second_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int kDepth = kOne ? kOneDepth : kManyDepth;
  const RouterArgs& r = a.router;
  int* experts = reinterpret_cast<int*>(shared);
  const int pairs = r.tokens * r.top_k, warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4, slab = blockIdx.x, slot_bytes = SecondShared::slot_bytes(a);
  int16_t* table = reinterpret_cast<int16_t*>(experts + pairs);
  unsigned char* ring = shared + SecondShared::ring_at(a);
  float4* sums = reinterpret_cast<float4*>(ring);  // when the ring is not needed any more
  unsigned char* h_here = ring + warps * kDepth * slot_bytes;
  ring += warp * kDepth * slot_bytes;
  const uint32_t ring_address = shared_address(ring);

  STAMP_INTO(2, 0);
  // Written before this kernel could start.
  const int items = kOne ? pairs : __ldcg(a.routed);
#pragma unroll 1
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) experts[i] = __ldcg(a.routed + 1 + i);
  if constexpr (!kOne) {
#pragma unroll 1
    for (int i = threadIdx.x; i < items * r.tokens; i += blockDim.x) table[i] = -1;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
      table[__ldcg(a.routed + 1 + pairs + i) * r.tokens + i / r.top_k] = static_cast<int16_t>(i);
    }
  }
  __syncthreads();

  // Work is stages: each item's, then the shared expert's. A place in it:
  struct Place {
    int item, stage;
  };
  const int last = a.shared_down.count ? items : items - 1;  // item `items` is the shared expert
  auto stages_of = [&](int item) { return item == items ? a.shared_down.stages : a.down.stages; };
  auto settle = [&](Place& at) {
    while (at.item <= last && at.stage >= stages_of(at.item)) at.stage -= stages_of(at.item), ++at.item;
  };
  const Source source = slab_source<P>(a.down, 0, slab, 0);
  const int64_t expert_bytes = a.down.expert_bytes();
  bool waited = false;

#pragma unroll 1
  for (int base = 0; base < r.tokens; base += 8) {
    const int token = base + g;
    auto row_of = [&](int item) {  // of h, the lane's token's; -1: the token does not use the expert
      if (kOne) return g ? -1 : item;
      return token >= r.tokens ? -1 : item == items ? pairs + token : static_cast<int>(table[item * r.tokens + token]);
    };
    auto advance = [&](Place& at, int by) {
      at.stage += by;
      settle(at);
      if constexpr (!kOne) {  // experts that none of the 8 tokens needs
        while (at.item < items && __ballot_sync(~0u, row_of(at.item) >= 0) == 0) at.stage += warps, settle(at);
      }
    };
    Place next{0, 0}, at{0, 0};
    advance(next, warp);
    at = next;
    int next_slot = 0, slot = 0;
    auto fetch = [&] {
      if (next.item <= last) {
        const uint32_t to = ring_address + next_slot * slot_bytes;
        if (next.item < items) {
          Source from = source;
          from.payload += experts[next.item] * expert_bytes + next.stage * a.down.stage_bytes();
          copy_stage<P>(from, to);
        } else {
          copy_stage<S>(slab_source<S>(a.shared_down, 0, slab, next.stage), to);
        }
        next_slot = next_slot + 1 == kDepth ? 0 : next_slot + 1;
        advance(next, warps);
      }
      copies_commit();
    };
#pragma unroll 1
    for (int i = 0; i < kDepth; ++i) fetch();
    STAMP_INTO(2, 1);

    float total[4] = {};
    auto multiply = [&](auto pack, const Packed& w, const unsigned char* row, bool have) {
      constexpr Pack kPack = decltype(pack)::kPack;
      const float factor = w.multiplier ? w.multiplier[at.item == items ? 0 : experts[at.item]] : 1.0f;
      copies_wait<kDepth - 1>();
      __syncwarp();
      multiply_any<T, kPack, true, kMultiply>(
          w.sub != 1, w.zeros, ring + slot * slot_bytes, row + at.stage * (kStageCols<kPack> * 2) + t * 16, have,
          [](int, int) { return 0.0f; }, Shifts{a.by_8, a.by_12}, factor, total);
    };
    // Rehearsed: a stage times zeros, to have the instructions in the cache when the activations come.
#pragma unroll 1
    for (int pass = kOne && a.tuning.rehearse ? 0 : 1; pass < 2; ++pass) {
      if (pass && !waited) {
        wait_previous();  // for the activations
        STAMP_INTO(2, 2);
        release_next();
        waited = true;
        if constexpr (kOne) {
          const int pieces = SecondShared::h_row_bytes(a) / 16;
          const auto* h = static_cast<const unsigned char*>(a.h);
#pragma unroll 1
          for (int i = threadIdx.x; i < (last + 1) * pieces; i += blockDim.x) {
            const int row = i / pieces;
            copy16(shared_address(h_here) + i * 16,
                   h + row * int64_t(a.h_stride) * sizeof(T) + (i - row * pieces) * 16);
          }
          copies_commit();
          copies_wait<0>();
          __syncthreads();
        }
        STAMP_INTO(2, 3);
      }
#pragma unroll 1
      while (at.item <= last) {
        const bool own = at.item == items;
        const int row = row_of(at.item), from = row < 0 ? 0 : row;
        const unsigned char* h = kOne ? h_here + from * SecondShared::h_row_bytes(a)
                                      : static_cast<const unsigned char*>(a.h) + from * int64_t(a.h_stride) * sizeof(T);
        if (P == S || !own) {
          multiply(PackOf<P>(), own ? a.shared_down : a.down, h, pass && row >= 0);
        } else {
          multiply(PackOf<S>(), a.shared_down, h, pass && row >= 0);
        }
        if (pass == 0) break;
        __syncwarp();
        slot = slot + 1 == kDepth ? 0 : slot + 1;
        fetch();
        advance(at, warps);
      }
      if (pass == 0) total[0] = total[1] = total[2] = total[3] = 0.0f;
    }
    STAMP_INTO(2, 4);
    copies_wait<0>();
    __syncthreads();  // the ring becomes the sums' place
    sums[warp * 32 + lane] = make_float4(total[0], total[1], total[2], total[3]);
    __syncthreads();
    // The four numbers that each lane has: rows g and g + 8 of tokens 2t and 2t + 1.
#pragma unroll 1
    for (int i = warp; i < 4; i += warps) {
      const float* mine = reinterpret_cast<const float*>(sums + lane) + i;
      float sum = 0.0f;
#pragma unroll 4
      for (int w = 0; w < warps; ++w) sum += mine[w * 128];
      const int row = slab * 16 + g + i / 2 * 8, column = base + 2 * t + i % 2;
      if (row < a.down.rows && column < r.tokens) {
        static_cast<T*>(a.y)[int64_t(column) * a.down.rows + row] = from_float<T>(sum);
      }
    }
    __syncthreads();
  }
  STAMP_INTO(2, 5);
}

template <typename T, Pack P, Pack S, bool kOne, bool kMultiply>
cudaError_t launch_second_pair(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const int threads = kOne ? a.tuning.second_threads : a.tuning.many_threads;
  const size_t shared = SecondShared::bytes(a, threads / 32, kOne ? kOneDepth : kManyDepth);
  return launch_kernel(decode_second_kernel<T, P, S, kOne, kMultiply>, (a.down.rows + 15) / 16, threads, shared,
                       device.capability >= 90 && a.tuning.dependent, stream, a);
}

template <typename T, bool kOne>
cudaError_t launch_second_type(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const Pack shared = a.shared_down.count ? a.shared_down.pack : a.down.pack;
  return dispatch_packs(a.down.pack, shared, [&](auto own, auto other) {
    constexpr Pack kPack = decltype(own)::kPack, kShared = decltype(other)::kPack;
    if constexpr (kOne && kPack == Pack::kInt4) {
      if (a.tuning.multiply) return launch_second_pair<T, kPack, kShared, true, true>(a, device, stream);
    }
    return launch_second_pair<T, kPack, kShared, kOne, false>(a, device, stream);
  });
}

}  // namespace deltafuse::moe
