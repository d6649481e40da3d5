// A few tokens: down, the weighted sum (weights are in the activations) and the shared expert.
//
// A block owns 16 rows of the result and walks over the stages of all experts, a warp taking every so many; their sums
// meet in shared memory at the end, in a fixed order. Its weights are on their way while the activations are not there
// yet.
#pragma once

#include "moe_decode_parts.cuh"

namespace deltafuse::moe {

// One token: all activations lie in shared memory, and nearly all weights are in flight. More: activations come as they
// are needed, eight tokens at a time.
constexpr int kOneThreads = 256;
constexpr int kOneDepth = 7;
constexpr int kOneBytes = 32768;  // of activations at most

struct SecondShared {
  static __host__ __device__ int slot_bytes(const DecodeArgs& a) { return slot_bytes_of(a.down, a.shared_down); }
  static __host__ __device__ int h_row_bytes(const DecodeArgs& a) {
    const int own = a.down.blocks(), other = a.shared_down.count ? a.shared_down.blocks() : 0;
    return (own > other ? own : other) * 256;
  }
  static __host__ __device__ int rows(const DecodeArgs& a) {  // of h, the shared expert's last
    return a.router.tokens * (a.router.top_k + (a.shared_down.count ? 1 : 0));
  }
  static __host__ __device__ bool one(const DecodeArgs& a) {
    return a.router.tokens == 1 && rows(a) * h_row_bytes(a) <= kOneBytes;
  }
  // One token's activations: rows of h, then as many of scales and of sums, a quarter as long.
  static __host__ __device__ int h_bytes(const DecodeArgs& a) {
    return one(a) ? rows(a) * h_row_bytes(a) / 4 * (4 + a.has_scales + a.has_sums) : 0;
  }
  // Several tokens: each item's rows of h, eight int16. Experts. Several tokens: the items of these eight.
  static __host__ __device__ int totals_at(const DecodeArgs& a) {
    const int pairs = a.router.tokens * a.router.top_k;
    return (pairs * 4 + (one(a) ? 0 : pairs * 20) + 127) / 128 * 128;
  }
  static __host__ __device__ int ring_at(const DecodeArgs& a, int warps) {
    return totals_at(a) + warps * (one(a) ? 256 : 2048);
  }
  static __host__ __device__ size_t bytes(const DecodeArgs& a, int warps) {
    return ring_at(a, warps) + size_t(warps) * kOneDepth * slot_bytes(a) + h_bytes(a);
  }
};

template <typename T, Pack P, Pack S, bool kOne>
__global__ void __launch_bounds__(kOneThreads, 4) decode_second_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int kDepth = kOneDepth, kTokens = kOne ? 1 : 8;
  constexpr bool kInteger = P == Pack::kInt4 || P == Pack::kInt8, kShared = S == Pack::kInt4 || S == Pack::kInt8;
  const RouterArgs& r = a.router;
  const int pairs = r.tokens * r.top_k, warps = blockDim.x / 32, warp = uniform(threadIdx.x / 32),
            lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4, slab = blockIdx.x, slot_bytes = SecondShared::slot_bytes(a);
  const int ring_bytes = kDepth * slot_bytes, row_bytes = a.h_stride * 2, row_groups = a.h_stride / 8;
  int16_t* table = reinterpret_cast<int16_t*>(shared);
  int* experts = reinterpret_cast<int*>(shared + (kOne ? 0 : pairs * 16));
  int* wanted = experts + pairs;
  float2* totals = reinterpret_cast<float2*>(shared + SecondShared::totals_at(a));  // [warps, kTokens, 32]
  unsigned char* rings = shared + SecondShared::ring_at(a, warps);
  const unsigned char* ring = rings + warp * ring_bytes;
  const uint32_t ring_address = shared_address(ring);

  // This kernel may start when the one before the first product is done, which sets routed to zero.
  int items;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(items) : "l"(a.routed) : "memory");
  } while (items == 0);
#pragma unroll 1
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) experts[i] = __ldcg(a.routed + 1 + i);

  // Where activations are: one token's in shared memory.
  const unsigned char* h = static_cast<const unsigned char*>(a.h);
  const float *h_scales = a.h_scales, *h_sums = a.h_sums;
  int h_row = row_bytes, h_groups = row_groups;
  bool waited = false;
  const GroupMasks masks;

