// Several tokens: down, the weighted sum (weights are in the activations) and the shared expert.
//
// Work is units, a stage of 16 rows (a slab) of an expert for up to two of its tokens: slab by slab, there expert by
// expert. Blocks and their warps take equal runs of units, eight tokens at a time. A unit's weights and activations are
// copied to shared memory some units ahead. Sums of a slab that several blocks share meet in global memory, where the
// last of them adds them up; everything is added in a fixed order.
#pragma once

#include "moe_decode_parts.cuh"

namespace deltafuse::moe {

constexpr int kManyThreads = 384, kManyDepth = 4;
constexpr int kUnitTokens = 2, kBaseTokens = 8;
constexpr int kSlabSums = kBaseTokens * 16;  // of a slab

struct ManyShared {
  static __host__ __device__ int weight_bytes(const DecodeArgs& a) { return slot_bytes_of(a.down, a.shared_down); }
  // A row of activations: 256 bytes of numbers or digits, and 64 of scales and of sums each.
  static __host__ __device__ int row_bytes(const DecodeArgs& a) { return 256 + 64 * (a.has_scales + a.has_sums); }
  static __host__ __device__ int slot_bytes(const DecodeArgs& a) {
    return weight_bytes(a) + kUnitTokens * row_bytes(a);
  }
  static __host__ __device__ int most_items(const RouterArgs& r) {
    return (r.tokens < kBaseTokens ? r.tokens : kBaseTokens) * r.top_k + kBaseTokens / kUnitTokens;
  }
  // Experts, tokens' bits, first items; items' experts and rows; a count; warps' first slabs.
  static __host__ __device__ int sums_at(const DecodeArgs& a) {
    return (4 * (3 * a.router.tokens * a.router.top_k + 2 * most_items(a.router) + 1 + kManyThreads / 32) + 127) / 128 *
           128;
  }
  static __host__ __device__ int ring_at(const DecodeArgs& a, int warps) {
    return sums_at(a) + warps * 2 * kSlabSums * 4;
  }
  static __host__ __device__ size_t bytes(const DecodeArgs& a, int warps) {
    return ring_at(a, warps) + size_t(warps) * kManyDepth * slot_bytes(a);
  }
};

// The experts of eight tokens, two tokens at a time, in shared memory.
struct Items {
  int *used, *masks, *firsts;  // [N, k]
  int* experts;                // [items]
  int* rows;                   // [items] two int16, rows of h, the second -1 where there is one
  int *count, *slabs;          // items, less the shared expert's; warps' first slabs
  __device__ Items(unsigned char* base, const RouterArgs& r) {
    const int pairs = r.tokens * r.top_k, most = ManyShared::most_items(r);
    used = reinterpret_cast<int*>(base), masks = used + pairs, firsts = masks + pairs;
    experts = firsts + pairs, rows = experts + most, count = rows + most, slabs = count + 1;
  }
  // All threads. From what the first product left in `routed`, of which `many` experts are used.
  __device__ __forceinline__ void make(const DecodeArgs& a, int many, int base) const {
    const RouterArgs& r = a.router;
    const int pairs = r.tokens * r.top_k, begin = base * r.top_k, end = min(pairs, begin + kBaseTokens * r.top_k);
    const int lane = threadIdx.x % 32, most = ManyShared::most_items(r);
#pragma unroll 1
    for (int i = threadIdx.x; i < many; i += blockDim.x) used[i] = __ldcg(a.routed + 1 + i), masks[i] = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < most; i += blockDim.x) rows[i] = -1;
    __syncthreads();
#pragma unroll 1
    for (int pair = begin + static_cast<int>(threadIdx.x); pair < end; pair += blockDim.x) {
      atomicOr(masks + __ldcg(a.routed + 1 + pairs + pair), 1 << (a.by_top_k(pair) - base));
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      int before = 0;
#pragma unroll 1
      for (int i = lane; i - lane < many; i += 32) {
        const int own = i < many ? (__popc(masks[i]) + kUnitTokens - 1) / kUnitTokens : 0;
        int upto = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int below = __shfl_up_sync(~0u, upto, step);
          if (lane >= step) upto += below;
        }
        const int at = before + upto - own;
        if (i < many) firsts[i] = at;
        for (int k = 0; k < own; ++k) experts[at + k] = used[i];
        before += __shfl_sync(~0u, upto, 31);
      }
      if (lane == 0) *count = before;
      if (a.shared_down.count && lane < kBaseTokens / kUnitTokens) {
        const int token = base + lane * kUnitTokens, row = pairs + token;
        rows[before + lane] = (row & 0xffff) | (token + 1 < r.tokens ? (row + 1) << 16 : -65536);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int pair = begin + static_cast<int>(threadIdx.x); pair < end; pair += blockDim.x) {
      const int place = __ldcg(a.routed + 1 + pairs + pair);
      const int slot = __popc(masks[place] & ((1 << (a.by_top_k(pair) - base)) - 1));
      reinterpret_cast<int16_t*>(rows)[firsts[place] * kUnitTokens + slot] = static_cast<int16_t>(pair);
    }
    __syncthreads();
  }
};

