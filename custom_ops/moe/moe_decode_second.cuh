// One token: down, the weighted sum (weights are in the activations) and the shared expert.
//
// A block owns 16 rows of the result and walks over the stages of all experts, a warp taking every so many; their sums
// meet in shared memory at the end, in a fixed order. Its weights are on their way while the activations are not there
// yet; those lie in shared memory then, all of them.
#pragma once

#include "moe_decode_parts.cuh"

namespace deltafuse::moe {

constexpr int kOneThreads = 256;
constexpr int kOneDepth = 7;      // nearly all weights are in flight
constexpr int kOneBytes = 32768;  // of activations at most

struct SecondShared {
  static __host__ __device__ int slot_bytes(const DecodeArgs& a) { return slot_bytes_of(a.down, a.shared_down); }
  static __host__ __device__ int h_row_bytes(const DecodeArgs& a) {
    const int own = a.down.blocks(), other = a.shared_down.count ? a.shared_down.blocks() : 0;
    return (own > other ? own : other) * 256;
  }
  // Of h, the shared expert's last.
  static __host__ __device__ int rows(const DecodeArgs& a) { return a.router.top_k + (a.shared_down.count ? 1 : 0); }
  // Whether a call is taken.
  static __host__ __device__ bool one(const DecodeArgs& a) {
    return a.router.tokens == 1 && rows(a) * h_row_bytes(a) <= kOneBytes;
  }
  // Experts; sums.
  static __host__ __device__ int totals_at(const DecodeArgs& a) { return (a.router.top_k * 4 + 127) / 128 * 128; }
  static __host__ __device__ int ring_at(const DecodeArgs& a, int warps) { return totals_at(a) + warps * 256; }
  static __host__ __device__ int h_at(const DecodeArgs& a, int warps) {
    return ring_at(a, warps) + warps * kOneDepth * slot_bytes(a);
  }
  // Rows of h, then as many of scales and of sums, a quarter as long.
  static __host__ __device__ size_t bytes(const DecodeArgs& a, int warps) {
    return h_at(a, warps) + static_cast<size_t>(rows(a) * h_row_bytes(a) / 4 * (4 + a.has_scales + a.has_sums));
  }
};

template <typename T, Pack P, Pack S>
__global__ void __launch_bounds__(kOneThreads, 4) decode_second_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int top_k = a.router.top_k, warps = blockDim.x / 32, warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32,
            g = lane / 4, t = lane % 4, slab = blockIdx.x;
  const int slot_bytes = SecondShared::slot_bytes(a), ring_bytes = kOneDepth * slot_bytes;
  int* experts = reinterpret_cast<int*>(shared);
  float2* totals = reinterpret_cast<float2*>(shared + SecondShared::totals_at(a));  // [warps, 32]
  const unsigned char* ring = shared + SecondShared::ring_at(a, warps) + warp * ring_bytes;
  const uint32_t ring_address = shared_address(ring);
  const GroupMasks masks;

  // This kernel may start when the first one has set routed to zero.
  if (static_cast<int>(threadIdx.x) < top_k) {
    int chosen;
    do {
      asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];\n" : "=r"(chosen) : "l"(a.routed + 1 + threadIdx.x) : "memory");
    } while (chosen == 0);
    experts[threadIdx.x] = chosen - 1;
  }
  __syncthreads();

  // Work is stages: each expert's, then the shared expert's.
  const int own_stages = top_k * a.down.stages, stages = own_stages + (a.shared_down.count ? a.shared_down.stages : 0);
  const Source source = slab_source<P>(a.down, 0, slab, 0);
  const int64_t expert_bytes = a.down.expert_bytes();
  auto fetch = [&](int unit, int to) {
    if (unit < own_stages) {
      const int item = a.by_stages(unit), stage = unit - item * a.down.stages;
      Source from = source;
      from.payload += experts[item] * expert_bytes + stage * a.down.stage_bytes();
      copy_stage<P>(from, ring_address + to);
    } else if (unit < stages) {
      copy_stage<S>(slab_source<S>(a.shared_down, 0, slab, unit - own_stages), ring_address + to);
    }
    copies_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kOneDepth; ++i) fetch(warp + i * warps, i * slot_bytes);

  wait_previous();  // for the activations
  release_next();
  const int h_row = SecondShared::h_row_bytes(a), h_groups = h_row / 16, rows = SecondShared::rows(a);
  unsigned char* h = shared + SecondShared::h_at(a, warps);
  const float* h_scales = reinterpret_cast<const float*>(h + rows * h_row);
  const float* h_sums = h_scales + rows * h_groups;
  {
    const uint32_t to = shared_address(h);
    auto copy_row = [&](const void* from, uint32_t at, int bytes) {
#pragma unroll 1
      for (int i = lane * 16; i < bytes; i += 512) copy16(at + i, static_cast<const unsigned char*>(from) + i);
    };
#pragma unroll 1
    for (int row = warp; row < rows; row += warps) {
      copy_row(static_cast<const unsigned char*>(a.h) + row * (a.h_stride * 2), to + row * h_row, h_row);
      const uint32_t scales = to + rows * h_row + row * (h_row / 4);
      if (a.has_scales) copy_row(a.h_scales + row * (a.h_stride / 8), scales, h_row / 4);
      if (a.has_sums) copy_row(a.h_sums + row * (a.h_stride / 8), scales + rows * (h_row / 4), h_row / 4);
    }
  }
  copies_commit();
  copies_wait<0>();
  __syncthreads();

  float floats[4] = {}, total[2] = {};
  int at = 0;
