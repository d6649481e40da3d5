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

constexpr int kAhead = 8;

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

// Factors of two query rows side by side; a thread that makes them has one row.
__device__ __forceinline__ void put(float4* factors, int row, Factors f) {
  reinterpret_cast<float2*>(factors)[row] = make_float2(f.keep, f.add);
}
__device__ __forceinline__ float4 joined(float4 x, float4 y, float4 f) {
  x.x = mla::joined(x.x, y.x, f.x, f.y), x.y = mla::joined(x.y, y.y, f.z, f.w);
  x.z = mla::joined(x.z, y.z, f.x, f.y), x.w = mla::joined(x.w, y.w, f.z, f.w);
  return x;
}
// Joins the maxima and weights that get(i) brings, i from `from` to `to`; put(i, factors).
template <typename Get, typename Put>
__device__ __forceinline__ Total join_totals(int from, int to, Get get, Put put) {
  Total total;
#pragma unroll 1
  for (int first = from; first < to; first += kAhead) {
    float2 ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i < to) ahead[i] = get(first + i);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= to) continue;
      const Factors f = total.raise(ahead[i].x);
      total.join(ahead[i].y, f);
      put(first + i, f);
    }
  }
  return total;
}
__device__ __forceinline__ float inverse(const Total& whole) { return whole.sum > 0.0f ? 1.0f / whole.sum : 0.0f; }

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

// The spread kernel's warps: some join sums, 4 make the factors for it.
constexpr int kJoiners = 16, kFactorThreads = 128, kSpreadThreads = kJoiners * 32 + kFactorThreads;

template <int kRows>
struct Serial {
  static constexpr int kEach = 2, kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kBlocks = Slot<kRows>::kCount / kEach / kWarps;
};

}  // namespace combine

// Few sequences of many parts: a block makes a slot row, which has 8 query rows. Its warps join groups of parts, while
// others go ahead of them with the factors, which need maxima and weights alone.
template <typename T, int kRows>
__global__ void __launch_bounds__(combine::kSpreadThreads, 1) combine_spread_kernel(const CombineArgs k) {
  using namespace combine;
  using Four = typename Travel<T>::Four;
  constexpr int kMaxParts = Cut::kMaxParts, kMaxGroups = kMaxParts / 4;
  // Factors by part, group or chapter, of pairs of rows.
  __shared__ float4 of_part[kMaxParts][4], of_group[kMaxGroups][4], of_chapter[kMaxGroups][4];
  __shared__ Four group_sums[kMaxGroups][32];
  __shared__ float2 group_totals[kMaxGroups][8], chapter_totals[kMaxGroups][8];  // maximum, weights
  __shared__ float inverses[8];
  const DecodeArgs& a = k.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_block = blockIdx.y, b = blockIdx.z;
  const Slot<kRows> slot(blockIdx.x);
  ptx::launch_dependents();
  const Groups groups(a, b);
  const int64_t at = int64_t(groups.first) * a.plan.row_blocks + row_block;
  const int step = a.plan.row_blocks;
  ptx::wait_prior_grid();
  if (warp < kJoiners) {
    const Four* partial = static_cast<const Four*>(a.partial) + (at * Slot<kRows>::kCount + blockIdx.x) * 32 + lane;
    bool waited = false;
#pragma unroll 1
    for (int group = warp; group < groups.count || !waited; group += kJoiners) {
      const int from = group * groups.per_group, to = min(from + groups.per_group, groups.parts);
      float4 sums = {};
#pragma unroll 1
      for (int first = from; first < to || !waited; first += kAhead) {
        Four ahead[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (first + i < to) ahead[i] = partial[int64_t((first + i) * step) * (Slot<kRows>::kCount * 32)];
        }
        if (!waited) ptx::bar_sync(1, kSpreadThreads), waited = true;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (first + i < to) sums = joined(sums, Travel<T>::unpack(ahead[i]), of_part[first + i][lane % 4]);
        }
      }
      if (group < groups.count) group_sums[group][lane] = Travel<T>::pack(sums.x, sums.y, sums.z, sums.w);
    }
  } else {
    const int thread = threadIdx.x - kJoiners * 32, row = thread % 8;
    const float* stats = a.stats + at * 2 * kRows + blockIdx.x % (kRows / 8) * 8 + row;
#pragma unroll 1
    for (int group = thread / 8; group < groups.count; group += kFactorThreads / 8) {
      const int from = group * groups.per_group, to = min(from + groups.per_group, groups.parts);
      const Total total = join_totals(
          from, to,
          [&](int i) {
            const float* s = stats + i * step * 2 * kRows;
            return make_float2(s[0], s[kRows]);
          },
          [&](int i, Factors f) { put(of_part[i], row, f); });
      group_totals[group][row] = make_float2(total.top, total.sum);
    }
    ptx::bar_arrive(1, kSpreadThreads);  // the joiners wait for these factors; the rest needs only each other's totals
    ptx::bar_sync(2, kFactorThreads);
    if (warp == kJoiners) {
      const int chapters = Cut::over(groups.count, groups.per_chapter);
#pragma unroll 1
      for (int chapter = lane / 8; chapter < chapters; chapter += 4) {
        const int from = chapter * groups.per_chapter, to = min(from + groups.per_chapter, groups.count);
        const Total total = join_totals(
            from, to, [&](int i) { return group_totals[i][row]; }, [&](int i, Factors f) { put(of_group[i], row, f); });
        chapter_totals[chapter][row] = make_float2(total.top, total.sum);
      }
      __syncwarp();
      if (lane < 8) {
        const Total whole = join_totals(
            0, chapters, [&](int i) { return chapter_totals[i][row]; },
            [&](int i, Factors f) { put(of_chapter[i], row, f); });
        inverses[row] = inverse(whole);
      }
    }
  }
  __syncthreads();
  // Four warps, each with one of a lane's sums.
  if (warp >= 4) return;
  const int row = lane % 4 * 2 + warp % 2;
  float chapter_sum = 0.0f, whole = 0.0f;
  int in_chapter = 0, chapter = 0;
