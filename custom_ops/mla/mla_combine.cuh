// Decode's second kernel: the parts of a sequence become its output, in an order that only its length decides. What
// blocks of decode_kernel would have joined themselves, had their parts been larger, is joined here with the same
// operations (mla_sums.cuh): tiles into sections, sections into chapters, chapters into the sequence.
//
// A part's 512 x rows sums lie in the order of decode_kernel's accumulators: slot rows of 32 lanes' four sums.
#pragma once

#include "mla_sums.cuh"

namespace deltafuse::mla {

struct CombineArgs {
  DecodeArgs a;
};

namespace combine {

constexpr int kAhead = 8, kSpreadThreads = 512;

// Where a lane's four sums of a slot row belong: channels `channel` and + 8, query rows `row` and + 1.
template <int kRows>
struct Slot {
  static constexpr int kCount = kLatent * kRows / 128;  // of a part
  int channel, row;
  __device__ explicit Slot(int slot_row) {
    const int lane = threadIdx.x % 32, above = slot_row / (kRows / 8);
    channel = above / 4 * 64 + above % 4 * 16 + lane / 4;
    row = slot_row % (kRows / 8) * 8 + lane % 4 * 2;
  }
};

// What a lane knows of one sum: maxima and weights of its two query rows, its sums of kEach slot rows of these.
template <typename T, int kEach>
struct Known {
  float2 top, sum;
  typename Travel<T>::Four x[kEach];
};

// A lane's sums so far.
template <typename T, int kEach>
struct Sums {
  Total low, high;  // of its two query rows
  float4 x[kEach] = {};

  __device__ __forceinline__ void join(const Known<T, kEach>& next) {
    const Factors f = low.raise(next.top.x), g = high.raise(next.top.y);
    low.join(next.sum.x, f), high.join(next.sum.y, g);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const float4 y = Travel<T>::unpack(next.x[e]);
      x[e].x = joined(x[e].x, y.x, f.keep, f.add), x[e].y = joined(x[e].y, y.y, g.keep, g.add);
      x[e].z = joined(x[e].z, y.z, f.keep, f.add), x[e].w = joined(x[e].w, y.w, g.keep, g.add);
    }
  }
  // As it travels.
  __device__ __forceinline__ Known<T, kEach> known() const {
    Known<T, kEach> k;
    k.top = make_float2(low.top, high.top), k.sum = make_float2(low.sum, high.sum);
#pragma unroll
    for (int e = 0; e < kEach; ++e) k.x[e] = Travel<T>::pack(x[e].x, x[e].y, x[e].z, x[e].w);
    return k;
  }
};

// Joins what load(i) brings, i from `from` to `to`; kAhead of them are on their way before the first is used.
template <typename T, int kEach, typename Load>
__device__ __forceinline__ void join_all(Sums<T, kEach>* sums, int from, int to, Load load) {
#pragma unroll 1
  for (int first = from; first < to; first += kAhead) {
    Known<T, kEach> ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i < to) ahead[i] = load(first + i);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i < to) sums->join(ahead[i]);
    }
  }
}

template <typename T>
__device__ __forceinline__ void store(const DecodeArgs& a, int b, int first_row, int channel, int slot_row, float4 x,
                                      float2 sum) {
  const float low = sum.x > 0.0f ? 1.0f / sum.x : 0.0f, high = sum.y > 0.0f ? 1.0f / sum.y : 0.0f;
  float scale0 = 1.0f, scale1 = 1.0f;
  if (a.cache.type == CacheType::kInt8) scale0 = a.cache.scale[channel], scale1 = a.cache.scale[channel + 8];
  const int rows = static_cast<int>(a.p.seq_len) * a.p.num_heads, row = first_row + slot_row;
  T* to = static_cast<T*>(a.o_latent) + (int64_t(b) * rows + row) * kLatent + channel;
  if (row < rows) to[0] = from_float<T>(x.x * low * scale0), to[8] = from_float<T>(x.z * low * scale1);
  if (row + 1 < rows) {
    to[kLatent] = from_float<T>(x.y * high * scale0), to[kLatent + 8] = from_float<T>(x.w * high * scale1);
  }
}

// How the parts of a sequence are grouped where they are tiles (or sections, of a long one): parts into groups, which
// are sections (chapters), and these into chapters (nothing more). Takes the lengths alone, before there are parts.
struct Groups {
  int first, parts, per_group, count, per_chapter;
  __device__ Groups(const DecodeArgs& a, int b) {
    first = 0;
    for (int i = 0; i < b; ++i) first += cut_of(a, i).parts(Grain::kTile);
    const Cut cut = cut_of(a, b);
    parts = cut.parts(Grain::kTile);
    per_group = cut.short_one() ? cut.section : Cut::kLongChapter;
    per_chapter = cut.short_one() ? cut.chapter() : 1;
    count = Cut::over(parts, per_group);
  }
  __device__ static Cut cut_of(const DecodeArgs& a, int b) {
    return Cut::of(static_cast<int>(a.lengths.total(b)), static_cast<int>(a.p.seq_len), a.p.window,
                   a.plan.section_tiles, a.plan.chapter_tiles);
  }
};