#pragma unroll 1
  for (int base = 0; base < r.tokens; base += 8) {
    int count = items;  // of these tokens
    if constexpr (!kOne) {
#pragma unroll 1
      for (int i = threadIdx.x; i < items * 4; i += blockDim.x) reinterpret_cast<int*>(table)[i] = -1;
      __syncthreads();
      const int first = base * r.top_k, end = min(pairs, first + 8 * r.top_k);
#pragma unroll 1
      for (int i = first + static_cast<int>(threadIdx.x); i < end; i += blockDim.x) {
        table[__ldcg(a.routed + 1 + pairs + i) * 8 + a.by_top_k(i) - base] = static_cast<int16_t>(i);
      }
      __syncthreads();
      count = 0;
#pragma unroll 1
      for (int from = 0; from < items; from += 32) {  // every warp finds the same
        const int4 rows = *reinterpret_cast<const int4*>(table + min(from + lane, items - 1) * 8);
        const bool in = from + lane < items && (rows.x & rows.y & rows.z & rows.w) != -1;
        const unsigned who = __ballot_sync(~0u, in);
        if (in && warp == 0) wanted[count + __popc(who & ((1u << lane) - 1))] = from + lane;
        count += __popc(who);
      }
    }
#pragma unroll
    for (int n = 0; n < kTokens; ++n) totals[(warp * kTokens + n) * 32 + lane] = make_float2(0.0f, 0.0f);
    __syncthreads();
    // Work is stages: each item's, then the shared expert's.
    const int own_stages = count * a.down.stages,
              stages = own_stages + (a.shared_down.count ? a.shared_down.stages : 0);
    const Source source = slab_source<P>(a.down, 0, slab, 0);
    const int64_t expert_bytes = a.down.expert_bytes();
    auto fetch = [&](int unit, int to) {
      if (unit < own_stages) {
        const int item = a.by_stages(unit), stage = unit - item * a.down.stages;
        Source from = source;
        from.payload += experts[kOne ? item : wanted[item]] * expert_bytes + stage * a.down.stage_bytes();
        copy_stage<P>(from, ring_address + to);
      } else if (unit < stages) {
        copy_stage<S>(slab_source<S>(a.shared_down, 0, slab, unit - own_stages), ring_address + to);
      }
      copies_commit();
    };
#pragma unroll 1
    for (int i = 0; i < kDepth; ++i) fetch(warp + i * warps, i * slot_bytes);
    if (!waited) {
      wait_previous();  // for the activations
      release_next();
      waited = true;
      if constexpr (kOne) {
        const int here = SecondShared::h_row_bytes(a), rows = SecondShared::rows(a);
        unsigned char* place = rings + warps * ring_bytes;
        const uint32_t to = shared_address(place);
        auto copy_row = [&](const void* from, uint32_t at, int bytes) {
#pragma unroll 1
          for (int i = lane * 16; i < bytes; i += 512) copy16(at + i, static_cast<const unsigned char*>(from) + i);
        };
#pragma unroll 1
        for (int row = warp; row < rows; row += warps) {
          copy_row(h + row * row_bytes, to + row * here, here);
          const uint32_t scales = to + rows * here + row * (here / 4);
          if (a.has_scales) copy_row(h_scales + row * row_groups, scales, here / 4);
          if (a.has_sums) copy_row(h_sums + row * row_groups, scales + rows * (here / 4), here / 4);
        }
        copies_commit();
        h = place, h_row = here, h_groups = here / 16;
        h_scales = reinterpret_cast<const float*>(place + rows * here), h_sums = h_scales + rows * h_groups;
        copies_wait<0>();
        __syncthreads();
      }
    }
    float floats[4] = {}, own_total[2] = {};
    int at = 0;
    // A unit's place, and its first token's digits: they come from global memory, so a unit ahead.
    struct Unit {
      bool own;  // the shared expert's
      int item, stage, mine;
      unsigned who;
      uint4 digits[2];
      float4 scales;
    };
    auto load_row = [&](Unit& u, int row) {
      const unsigned char* right = h + row * h_row + u.stage * 256 + (g & 1) * 64 + t * 16;
      u.digits[0] = *reinterpret_cast<const uint4*>(right), u.digits[1] = *reinterpret_cast<const uint4*>(right + 128);
      u.scales = *reinterpret_cast<const float4*>(h_scales + row * h_groups + u.stage * 16 + t * 4);
    };
    auto digits = [](bool own) { return own ? kShared : kInteger; };
    auto find = [&](int unit) {
      Unit u{};
      u.own = unit >= own_stages;
      u.item = u.own ? 0 : a.by_stages(unit);
      u.stage = u.own ? unit - own_stages : unit - u.item * a.down.stages;
      if (kOne) {
        if (digits(u.own) && unit < stages) load_row(u, u.own ? pairs : u.item);
      } else if (unit < stages) {
        if (!u.own) u.item = wanted[u.item];
        if (digits(u.own)) {
          u.mine = u.own ? (base + lane < r.tokens ? pairs + base + lane : -1) : table[u.item * 8 + lane % 8];
          u.who = __ballot_sync(~0u, lane < 8 && u.mine >= 0);
          load_row(u, __shfl_sync(~0u, u.mine, __ffs(static_cast<int>(u.who)) - 1));
        }
      }
      return u;
    };
    Unit next = find(warp);
#pragma unroll 1
    for (int unit = warp; unit < stages; unit += warps) {
      Unit u = next;
      next = find(unit + warps);
      copies_wait<kDepth - 1>();
      __syncwarp();
      auto multiply = [&](auto pack, const Packed& w) {
        constexpr Pack kPack = decltype(pack)::kPack;
        const unsigned char* slot = ring + at;
        const float factor = w.multiplier ? w.multiplier[u.own ? 0 : experts[u.item]] : 1.0f;
        if constexpr (kPack == Pack::kInt4 || kPack == Pack::kInt8) {
          const bool fine = w.sub != 1, zeros = w.zeros;
          auto run = [&](int row, float (&total)[2]) {
            const float4 sums =
                zeros ? *reinterpret_cast<const float4*>(h_sums + row * h_groups + u.stage * 16 + t * 4) : float4{};
            if (fine) {
              multiply_groups<T, kPack, true>(zeros, slot, u.digits, masks, u.scales, sums, factor, total);
            } else {
              multiply_groups<T, kPack, false>(zeros, slot, u.digits, masks, u.scales, sums, factor, total);
            }
          };
          if constexpr (kOne) {
            run(u.own ? pairs : u.item, own_total);
          } else {
#pragma unroll 1
            while (true) {  // the item's tokens, one after the other
              const int token = __ffs(static_cast<int>(u.who)) - 1;
              float total[2] = {};
              run(__shfl_sync(~0u, u.mine, token), total);
              float2& sum = totals[(warp * kTokens + token) * 32 + lane];
              sum.x += total[0], sum.y += total[1];
              u.who &= u.who - 1;
              if (u.who == 0) break;
              load_row(u, __shfl_sync(~0u, u.mine, __ffs(static_cast<int>(u.who)) - 1));
            }
          }
        } else {  // columns are tokens
          int row = u.own ? (base + g < r.tokens ? pairs + base + g : -1) : kOne ? u.item : table[u.item * 8 + g];
          if (kOne && u.own) row = pairs;
          multiply_floats<T, kPack>(slot, h + max(row, 0) * h_row + u.stage * (kStageCols<kPack> * 2) + t * 16,
                                    row >= 0, factor, floats);
        }
      };
      if (P == S || !u.own) {
        multiply(PackOf<P>(), u.own ? a.shared_down : a.down);
      } else {
        multiply(PackOf<S>(), a.shared_down);
      }
      __syncwarp();
      fetch(unit + kDepth * warps, at);
      at = at + slot_bytes == ring_bytes ? 0 : at + slot_bytes;
    }
    copies_wait<0>();
    if constexpr (kOne) {
      totals[warp * 32 + lane] =
          make_float2(own_total[0] + (t ? 0.0f : floats[0]), own_total[1] + (t ? 0.0f : floats[2]));
    } else if constexpr (S == Pack::kPlain || S == Pack::kFloat8) {
      float2* mine = totals + (warp * kTokens + 2 * t) * 32 + g * 4;
      mine[0].x += floats[0], mine[0].y += floats[2];
      mine[32].x += floats[1], mine[32].y += floats[3];
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kTokens * 16; i += blockDim.x) {
      const int row = i % 16, token = i / 16;
      const float* mine = reinterpret_cast<const float*>(totals + token * 32 + row % 8 * 4) + row / 8;
      float sum = 0.0f;
#pragma unroll 8
      for (int w = 0; w < warps; ++w) {
        const float* four = mine + w * kTokens * 64;
        sum += (four[0] + four[2]) + (four[4] + four[6]);
      }
      if (slab * 16 + row < a.down.rows && base + token < r.tokens) {
        static_cast<T*>(a.y)[int64_t(base + token) * a.down.rows + slab * 16 + row] = from_float<T>(sum);
      }
    }
    if (!kOne) __syncthreads();
  }
}

template <typename T, Pack P, Pack S, bool kOne>
cudaError_t launch_second_pair(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const int threads = a.tuning.second_threads;
  return launch_kernel(decode_second_kernel<T, P, S, kOne>, (a.down.rows + 15) / 16, threads,
                       SecondShared::bytes(a, threads / 32), device.capability >= 90 && a.tuning.dependent, stream, a);
}

template <typename T, bool kOne>
cudaError_t launch_second_type(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const Pack shared = a.shared_down.count ? a.shared_down.pack : a.down.pack;
  return dispatch_packs(a.down.pack, shared, [&](auto own, auto other) {
    return launch_second_pair<T, decltype(own)::kPack, decltype(other)::kPack, kOne>(a, device, stream);
  });
}

}  // namespace deltafuse::moe