#pragma unroll 1
  for (int first = 0; first < groups.count; first += kAhead) {
    float sums[kAhead];
    float2 factors[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= groups.count) continue;
      sums[i] = Travel<T>::one(group_sums[first + i][lane], warp);
      factors[i] = reinterpret_cast<const float2*>(of_group[first + i])[row];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= groups.count) break;
      chapter_sum = mla::joined(chapter_sum, sums[i], factors[i].x, factors[i].y);
      if (++in_chapter == groups.per_chapter || first + i == groups.count - 1) {
        const float2 g = reinterpret_cast<const float2*>(of_chapter[chapter])[row];
        whole = mla::joined(whole, Travel<T>::rounded(chapter_sum), g.x, g.y);
        chapter_sum = 0.0f, in_chapter = 0, ++chapter;
      }
    }
  }
  const int channel = slot.channel + warp / 2 * 8, query_row = row_block * kRows + slot.row + warp % 2;
  const int rows = static_cast<int>(a.p.seq_len) * a.p.num_heads;
  const float scale = a.cache.type == CacheType::kInt8 ? a.cache.scale[channel] : 1.0f;
  T* to = static_cast<T*>(a.o_latent) + (int64_t(b) * rows + query_row) * kLatent + channel;
  if (query_row < rows) *to = from_float<T>(whole * inverses[row] * scale);
}