#pragma unroll 1
  for (int unit = warp; unit < stages; unit += warps) {
    const bool own = unit >= own_stages;  // the shared expert's
    const int item = own ? top_k : a.by_stages(unit);
    const int stage = unit - (own ? own_stages : item * a.down.stages);
    copies_wait<kOneDepth - 1>();
    __syncwarp();
    auto multiply = [&](auto pack, const Packed& w) {
      constexpr Pack kPack = decltype(pack)::kPack;
      const unsigned char *slot = ring + at, *row = h + item * h_row;
      const float factor = w.multiplier ? w.multiplier[own ? 0 : experts[item]] : 1.0f;
      if constexpr (kPack == Pack::kInt4 || kPack == Pack::kInt8) {
        const unsigned char* right = row + stage * 256 + (g & 1) * 64 + t * 16;
        const uint4 digits[2] = {*reinterpret_cast<const uint4*>(right), *reinterpret_cast<const uint4*>(right + 128)};
        const int group = item * h_groups + stage * 16 + t * 4;
        const float4 scales = *reinterpret_cast<const float4*>(h_scales + group);
        const float4 sums = w.zeros ? *reinterpret_cast<const float4*>(h_sums + group) : float4{};
        if (w.sub != 1) {
          multiply_groups<T, kPack, true>(w.zeros, slot, digits, masks, scales, sums, factor, total);
        } else {
          multiply_groups<T, kPack, false>(w.zeros, slot, digits, masks, scales, sums, factor, total);
        }
      } else {
        multiply_floats<T, kPack>(slot, row + stage * (kStageCols<kPack> * 2) + t * 16, true, factor, floats);
      }
    };
    if (P == S || !own) {
      multiply(PackOf<P>(), own ? a.shared_down : a.down);
    } else {
      multiply(PackOf<S>(), a.shared_down);
    }
    __syncwarp();
    fetch(unit + kOneDepth * warps, at);
    at = at + slot_bytes == ring_bytes ? 0 : at + slot_bytes;
  }
  copies_wait<0>();
  totals[warp * 32 + lane] = make_float2(total[0] + (t ? 0.0f : floats[0]), total[1] + (t ? 0.0f : floats[2]));
  __syncthreads();
  if (threadIdx.x < 16) {
    const int row = threadIdx.x;
    const float* mine = reinterpret_cast<const float*>(totals + row % 8 * 4) + row / 8;
    float sum = 0.0f;
#pragma unroll 8
    for (int w = 0; w < warps; ++w) {
      const float* four = mine + w * 64;
      sum += (four[0] + four[2]) + (four[4] + four[6]);
    }
    if (slab * 16 + row < a.down.rows) static_cast<T*>(a.y)[slab * 16 + row] = from_float<T>(sum);
  }
}

template <typename T, Pack P, Pack S>
cudaError_t launch_second_pair(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const int threads = a.tuning.second_threads;
  const LaunchForm form{dim3((a.down.rows + 15) / 16), threads, SecondShared::bytes(a, threads / 32)};
  return launch_few(decode_second_kernel<T, P, S>, form, a, device, stream);
}

template <typename T>
cudaError_t launch_second_type(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const Pack shared = a.shared_down.count ? a.shared_down.pack : a.down.pack;
  return dispatch_packs(a.down.pack, shared, [&](auto own, auto other) {
    return launch_second_pair<T, decltype(own)::kPack, decltype(other)::kPack>(a, device, stream);
  });
}

}  // namespace deltafuse::moe
