// Decode's second kernel: the parts of a sequence become its output, in an order that only its length decides. Leaves
// are first gathered into sections, as decode_kernel does where it makes whole sections, operation for operation;
// sections are dealt to four sums.
//
// A part's 512 x 32 sums lie in the order of decode_kernel's accumulators: 128 rows of 32 lanes' float4, which are two
// channels (8 apart) of two query rows each.
#pragma once

#include "mla_device.cuh"

namespace deltafuse::mla {

struct CombineArgs {
  DecodeArgs a;
  int row_blocks = 0;
};

namespace combine {

constexpr int kThreads = 512, kWarps = kThreads / 32, kRows = kDecodeRows, kSums = 4;
constexpr int kSlotRows = kLatent * kRows / 128;  // of a part
constexpr int kLeavesOfSection = Cut::kSection / Cut::kTile;

inline int leaf_bytes(int items) { return 4 * kRows * items * 4 + 16 * 32 * (items + kSums); }
inline int section_bytes(int items) { return 4 * kRows * items * 2; }

// Where a lane's float4 of a slot row belongs: channels `channel` and + 8, query rows `row` and + 1.
struct Slot {
  int channel, row;
  __device__ explicit Slot(int slot_row) {
    const int lane = threadIdx.x % 32;
    channel = slot_row / 16 * 64 + slot_row / 4 % 4 * 16 + lane / 4;
    row = slot_row % 4 * 8 + lane % 4 * 2;
  }
};

// x * a + y for two query rows.
__device__ __forceinline__ float4 fma(float4 x, float2 a, float4 y) {
  return make_float4(__fmaf_rn(x.x, a.x, y.x), __fmaf_rn(x.y, a.y, y.y), __fmaf_rn(x.z, a.x, y.z),
                     __fmaf_rn(x.w, a.y, y.w));
}
__device__ __forceinline__ float4 mul(float4 x, float2 a) {
  return make_float4(__fmul_rn(x.x, a.x), __fmul_rn(x.y, a.y), __fmul_rn(x.z, a.x), __fmul_rn(x.w, a.y));
}
__device__ __forceinline__ float4 add(float4 x, float4 y) {
  return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

// Sections' maxima become the factors of their sums; inverses: of the sums of all weights. One lane a query row.
__device__ __forceinline__ void weigh_sections(float* top, const float* sum, int sections, float* inverses) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float largest = -INFINITY;
#pragma unroll 8
  for (int s = 0; s < sections; ++s) largest = fmaxf(largest, top[s * kRows + lane]);
  __syncthreads();
  for (int s = warp; s < sections; s += kWarps) top[s * kRows + lane] = ratio(top[s * kRows + lane], largest);
  __syncthreads();
  if (warp == kWarps - 1) {
    float denominator = 0.0f;
#pragma unroll 8
    for (int s = 0; s < sections; ++s) {
      denominator = __fmaf_rn(sum[s * kRows + lane], top[s * kRows + lane], denominator);
    }
    inverses[lane] = denominator > 0.0f ? 1.0f / denominator : 0.0f;
  }
}

template <typename T>
__device__ __forceinline__ void store(const DecodeArgs& a, int64_t b, int first_row, const Slot& slot, float4 x) {
  float scale0 = 1.0f, scale1 = 1.0f;
  if (a.cache.type == CacheType::kInt8) scale0 = a.cache.scale[slot.channel], scale1 = a.cache.scale[slot.channel + 8];
  const int rows = static_cast<int>(a.p.seq_len) * a.p.num_heads, row = first_row + slot.row;
  T* to = static_cast<T*>(a.o_latent) + (b * rows + row) * kLatent + slot.channel;
  if (row < rows) to[0] = from_float<T>(x.x * scale0), to[8] = from_float<T>(x.z * scale1);
  if (row + 1 < rows) to[kLatent] = from_float<T>(x.y * scale0), to[kLatent + 8] = from_float<T>(x.w * scale1);
}

}  // namespace combine

// One block makes a slot row; a warp gathers a section.
template <typename T>
__global__ void __launch_bounds__(combine::kThreads) combine_leaves_kernel(const CombineArgs k) {
  using namespace combine;
  extern __shared__ __align__(16) float shared[];
  __shared__ float inverses[kRows];
  const DecodeArgs& a = k.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_block = blockIdx.y;
  const int64_t b = blockIdx.z, at = (b * k.row_blocks + row_block) * a.items;
  const Slot slot(blockIdx.x);
  ptx::launch_dependents();
  const Cut cut = Cut::of(a.lengths.total(b), a.p.seq_len, a.p.window);
  const int items = cut.leaves, per_section = cut.leaves_per_section;
  float4* gathered = reinterpret_cast<float4*>(shared);         // [sections][32]
  float4* joined = gathered + a.items * 32;                     // [kSums][32]
  float* pair = reinterpret_cast<float*>(joined + kSums * 32);  // [items][2][32]: maximum and sum, then keep and add
  float* top = pair + a.items * 2 * kRows;                      // [sections][32]
  float* sum = top + a.items * kRows;                           // [sections][32]
  const float4* stats = reinterpret_cast<const float4*>(a.stats + at * 2 * kRows);
  const float4* partial = reinterpret_cast<const float4*>(a.partial) + (at * kSlotRows + blockIdx.x) * 32 + lane;
  ptx::wait_prior_grid();
  for (int i = threadIdx.x; i < items * kRows / 2; i += kThreads) reinterpret_cast<float4*>(pair)[i] = stats[i];
  // The first sums are on their way while their weights are made.
  float4 ahead[kLeavesOfSection];
  auto fetch = [&](int section) {
#pragma unroll
    for (int i = 0; i < kLeavesOfSection; ++i) {
      const int item = section * per_section + i;
      ahead[i] = float4{};
      if (section < cut.sections && i < per_section && item < items) ahead[i] = partial[int64_t(item) * kSlotRows * 32];
    }
  };
  fetch(warp);
  __syncthreads();
  for (int section = warp; section < cut.sections; section += kWarps) {
    const int from = section * per_section, to = from + per_section < items ? from + per_section : items;
    float total_top = pair[from * 2 * kRows + lane], total_sum = pair[(from * 2 + 1) * kRows + lane];
    for (int i = from + 1; i < to; ++i) {
      const float leaf_top = pair[i * 2 * kRows + lane], leaf_sum = pair[(i * 2 + 1) * kRows + lane];
      const float both = fmaxf(total_top, leaf_top), keep = ratio(total_top, both), add = ratio(leaf_top, both);
      total_sum = __fmaf_rn(leaf_sum, add, __fmul_rn(total_sum, keep));
      total_top = both;
      pair[i * 2 * kRows + lane] = keep;
      pair[(i * 2 + 1) * kRows + lane] = add;
    }
    top[section * kRows + lane] = total_top;
    sum[section * kRows + lane] = total_sum;
    __syncwarp();
    if (section != warp) fetch(section);
    float4 total = add(ahead[0], float4{});  // as decode_kernel's first leaf, zeros' signs included
#pragma unroll
    for (int i = 1; i < kLeavesOfSection; ++i) {
      const int item = from + i;
      if (i >= per_section || item >= items) break;
      const float2 keep = *reinterpret_cast<const float2*>(pair + item * 2 * kRows + slot.row);
      const float2 plus = *reinterpret_cast<const float2*>(pair + (item * 2 + 1) * kRows + slot.row);
      total = fma(ahead[i], plus, mul(total, keep));
    }
    gathered[section * 32 + lane] = total;
  }
  __syncthreads();
  weigh_sections(top, sum, cut.sections, inverses);
  if (warp < kSums) {
    float4 mine = {};
    for (int s = warp; s < cut.sections; s += kSums) {
      mine = fma(gathered[s * 32 + lane], *reinterpret_cast<const float2*>(top + s * kRows + slot.row), mine);
    }
    joined[warp * 32 + lane] = mine;
  }
  __syncthreads();
  if (warp > 0) return;
  float4 x = joined[lane];
#pragma unroll
  for (int s = 1; s < kSums; ++s) x = add(x, joined[s * 32 + lane]);
  store<T>(a, b, row_block * kRows, slot, mul(x, *reinterpret_cast<const float2*>(inverses + slot.row)));
}

// A warp makes a slot row.
template <typename T>
__global__ void __launch_bounds__(combine::kThreads) combine_sections_kernel(const CombineArgs k) {
  using namespace combine;
  extern __shared__ __align__(16) float shared[];
  __shared__ float inverses[kRows];
  const DecodeArgs& a = k.a;
  const int lane = threadIdx.x % 32, slot_row = blockIdx.x * kWarps + threadIdx.x / 32, row_block = blockIdx.y;
  const int64_t b = blockIdx.z, at = (b * k.row_blocks + row_block) * a.items;
  const Slot slot(slot_row);
  ptx::launch_dependents();
  const int sections = Cut::of(a.lengths.total(b), a.p.seq_len, a.p.window).sections;
  float* top = shared;                 // [sections][32]
  float* sum = top + a.items * kRows;  // [sections][32]
  const float* stats = a.stats + at * 2 * kRows;
  const float4* partial = reinterpret_cast<const float4*>(a.partial) + (at * kSlotRows + slot_row) * 32 + lane;
  ptx::wait_prior_grid();
  for (int i = threadIdx.x; i < sections * kRows; i += kThreads) {
    top[i] = stats[i / kRows * 2 * kRows + i % kRows];
    sum[i] = stats[(i / kRows * 2 + 1) * kRows + i % kRows];
  }
  constexpr int kAhead = 8;
  float4 ahead[kAhead];
  auto fetch = [&](int first) {
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      ahead[s] = float4{};
      if (first + s < sections) ahead[s] = partial[int64_t(first + s) * kSlotRows * 32];
    }
  };
  fetch(0);
  __syncthreads();
  weigh_sections(top, sum, sections, inverses);
  float4 sums[kSums] = {};
  for (int first = 0; first < sections; first += kAhead) {
    if (first > 0) fetch(first);
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (first + s >= sections) break;
      const float2 weight = *reinterpret_cast<const float2*>(top + (first + s) * kRows + slot.row);
      sums[s % kSums] = fma(add(ahead[s], float4{}), weight, sums[s % kSums]);
    }
  }
  __syncthreads();  // inverses
  const float4 x = add(add(add(sums[0], sums[1]), sums[2]), sums[3]);
  store<T>(a, b, row_block * kRows, slot, mul(x, *reinterpret_cast<const float2*>(inverses + slot.row)));
}

}  // namespace deltafuse::mla