// Many sequences of few parts: a warp makes slot rows that have the same query rows, and some threads of the block the
// factors for them all.
template <typename T, int kRows>
__global__ void __launch_bounds__(combine::Serial<kRows>::kThreads) combine_serial_kernel(const CombineArgs k) {
  using namespace combine;
  using S = Serial<kRows>;
  using Four = typename Travel<T>::Four;
  constexpr int kRowGroups = kRows / 8, kEach = S::kEach;
  __shared__ float4 of_part[kAhead][kRows / 2], of_chapter[kAhead][kRows / 2];  // at the part that ends it
  __shared__ float inverses[kRows];
  const DecodeArgs& a = k.a;
  const int lane = threadIdx.x % 32, warp = blockIdx.x * S::kWarps + threadIdx.x / 32, row_block = blockIdx.y;
  const int b = blockIdx.z, slot_row = warp / kRowGroups * kEach * kRowGroups + warp % kRowGroups;
  const Slot<kRows> slot(slot_row);
  ptx::launch_dependents();
  ptx::wait_prior_grid();
  const int4 place = a.places[b];
  const int parts = place.y, per_chapter = place.z, step = a.plan.row_blocks;
  const int64_t at = place.x + row_block;
  const float* stats = a.stats + at * 2 * kRows + threadIdx.x;
  const Four* partial = static_cast<const Four*>(a.partial) + (at * Slot<kRows>::kCount + slot_row) * 32 + lane;
  const bool makes_factors = threadIdx.x < kRows;
  float4 chapter[kEach] = {}, whole[kEach] = {};
  Total chapter_total, whole_total;
  int in_chapter = 0;
#pragma unroll 1
  for (int first = 0; first < parts; first += kAhead) {
    Four ahead[kAhead][kEach];
    float tops[kAhead], sums[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= parts) continue;
      const float* s = stats + (first + i) * step * 2 * kRows;
      if (makes_factors) tops[i] = s[0], sums[i] = s[kRows];
      const Four* x = partial + int64_t((first + i) * step) * (Slot<kRows>::kCount * 32);
#pragma unroll
      for (int e = 0; e < kEach; ++e) ahead[i][e] = x[e * kRowGroups * 32];
    }
    if (makes_factors) {
      int place_in = in_chapter;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= parts) break;
        const Factors f = chapter_total.raise(tops[i]);
        chapter_total.join(sums[i], f);
        put(of_part[i], threadIdx.x, f);
        if (++place_in == per_chapter || first + i == parts - 1) {
          const Factors g = whole_total.raise(chapter_total.top);
          whole_total.join(chapter_total.sum, g);
          put(of_chapter[i], threadIdx.x, g);
          chapter_total = Total{}, place_in = 0;
        }
      }
      inverses[threadIdx.x] = inverse(whole_total);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= parts) break;
      const float4 f = of_part[i][slot.row / 2];
#pragma unroll
      for (int e = 0; e < kEach; ++e) chapter[e] = joined(chapter[e], Travel<T>::unpack(ahead[i][e]), f);
      if (++in_chapter == per_chapter || first + i == parts - 1) {
        const float4 g = of_chapter[i][slot.row / 2];
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          const float4& c = chapter[e];
          whole[e] = joined(whole[e], travelled<T>(c.x, c.y, c.z, c.w), g);
          chapter[e] = float4{};
        }
        in_chapter = 0;
      }
    }
    if (first + kAhead < parts) __syncthreads();
  }
  const float low = inverses[slot.row], high = inverses[slot.row + 1];
  const int rows = static_cast<int>(a.p.seq_len) * a.p.num_heads, row = row_block * kRows + slot.row;
  T* to = static_cast<T*>(a.o_latent) + (int64_t(b) * rows + row) * kLatent + slot.channel;
#pragma unroll
  for (int e = 0; e < kEach; ++e, to += 16) {
    const float4 x = whole[e];
    float scale0 = 1.0f, scale1 = 1.0f;
    if (a.cache.type == CacheType::kInt8) {
      scale0 = a.cache.scale[slot.channel + e * 16], scale1 = a.cache.scale[slot.channel + e * 16 + 8];
    }
    if (row < rows) to[0] = from_float<T>(x.x * low * scale0), to[8] = from_float<T>(x.z * low * scale1);
    if (row + 1 < rows) {
      to[kLatent] = from_float<T>(x.y * high * scale0), to[kLatent + 8] = from_float<T>(x.w * high * scale1);
    }
  }
}

}  // namespace deltafuse::mla
