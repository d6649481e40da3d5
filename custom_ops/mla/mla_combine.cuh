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

constexpr int kThreads = 512, kWarps = kThreads / 32, kAhead = 8, kSlotRows = 8;

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

// The sums of a lane so far: total = total * keep + x * add, factors of the lane's two query rows.
struct Sums {
  float4 x = {};
  __device__ __forceinline__ void join(float4 y, float2 keep, float2 add) {
    x.x = joined(x.x, y.x, keep.x, add.x), x.y = joined(x.y, y.y, keep.y, add.y);
    x.z = joined(x.z, y.z, keep.x, add.x), x.w = joined(x.w, y.w, keep.y, add.y);
  }
  template <typename T>
  __device__ __forceinline__ float4 rounded() const {
    return travelled<T>(x.x, x.y, x.z, x.w);
  }
};

template <typename T>
__device__ __forceinline__ void store(const DecodeArgs& a, int64_t b, int first_row, int channel, int slot_row,
                                      float4 x) {
  float scale0 = 1.0f, scale1 = 1.0f;
  if (a.cache.type == CacheType::kInt8) scale0 = a.cache.scale[channel], scale1 = a.cache.scale[channel + 8];
  const int rows = static_cast<int>(a.p.seq_len) * a.p.num_heads, row = first_row + slot_row;
  T* to = static_cast<T*>(a.o_latent) + (b * rows + row) * kLatent + channel;
  if (row < rows) to[0] = from_float<T>(x.x * scale0), to[8] = from_float<T>(x.z * scale1);
  if (row + 1 < rows) to[kLatent] = from_float<T>(x.y * scale0), to[kLatent + 8] = from_float<T>(x.w * scale1);
}

// How groups join chapters, and chapters the sequence: factors by group and query row, the second pair at the ends of
// chapters only.
template <int kRows>
struct Joint {
  float keep[kRows], add[kRows], chapter_keep[kRows], chapter_add[kRows];
};

// One lane a query row (`row`), in order over all groups. top(i), sum(i): what is known of a group.
template <int kRows, typename Top, typename SumOf>
__device__ __forceinline__ void join_all(Joint<kRows>* joints, float* inverses, int row, int groups, int per_chapter,
                                         Top top, SumOf sum) {
  Total chapter, whole;
  int in_chapter = 0;
#pragma unroll 4
  for (int i = 0; i < groups; ++i) {
    const Factors f = chapter.raise(top(i));
    joints[i].keep[row] = f.keep, joints[i].add[row] = f.add;
    chapter.join(sum(i), f);
    if (++in_chapter == per_chapter || i == groups - 1) {
      const Factors g = whole.raise(chapter.top);
      joints[i].chapter_keep[row] = g.keep, joints[i].chapter_add[row] = g.add;
      whole.join(chapter.sum, g);
      chapter = Total{}, in_chapter = 0;
    }
  }
  inverses[row] = whole.sum > 0.0f ? 1.0f / whole.sum : 0.0f;
}

// The same for the sums themselves; group(i): a lane's four, rounded to what travels.
template <typename T, int kRows, typename Group>
__device__ __forceinline__ float4 join_all(const Joint<kRows>* joints, const float* inverses, int row, int groups,
                                           int per_chapter, Group group) {
  Sums chapter, whole;
  int in_chapter = 0;
#pragma unroll 4
  for (int i = 0; i < groups; ++i) {
    const Joint<kRows>& j = joints[i];
    chapter.join(group(i), *reinterpret_cast<const float2*>(j.keep + row),
                 *reinterpret_cast<const float2*>(j.add + row));
    if (++in_chapter == per_chapter || i == groups - 1) {
      whole.join(chapter.rounded<T>(), *reinterpret_cast<const float2*>(j.chapter_keep + row),
                 *reinterpret_cast<const float2*>(j.chapter_add + row));
      chapter = Sums{}, in_chapter = 0;
    }
  }
  const float2 by = *reinterpret_cast<const float2*>(inverses + row);
  return make_float4(whole.x.x * by.x, whole.x.y * by.y, whole.x.z * by.x, whole.x.w * by.y);
}