template <int kRows>
struct Serial {
  static constexpr int kEach = 2, kThreads = 128, kWarps = kThreads / 32;
  static constexpr int kBlocks = Slot<kRows>::kCount / kEach / kWarps;
};

}  // namespace combine

// Few sequences of many parts: a block makes a slot row, which has 8 query rows, and its warps gather groups of parts.
template <typename T, int kRows>
__global__ void __launch_bounds__(combine::kSpreadThreads, 1) combine_spread_kernel(const CombineArgs k) {
  using namespace combine;
  constexpr int kWarps = kSpreadThreads / 32, kMaxGroups = Cut::kMaxParts / 4, kMaxAbove = kMaxGroups / 2;
  // What groups and chapters have come to: by lane; maxima and weights are the same in every fourth.
  __shared__ Known<T, 1> groups_known[kMaxGroups][32], chapters_known[kMaxAbove][32];
  const DecodeArgs& a = k.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_block = blockIdx.y, b = blockIdx.z;
  const Slot<kRows> slot(blockIdx.x);
  ptx::launch_dependents();
  const Groups groups(a, b);
  const int64_t at = int64_t(groups.first) * a.plan.row_blocks + row_block;
  const int step = a.plan.row_blocks;
  const float* stats = a.stats + at * 2 * kRows + slot.row;
  const auto* partial =
      static_cast<const typename Travel<T>::Four*>(a.partial) + (at * Slot<kRows>::kCount + blockIdx.x) * 32 + lane;
  ptx::wait_prior_grid();
#pragma unroll 1
  for (int group = warp; group < groups.count; group += kWarps) {
    const int from = group * groups.per_group, to = min(from + groups.per_group, groups.parts);
    Sums<T, 1> sums;
    join_all(&sums, from, to, [&](int i) {
      const float* s = stats + i * step * 2 * kRows;
      Known<T, 1> known;
      known.top = *reinterpret_cast<const float2*>(s), known.sum = *reinterpret_cast<const float2*>(s + kRows);
      known.x[0] = partial[int64_t(i * step) * (Slot<kRows>::kCount * 32)];
      return known;
    });
    groups_known[group][lane] = sums.known();
  }
  __syncthreads();
  int count = groups.count;
  const auto* above = groups_known;
  if (groups.per_chapter > 1) {
    count = Cut::over(groups.count, groups.per_chapter);
#pragma unroll 1
    for (int chapter = warp; chapter < count; chapter += kWarps) {
      const int from = chapter * groups.per_chapter, to = min(from + groups.per_chapter, groups.count);
      Sums<T, 1> sums;
      join_all(&sums, from, to, [&](int i) { return groups_known[i][lane]; });
      chapters_known[chapter][lane] = sums.known();
    }
    above = chapters_known;
    __syncthreads();
  }
  if (warp > 0) return;
  Sums<T, 1> whole;
  join_all(&whole, 0, count, [&](int i) { return above[i][lane]; });
  store<T>(a, b, row_block * kRows, slot.channel, slot.row, whole.x[0], make_float2(whole.low.sum, whole.high.sum));
}

// Many sequences of few parts: a warp makes slot rows that have the same query rows.
template <typename T, int kRows>
__global__ void __launch_bounds__(combine::Serial<kRows>::kThreads) combine_serial_kernel(const CombineArgs k) {
  using namespace combine;
  using S = Serial<kRows>;
  constexpr int kRowGroups = kRows / 8, kEach = S::kEach;
  const DecodeArgs& a = k.a;
  const int lane = threadIdx.x % 32, warp = blockIdx.x * S::kWarps + threadIdx.x / 32, row_block = blockIdx.y;
  const int b = blockIdx.z, slot_row = warp / kRowGroups * kEach * kRowGroups + warp % kRowGroups;
  const Slot<kRows> slot(slot_row);
  ptx::launch_dependents();
  ptx::wait_prior_grid();
  const int4 place = a.places[b];
  const int parts = place.y, per_chapter = place.z, step = a.plan.row_blocks;
  const int64_t at = place.x + row_block;
  const float* stats = a.stats + at * 2 * kRows + slot.row;
  const auto* partial =
      static_cast<const typename Travel<T>::Four*>(a.partial) + (at * Slot<kRows>::kCount + slot_row) * 32 + lane;
  Sums<T, kEach> chapter, whole;
  int in_chapter = 0;
#pragma unroll 1
  for (int first = 0; first < parts; first += kAhead) {
    Known<T, kEach> ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= parts) continue;
      const float* s = stats + (first + i) * step * 2 * kRows;
      const auto* x = partial + int64_t((first + i) * step) * (Slot<kRows>::kCount * 32);
      ahead[i].top = *reinterpret_cast<const float2*>(s), ahead[i].sum = *reinterpret_cast<const float2*>(s + kRows);
#pragma unroll
      for (int e = 0; e < kEach; ++e) ahead[i].x[e] = x[e * kRowGroups * 32];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= parts) break;
      chapter.join(ahead[i]);
      if (++in_chapter == per_chapter || first + i == parts - 1) {
        whole.join(chapter.known());
        chapter = Sums<T, kEach>{}, in_chapter = 0;
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    store<T>(a, b, row_block * kRows, slot.channel + e * 16, slot.row, whole.x[e],
             make_float2(whole.low.sum, whole.high.sum));
  }
}

}  // namespace deltafuse::mla