template <typename T, Pack P, Pack S>
__global__ void __launch_bounds__(kManyThreads, 2) decode_many_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  const RouterArgs& r = a.router;
  const int pairs = r.tokens * r.top_k, warps = blockDim.x / 32, warp = uniform(threadIdx.x / 32),
            lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int weight_bytes = ManyShared::weight_bytes(a), row_slot = ManyShared::row_bytes(a);
  const int slot_bytes = ManyShared::slot_bytes(a), ring_bytes = kManyDepth * slot_bytes;
  const Items items(shared, r);
  float* sums = reinterpret_cast<float*>(shared + ManyShared::sums_at(a));  // [warps, 2, kBaseTokens, 16]
  float* own_sums = sums + warp * 2 * kSlabSums;
  const unsigned char* ring = shared + ManyShared::ring_at(a, warps) + warp * ring_bytes;
  const uint32_t ring_address = shared_address(ring);
  const int slabs = (a.down.rows + 15) / 16, h_bytes = a.h_stride * 2, h_groups = a.h_stride / 8;
  const GroupMasks masks;

  // This kernel may start when the one before the first product is done, which sets routed to zero.
  int many;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(many) : "l"(a.routed) : "memory");
  } while (many == 0);

#pragma unroll 1
  for (int base = 0; base < r.tokens; base += kBaseTokens) {
    items.make(a, many, base);
    const int count = uniform(*items.count), own_units = count * a.down.stages;
    const int here = min(kBaseTokens, r.tokens - base);
    const int slab_units =
        own_units + (a.shared_down.count ? (here + kUnitTokens - 1) / kUnitTokens * a.shared_down.stages : 0);
    const int total = slabs * slab_units, per_block = (total + gridDim.x - 1) / gridDim.x;
    const int begin = min(static_cast<int>(blockIdx.x) * per_block, total), end = min(begin + per_block, total);
    const int per_warp = (per_block + warps - 1) / warps;
    const int from = min(begin + warp * per_warp, end), to = min(from + per_warp, end);

    // Where a warp is: a slab, an item there, a stage of that.
    struct Walk {
      int slab, item, stage;
    };
    Walk start;
    start.slab = from / slab_units;
    {
      const int unit = from - start.slab * slab_units;
      const bool own = unit >= own_units;
      const int stages = own ? a.shared_down.stages : a.down.stages, within = own ? unit - own_units : unit;
      start.item = own ? within / stages : a.by_stages(within);
      start.stage = within - start.item * stages;
      if (own) start.item += count;
    }
    if (lane == 0) items.slabs[warp] = from < to ? start.slab : -2;
#pragma unroll
    for (int i = 0; i < 2 * kSlabSums; i += 32) own_sums[i + lane] = 0.0f;
    const int all_items = count + (slab_units - own_units ? (here + kUnitTokens - 1) / kUnitTokens : 0);
    auto stages_of = [&](int item) { return item < count ? a.down.stages : a.shared_down.stages; };
    auto next_item = [&](Walk& walk) {
      walk.stage = 0;
      if (++walk.item == all_items) walk.item = 0, ++walk.slab;
    };

    // What is copied next.
    Walk ahead = start;
    int ahead_left = to - from, item_left = 0, row_step = 0;
    bool ahead_own = false;
    Source source{};
    const unsigned char* row_source[kUnitTokens] = {};  // the lane's part of activations
    auto fetch = [&](int at, bool weights, bool activations) {
      if (ahead_left > 0) {
        if (item_left == 0) {
          ahead_own = ahead.item >= count;
          const Packed& w = ahead_own ? a.shared_down : a.down;
          const int expert = ahead_own ? 0 : items.experts[ahead.item];
          source = P == S || !ahead_own ? slab_source<P>(w, expert, ahead.slab, ahead.stage)
                                        : slab_source<S>(w, expert, ahead.slab, ahead.stage);
          item_left = stages_of(ahead.item) - ahead.stage;
          const int rows = items.rows[ahead.item];
          const Pack pack = ahead_own ? S : P;
          const bool digits = pack == Pack::kInt4 || pack == Pack::kInt8;
          row_step = digits && lane >= 16 ? 64 : pack == Pack::kPlain ? 128 : 256;
          const int parts = digits ? 16 + 4 * (a.has_scales + a.has_sums) : row_step / 16;
#pragma unroll
          for (int i = 0; i < kUnitTokens; ++i) {
            const int row = i ? rows >> 16 : static_cast<int16_t>(rows);
            const unsigned char* p = static_cast<const unsigned char*>(a.h) + int64_t(row) * h_bytes + lane * 16;
            if (digits && lane >= 16) {
              p = reinterpret_cast<const unsigned char*>((lane < 20 ? a.h_scales : a.h_sums) +
                                                         int64_t(row) * h_groups) +
                  lane % 4 * 16;
            }
            row_source[i] = row >= 0 && lane < parts ? p + ahead.stage * row_step : nullptr;
          }
        }
        if (weights) {
          if (P == S || !ahead_own) {
            copy_stage<P>(source, ring_address + at);
          } else {
            copy_stage<S>(source, ring_address + at);
          }
        }
        source.payload += ahead_own ? a.shared_down.stage_bytes() : a.down.stage_bytes();
#pragma unroll
        for (int i = 0; i < kUnitTokens; ++i) {
          if (row_source[i]) {
            if (activations) copy16(ring_address + at + weight_bytes + i * row_slot + lane * 16, row_source[i]);
            row_source[i] += row_step;
          }
        }
        --ahead_left;
        if (--item_left == 0) next_item(ahead);
      }
      copies_commit();
    };
    if (base == 0) {  // activations are not there yet
#pragma unroll 1
      for (int i = 0; i < kManyDepth; ++i) fetch(i * slot_bytes, true, false);
      wait_previous();
      release_next();
      ahead = start, ahead_left = to - from, item_left = 0;
#pragma unroll 1
      for (int i = 0; i < kManyDepth; ++i) fetch(i * slot_bytes, false, true);
      copies_wait<0>();
    } else {
#pragma unroll 1
      for (int i = 0; i < kManyDepth; ++i) fetch(i * slot_bytes, true, true);
    }

    Walk walk = start;
    int left = to - from, at = 0;
#pragma unroll 1
    while (left > 0) {
      const bool own = walk.item >= count;
      const int rows = items.rows[walk.item], units = min(left, stages_of(walk.item) - walk.stage);
      float totals[kUnitTokens][2] = {}, floats[4] = {};
      auto multiply = [&](auto pack, const Packed& w) {
        constexpr Pack kPack = decltype(pack)::kPack;
        constexpr bool kInteger = kPack == Pack::kInt4 || kPack == Pack::kInt8;
        const float factor = w.multiplier ? w.multiplier[own ? 0 : items.experts[walk.item]] : 1.0f;
        const bool fine = w.sub != 1, zeros = w.zeros;
#pragma unroll 1
        for (int i = 0; i < units; ++i) {
          copies_wait<kManyDepth - 1>();
          __syncwarp();
          const unsigned char* slot = ring + at;
          const unsigned char* row = slot + weight_bytes + t * 16;
          if constexpr (kInteger) {
            auto run = [&](float (&sum)[2]) {
              uint4 digits[2];
              digits[0] = *reinterpret_cast<const uint4*>(row + (g & 1) * 64);
              digits[1] = *reinterpret_cast<const uint4*>(row + (g & 1) * 64 + 128);
              const float4 scales = *reinterpret_cast<const float4*>(row + 256);
              const float4 adds = zeros ? *reinterpret_cast<const float4*>(row + 320) : float4{};
              if (fine) {
                multiply_groups<T, kPack, true>(zeros, slot, digits, masks, scales, adds, factor, sum);
              } else {
                multiply_groups<T, kPack, false>(zeros, slot, digits, masks, scales, adds, factor, sum);
              }
            };
            run(totals[0]);
            if (rows >= 0) row += row_slot, run(totals[1]);
          } else {  // columns are tokens
            multiply_floats<T, kPack>(slot, row + (g & 1) * row_slot, g == 0 || (g == 1 && rows >= 0), factor, floats);
          }
          __syncwarp();
          fetch(at, true, true);
          at = at + slot_bytes == ring_bytes ? 0 : at + slot_bytes;
        }
      };
      if (P == S || !own) {
        multiply(PackOf<P>(), own ? a.shared_down : a.down);
      } else {
        multiply(PackOf<S>(), a.shared_down);
      }
#pragma unroll
      for (int i = 0; i < kUnitTokens; ++i) {
        const int row = i ? rows >> 16 : static_cast<int16_t>(rows);
        if (row < 0) continue;
        float low = totals[i][0], high = totals[i][1];
        low += __shfl_xor_sync(~0u, low, 1), high += __shfl_xor_sync(~0u, high, 1);
        low += __shfl_xor_sync(~0u, low, 2), high += __shfl_xor_sync(~0u, high, 2);
        float* to_add =
            own_sums + (walk.slab - start.slab) * kSlabSums + ((own ? row - pairs : a.by_top_k(row)) - base) * 16 + g;
        if (t == 0) to_add[0] += low + floats[i], to_add[8] += high + floats[2 + i];
      }
      left -= units;
      next_item(walk);
    }
    copies_wait<0>();
    __syncthreads();

    // A slab that goes on in the next block first, for that block's sake.
    const int first_slab = begin / slab_units, end_slab = end / slab_units;  // slabs before end_slab end here
    auto sum_of = [&](int slab, int i) {
      float sum = 0.0f;
#pragma unroll 4
      for (int w = 0; w < warps; ++w) {
        const int local = slab - items.slabs[w];
        if (local == 0 || local == 1) sum += sums[(w * 2 + local) * kSlabSums + i];
      }
      return sum;
    };
    float* parts = a.parts + int64_t(base / kBaseTokens) * gridDim.x * kSlabSums;
    int32_t* flags = a.flags + base / kBaseTokens * gridDim.x;
    if (begin < end && end_slab * slab_units < end) {
#pragma unroll 1
      for (int i = threadIdx.x; i < kSlabSums; i += blockDim.x) parts[blockIdx.x * kSlabSums + i] = sum_of(end_slab, i);
      __syncthreads();
      if (threadIdx.x == 0) {
        __threadfence();
        asm volatile("st.release.gpu.global.s32 [%0], %1;\n" ::"l"(flags + blockIdx.x), "r"(1) : "memory");
      }
    }
    const int shared_from = first_slab * slab_units / per_block;  // the block where the first slab begins
    if (first_slab < end_slab && shared_from < static_cast<int>(blockIdx.x)) {
#pragma unroll 1
      for (int b = shared_from + static_cast<int>(threadIdx.x); b < static_cast<int>(blockIdx.x); b += blockDim.x) {
        int done;
        do {
          asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(done) : "l"(flags + b) : "memory");
        } while (done == 0);
      }
      __syncthreads();
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < (end_slab - first_slab) * kSlabSums; i += blockDim.x) {
      const int slab = first_slab + i / kSlabSums, place = i % kSlabSums, token = base + place / 16,
                row = slab * 16 + place % 16;
      float sum = 0.0f;
      if (slab == first_slab) {
        for (int b = shared_from; b < static_cast<int>(blockIdx.x); ++b) sum += __ldcg(parts + b * kSlabSums + place);
      }
      sum += sum_of(slab, place);
      if (row < a.down.rows && token < r.tokens) {
        static_cast<T*>(a.y)[int64_t(token) * a.down.rows + row] = from_float<T>(sum);
      }
    }
    __syncthreads();
  }
}

template <typename T, Pack P, Pack S>
cudaError_t launch_many_pair(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const int threads = a.tuning.many_threads;
  const size_t shared = ManyShared::bytes(a, threads / 32);
  int resident = 0;
  cudaError_t status = cudaFuncSetAttribute(decode_many_kernel<T, P, S>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared));
  if (status != cudaSuccess) return status;
  status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, decode_many_kernel<T, P, S>, threads, shared);
  if (status != cudaSuccess) return status;
  const int each = resident < 1 ? 1 : resident > 2 ? 2 : resident;
  const int64_t room = int64_t(device.multiprocessors) * each;
  const LaunchForm form{dim3(static_cast<unsigned>(room < kManyBlocks ? room : kManyBlocks)), threads, shared};
  return launch_few(decode_many_kernel<T, P, S>, form, a, device, stream);
}

template <typename T>
cudaError_t launch_many_type(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const Pack shared = a.shared_down.count ? a.shared_down.pack : a.down.pack;
  return dispatch_packs(a.down.pack, shared, [&](auto own, auto other) {
    return launch_many_pair<T, decltype(own)::kPack, decltype(other)::kPack>(a, device, stream);
  });
}

}  // namespace deltafuse::moe