// Where a sequence's parts are among those of all, and their grain, as decode_kernel's blocks found it. By all threads.
struct Place {
  Grain grain;
  int first;
  __device__ Place(const DecodeArgs& a, int b) {
    __shared__ Tally tallies[kWarps], befores[kWarps];
    const int batch = static_cast<int>(a.p.batch), warp = threadIdx.x / 32;
    Tally all, before;
    if (!a.lengths.past) {  // all have the same length
      const Cut cut = cut_of(a, 0);
      all.add(cut, batch);
      before.add(cut, b);
    } else {
      for (int i = threadIdx.x; i < batch; i += kThreads) {
        const Cut cut = cut_of(a, i);
        all.add(cut);
        if (i < b) before.add(cut);
      }
      all = of_warp(all), before = of_warp(before);
      if (threadIdx.x % 32 == 0) tallies[warp] = all, befores[warp] = before;
      __syncthreads();
      all = tallies[0], before = befores[0];
      for (int w = 1; w < kWarps && w * 32 < batch; ++w) {
#pragma unroll
        for (int g = 0; g < 3; ++g) {
          all.parts[g] += tallies[w].parts[g], before.parts[g] += befores[w].parts[g];
          all.longest[g] = max(all.longest[g], tallies[w].longest[g]);
        }
      }
    }
    grain = a.plan.finest == a.plan.coarsest ? a.plan.coarsest : a.plan.cheapest(all);
    first = Tally::pick(before.parts, grain);
  }
  __device__ static Cut cut_of(const DecodeArgs& a, int b) {
    return Cut::of(static_cast<int>(a.lengths.total(b)), static_cast<int>(a.p.seq_len), a.p.window,
                   a.plan.section_tiles, a.plan.chapter_tiles);
  }
};

// How many groups of parts join chapters, and how many of them a chapter has.
struct Groups {
  int parts, per_group, count, per_chapter;
  __device__ Groups(const DecodeArgs& a, int b, Grain grain, bool gather) {
    const Cut cut = Place::cut_of(a, b);
    parts = cut.parts(grain);
    if (grain == Grain::kTile && cut.short_one()) {
      per_group = cut.section, per_chapter = cut.chapter;
    } else if (grain == Grain::kChapter || !gather) {
      per_group = 1, per_chapter = grain == Grain::kChapter ? 1 : cut.chapter;
    } else {
      per_group = cut.chapter, per_chapter = 1;
    }
    count = Cut::over(parts, per_group);
  }
};

// Groups are sections of a short sequence, or chapters; parts of the serial kernel sections or chapters.
inline int spread_bytes() { return Cut::kMaxChapters * (kSlotRows * (16 + 8) + 32 * 16); }
inline int serial_bytes(int rows, int parts) { return parts * rows * (16 + 8); }

}  // namespace combine

// Few sequences of many parts: a block makes a slot row, which has 8 query rows, and its warps gather groups of parts.
template <typename T, int kRows>
__global__ void __launch_bounds__(combine::kThreads, 1) combine_spread_kernel(const CombineArgs k) {
  using namespace combine;
  using Four = typename Travel<T>::Four;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float inverses[kSlotRows];
  const DecodeArgs& a = k.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_block = blockIdx.y;
  const int b = blockIdx.z;
  const Slot<kRows> slot(blockIdx.x);
  ptx::launch_dependents();
  const Place place(a, b);
  const Groups groups(a, b, place.grain, true);
  const int64_t at = int64_t(place.first) * a.plan.row_blocks + row_block, step = a.plan.row_blocks;  // parts
  float4* gathered = reinterpret_cast<float4*>(shared);                                               // [groups][32]
  auto* joints = reinterpret_cast<Joint<kSlotRows>*>(gathered + groups.count * 32);
  float* top = reinterpret_cast<float*>(joints + groups.count);  // [groups][8]
  float* sum = top + groups.count * kSlotRows;                   // [groups][8]
  // Of the query rows, every lane knows one; a lane's own two are known by lanes `mine` and mine + 1.
  const int mine = lane % 4 * 2;
  const float* stats = a.stats + at * 2 * kRows + blockIdx.x % (kRows / 8) * kSlotRows + lane % kSlotRows;
  const Four* partial = static_cast<const Four*>(a.partial) + (at * Slot<kRows>::kCount + blockIdx.x) * 32 + lane;
  ptx::wait_prior_grid();
  for (int group = warp; group < groups.count; group += kWarps) {
    const int from = group * groups.per_group, to = min(from + groups.per_group, groups.parts);
    Sums sums;
    Total total;
    for (int first = from; first < to; first += kAhead) {
      // All of these are on their way before the first is used.
      Four ahead[kAhead];
      float tops[kAhead], part_sums[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= to) continue;
        tops[i] = stats[(first + i) * step * 2 * kRows];
        part_sums[i] = stats[((first + i) * step * 2 + 1) * kRows];
        ahead[i] = partial[(first + i) * step * Slot<kRows>::kCount * 32];
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= to) break;
        const Factors f = total.raise(tops[i]);
        total.join(part_sums[i], f);
        const float2 keep = make_float2(__shfl_sync(~0u, f.keep, mine), __shfl_sync(~0u, f.keep, mine + 1));
        const float2 add = make_float2(__shfl_sync(~0u, f.add, mine), __shfl_sync(~0u, f.add, mine + 1));
        sums.join(Travel<T>::unpack(ahead[i]), keep, add);
      }
    }
    gathered[group * 32 + lane] = sums.template rounded<T>();
    if (lane < kSlotRows) top[group * kSlotRows + lane] = total.top, sum[group * kSlotRows + lane] = total.sum;
  }
  __syncthreads();
  if (warp > 0) return;
  if (lane < kSlotRows) {
    join_all<kSlotRows>(
        joints, inverses, lane, groups.count, groups.per_chapter, [&](int i) { return top[i * kSlotRows + lane]; },
        [&](int i) { return sum[i * kSlotRows + lane]; });
  }
  __syncwarp();
  const float4 x = join_all<T, kSlotRows>(joints, inverses, mine, groups.count, groups.per_chapter,
                                          [&](int i) { return gathered[i * 32 + lane]; });
  store<T>(a, b, row_block * kRows, slot.channel, slot.row, x);
}

// Many sequences of few parts: a warp makes a slot row.
template <typename T, int kRows>
__global__ void __launch_bounds__(combine::kThreads, 1) combine_serial_kernel(const CombineArgs k) {
  using namespace combine;
  using Four = typename Travel<T>::Four;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float inverses[kRows];
  const DecodeArgs& a = k.a;
  const int lane = threadIdx.x % 32, slot_row = blockIdx.x * kWarps + threadIdx.x / 32, row_block = blockIdx.y;
  const int b = blockIdx.z;
  const Slot<kRows> slot(slot_row);
  ptx::launch_dependents();
  const Place place(a, b);
  const Groups groups(a, b, place.grain, false);
  const int64_t at = int64_t(place.first) * a.plan.row_blocks + row_block, step = a.plan.row_blocks;  // parts
  auto* joints = reinterpret_cast<Joint<kRows>*>(shared);
  float* known = reinterpret_cast<float*>(joints + groups.count);  // [parts][2][rows]
  const float* stats = a.stats + at * 2 * kRows;
  const Four* partial = static_cast<const Four*>(a.partial) + (at * Slot<kRows>::kCount + slot_row) * 32 + lane;
  ptx::wait_prior_grid();
  // The first sums are on their way while their factors are made.
  Four ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < groups.count) ahead[i] = partial[i * step * Slot<kRows>::kCount * 32];
  }
  for (int i = threadIdx.x; i < groups.count * 2 * kRows; i += kThreads)
    known[i] = stats[i / (2 * kRows) * step * (2 * kRows) + i % (2 * kRows)];
  __syncthreads();
  if (threadIdx.x < kRows) {
    const float* mine = known + threadIdx.x;
    join_all<kRows>(
        joints, inverses, threadIdx.x, groups.count, groups.per_chapter, [&](int i) { return mine[i * 2 * kRows]; },
        [&](int i) { return mine[(i * 2 + 1) * kRows]; });
  }
  __syncthreads();
  float4 x;
  if (groups.count <= kAhead) {
    Sums chapter, whole;
    int in_chapter = 0;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i >= groups.count) break;
      const Joint<kRows>& j = joints[i];
      chapter.join(Travel<T>::unpack(ahead[i]), *reinterpret_cast<const float2*>(j.keep + slot.row),
                   *reinterpret_cast<const float2*>(j.add + slot.row));
      if (++in_chapter == groups.per_chapter || i == groups.count - 1) {
        whole.join(chapter.rounded<T>(), *reinterpret_cast<const float2*>(j.chapter_keep + slot.row),
                   *reinterpret_cast<const float2*>(j.chapter_add + slot.row));
        chapter = Sums{}, in_chapter = 0;
      }
    }
    const float2 by = *reinterpret_cast<const float2*>(inverses + slot.row);
    x = make_float4(whole.x.x * by.x, whole.x.y * by.y, whole.x.z * by.x, whole.x.w * by.y);
  } else {
    x = join_all<T, kRows>(joints, inverses, slot.row, groups.count, groups.per_chapter,
                           [&](int i) { return Travel<T>::unpack(partial[i * step * Slot<kRows>::kCount * 32]); });
  }
  store<T>(a, b, row_block * kRows, slot.channel, slot.row, x);
}

}  // namespace deltafuse::mla
