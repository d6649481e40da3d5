// Decode's shared memory and a block's share of the work. See mla_decode.cuh.
#pragma once

#include <cuda.h>

#include <climits>

#include "mla_sums.cuh"
#include "mla_wgmma_sm90a.cuh"

namespace deltafuse::mla {

// What decode_kernel takes of DecodeArgs: few lines of constant memory, since a kernel begins with misses there.
struct DecodeKernelArgs {
  const void* past = nullptr;  // Lengths
  int64_t past_len = 0, most_past = 0;
  int is_int64 = 0;
  int batch = 0, seq_len = 0, num_heads = 0, window = 0, causal = 0;
  int row_blocks = 0;
  DecodePlan plan;
  int box_rows = 64;  // tokens of one fetch
  int once = 0;       // the cache is larger than what the L2 cache can keep: leave that to the sums
  int batch_rows = 0, num_blocks = 0, block_size = 0, max_blocks = 0;  // of the cache
  const int32_t* block_table = nullptr;
  void* partial = nullptr;
  float* stats = nullptr;
  int4* places = nullptr;
  float scale = 0.0f;
  MaskType mask_type = MaskType::kNone;
  const void* attn_mask = nullptr;
  int64_t mask_strides[4] = {};
};

namespace decode {

// A tile of 64 tokens is 4 pairs of blocks of 64 channels, and the rotary keys' block. Pairs lie in a ring of slots:
// each is used as soon as it is there and is free as soon as its own products are done.
constexpr int kThreads = 512, kTile = Cut::kTile, kBlock = kTile * 128, kPair = 2 * kBlock, kPairs = kLatent / 128;
constexpr int kItems = 4, kConverters = 3, kRopeSlots = 2, kRaw = kTile * 128;  // kRaw: 8-bit codes of a pair
static_assert(kFloat8Group == 128, "a pair has one scale a token");

// What a block does at a time: one part of a sequence for some query rows. Tokens count from `base`.
struct alignas(16) Item {
  int at;  // its place among the partial sums of all
  int b, base, last, begin, end, tiles, section, first_row;
  int parts, chapter;  // of the sequence: its parts, and how many of them are a chapter
  bool fresh, leaves;  // other queries than before; other ones after it
};

// How one of 32 sequences is cut, as the warp that walks keeps it.
struct alignas(16) Cutting {
  int base, end, tiles, section;
  int span, parts, chapter;  // tiles of a part, parts, and how many of them are a chapter
};

template <CacheType kType, int kRows>
struct Shape {
  static constexpr bool kCodes = kType != CacheType::kSame, kScales = kType == CacheType::kFloat8;
  static constexpr int kSlots = kScales || kRows == 64 ? 7 : kCodes ? 8 : 10;
  static constexpr int kRawSlots = kScales ? 4 : kCodes ? 4 : 1;
  static constexpr int kQueryBlock = kRows * 128, kQueryBytes = kQueryBlock * (kLatent + kRotary) / 64;
  // float8: weights times the tokens' scales, one version a pair.
  static constexpr int kListeners = kCodes ? 15 : 12;  // warps that hear of parts
  static constexpr int kVersions = kScales ? kPairs : 1, kWeightBytes = kRows * 128;
  static constexpr int kWeightBuffers = kScales ? 1 : 2;
  static constexpr int kScaleBytes = kScales ? kTile * kPairs * 4 : 0;

  // Whether the two warpgroups of the sums share each pair, or have two of a tile's four each. Two pairs are then free
  // at a time, and so fetched: where memory decides, it likes that better.
  static constexpr bool kEachPair = kCodes || kRows == 64;
  static constexpr int kBurst = kEachPair ? 1 : 2;

  static constexpr int kRope = kSlots * kPair, kQuery = kRope + kRopeSlots * kBlock, kWeights = kQuery + kQueryBytes;
  static constexpr int kCode = kWeights + kWeightBuffers * kVersions * kWeightBytes;
  static constexpr int kSmall = kCode + (kCodes ? kRawSlots * kRaw : 0);

  struct Small {
    uint64_t full[kSlots], empty[kSlots], rope_full[kRopeSlots], rope_empty[kRopeSlots];
    uint64_t raw_full[kRawSlots], raw_empty[kRawSlots], weights_full[kWeightBuffers], weights_empty[kWeightBuffers],
        q_full[1], q_empty[1];
    uint64_t factors_full[kWeightBuffers];  // all lanes arrive that wrote factors, each its own
    uint64_t item_full[kItems], item_empty[kItems];
    Item items[kItems];
    Cutting cuttings[32];
    alignas(128) float scales[kRopeSlots][kScales ? kTile : 1][kPairs];
    // How a tile joins its section and a section its chapter: two rows' `keep`, then their `add`.
    alignas(16) float by_tile[2][kRows / 2][4];
    float by_section[2][kRows / 2][4];
    alignas(16) float largest[2][kRows][4];
    alignas(16) float sums[2][kRows][4];  // of each warp's 16 tokens
    int high[kRows];
    int64_t mask_row[kRows];
  };

#ifdef MLA_SM90A
  // Each by one thread, one after another: an instruction takes the same barrier from all lanes.
  __device__ static void make_barriers(Small* small) {
    auto make = [](auto& bars, uint32_t arrivals) {
#pragma unroll
      for (auto& bar : bars) ptx::mbar_init(&bar, arrivals);
    };
    if (threadIdx.x == 0) {
      make(small->full, kCodes ? kConverters : 1), make(small->q_full, 1), make(small->q_empty, 4);
    } else if (threadIdx.x == 32) {
      make(small->empty, kEachPair ? 8 : 4), make(small->weights_full, 4), make(small->weights_empty, 8);
    } else if (threadIdx.x == 64) {
      make(small->raw_full, 1), make(small->raw_empty, kConverters);
      make(small->rope_full, 1), make(small->rope_empty, 4), make(small->factors_full, 32);
    } else if (threadIdx.x == 96) {
      make(small->item_full, 1), make(small->item_empty, kListeners);
    }
    ptx::mbar_init_fence();
  }
#endif
  static constexpr int kBytes = 1024 + kSmall + int(sizeof(Small));
  static_assert(kBytes <= 227 * 1024, "shared memory of a block");
  static_assert(kSlots >= kPairs, "a tile must fit");
};

#ifdef MLA_SM90A

// Where a role is in a ring of slots.
template <int kSlots>
struct Ring {
  int slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ int at(int i) const { return slot + i >= kSlots ? slot + i - kSlots : slot + i; }
  __device__ __forceinline__ uint32_t parity(int i) const { return phase ^ (slot + i >= kSlots ? 1u : 0u); }
  __device__ __forceinline__ void advance(int n) {
    slot += n;
    if (slot >= kSlots) slot -= kSlots, phase ^= 1;
  }
};

// Operands in shared memory start at addresses that all lanes share; said so, the compiler keeps them in uniform
// registers.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }
__device__ __forceinline__ uint32_t operand(const unsigned char* p) {
  return uniform(static_cast<uint32_t>(ptx::descriptor(ptx::shared_address(p))));
}

// A block's share of the work: neighbours, so that its next part is mostly of the same sequence and needs no other
// queries; but where a part is read for several row blocks, they run side by side and share it in the L2 cache. One
// warp walks, all lanes together, and tells the others. It reads nothing that an earlier kernel of the same call
// writes.
template <int kRows>
class Walk {
 public:
  // Asks for the lengths, which take a while to come.
  __device__ Walk(const DecodeKernelArgs& k, Cutting* cuttings, bool mine)
      : k_(k), cuttings_(cuttings), lane_(threadIdx.x % 32) {
    if (mine && lane_ < k.batch && k.past) {
      const int32_t* past = static_cast<const int32_t*>(k.past) + (k.is_int64 ? 2 * lane_ : lane_);
      low_ = past[0];
      if (k.is_int64) high_ = past[1];
    }
  }

  __device__ void begin() {
    const DecodeKernelArgs& k = k_;
    // Where each 32nd of the batch begins, in parts.
    const int batch = k.batch, chunk = (batch + 31) / 32;
    grain_ = k.plan.coarsest;
    int mine = 0;
    Cut cut;
    if (chunk == 1 && lane_ < batch) {
      cut = cut_of_given(!k.past ? k.past_len : k.is_int64 ? int64_t(high_) << 32 | static_cast<uint32_t>(low_) : low_);
    }
    if (k.plan.finest != grain_) {
      Tally tally;
      if (chunk == 1) {
        if (lane_ < batch) tally.add(cut);
      } else {
#pragma unroll 2
        for (int i = 0; i < chunk; ++i) {
          const int b = lane_ * chunk + i;
          if (b < batch) tally.add(cut_of(b));
        }
      }
      Tally all;
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        all.parts[g] = __reduce_add_sync(~0u, tally.parts[g]);
        all.longest[g] = __reduce_max_sync(~0u, tally.longest[g]);
      }
      grain_ = k.plan.cheapest(all);
      mine = grain_ == Grain::kSection ? tally.parts[0] : tally.parts[1];
    } else if (chunk > 1) {
#pragma unroll 2
      for (int i = 0; i < chunk; ++i) {
        const int b = lane_ * chunk + i;
        if (b < batch) mine += cut_of(b).parts(grain_);
      }
    }
    if (chunk == 1 && lane_ < batch) mine = keep(cut);
    const int sum = batch == 1 ? mine : scan(mine), parts = __shfl_sync(~0u, sum, batch == 1 ? 0 : 31);
    const int all = parts * k.row_blocks;
    const int block = blockIdx.x, blocks = gridDim.x;
    if (k.row_blocks > 1 || all <= blocks) {
      work_ = block, to_ = all, step_ = blocks;
    } else {
      const int each = Cut::over(all - blocks + 1, blocks), rest = all - each * blocks;  // all / blocks
      work_ = block * each + min(block, rest);
      to_ = work_ + each + (block < rest);
      step_ = 1;
    }
    if (work_ >= to_) return;
    if (chunk == 1) {
      first_ = mine > 0 ? sum - mine : INT_MAX, end_ = parts;
      return;
    }
    const int part = part_of(work_), from = __popc(__ballot_sync(~0u, sum - mine <= part)) - 1;
    load(from * chunk, __shfl_sync(~0u, sum - mine, from));
  }

  // The next part; none: 0 tiles.
  __device__ Item next() {
    Item item{};
    if (work_ >= to_) return item;
    const int part = part_of(work_);
    while (part >= end_) load(group_ + 32, end_);
    const int from = __popc(__ballot_sync(~0u, first_ <= part)) - 1;
    const int index = part - __shfl_sync(~0u, first_, from);
    __syncwarp();  // what lanes keep
    const Cutting cut = cuttings_[from];
    const int row_block = k_.row_blocks == 1 ? 0 : work_ % k_.row_blocks;
    item.b = group_ + from, item.base = cut.base, item.last = cut.end;
    item.begin = index * cut.span * kTile;
    item.end = min(item.begin + cut.span * kTile, item.last - item.base);
    item.tiles = min(cut.span, cut.tiles - index * cut.span);
    item.section = cut.section;
    item.parts = cut.parts, item.chapter = cut.chapter;
    item.first_row = row_block * kRows;
    item.at = work_;
    item.fresh = k_.row_blocks > 1 || index == 0 || first_time_;
    item.leaves = k_.row_blocks > 1 || (index + 1) * cut.span >= cut.tiles;
    first_time_ = false;
    work_ += step_;
    return item;
  }

 private:
  // Lengths::given and total, in few instructions.
  __device__ int64_t given(int b) const {
    if (!k_.past) return k_.past_len;
    return k_.is_int64 ? static_cast<const int64_t*>(k_.past)[b] : static_cast<const int32_t*>(k_.past)[b];
  }
  __device__ Cut cut_of(int b) const { return cut_of_given(given(b)); }
  __device__ Cut cut_of_given(int64_t given) const {
    const bool valid = static_cast<uint64_t>(given) <= static_cast<uint64_t>(k_.most_past);
    return Cut::of((valid ? static_cast<int>(given) : 0) + k_.seq_len, k_.seq_len, k_.window, k_.plan.section_tiles,
                   k_.plan.chapter_tiles);
  }
  __device__ int part_of(int work) const { return k_.row_blocks == 1 ? work : work / k_.row_blocks; }
  __device__ int scan(int x) const {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, x, step);
      if (lane_ >= step) x += other;
    }
    return x;
  }
  // This lane's of the 32 sequences from `group` on; how many parts it has.
  __device__ int look_at(int group) {
    group_ = group;
    if (group + lane_ >= k_.batch) return 0;
    return keep(cut_of(group + lane_));
  }
  __device__ int keep(const Cut& cut) const {
    int span = 1, parts = cut.tiles, chapter = 1;
    if (grain_ != Grain::kTile || !cut.short_one()) {
      parts = cut.sections(), span = cut.section;
      if (grain_ == Grain::kSection) chapter = cut.chapter_of(parts);
      if (grain_ == Grain::kChapter) {
        const int sections = cut.chapter_of(parts);
        span *= sections, parts = Cut::over(parts, sections);
      }
    }
    cuttings_[lane_] = Cutting{cut.base, cut.end, cut.tiles, cut.section, span, parts, chapter};
    return parts;
  }
  // These 32, the first of which begins with part `before`.
  __device__ void load(int group, int before) {
    __syncwarp();  // who read what lanes kept
    const int mine = look_at(group), sum = scan(mine);
    first_ = mine > 0 ? before + sum - mine : INT_MAX;
    end_ = before + __shfl_sync(~0u, sum, 31);
  }

  const DecodeKernelArgs& k_;
  Cutting* const cuttings_;
  const int lane_;
  int low_ = 0, high_ = 0;  // of this lane's length, as it is in memory
  int work_ = 0, to_ = 0, step_ = 0;
  int group_ = 0, end_ = 0;
  Grain grain_ = Grain::kTile;
  int first_ = 0;  // part of this lane's sequence
  bool first_time_ = true;
};

// The parts, as the other warps hear of them.
template <typename Small>
struct Feed {
  Small* small;
  int count = 0;

  // The next part, or null after the last one. It stays where it is until done().
  __device__ const Item* next() {
    const int slot = count % kItems;
    ptx::mbar_wait(&small->item_full[slot], count / kItems & 1);
    return small->items[slot].tiles > 0 ? &small->items[slot] : nullptr;
  }
  __device__ void done() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbar_arrive(&small->item_empty[count % kItems]);
    ++count;
  }
  // By one lane.
  __device__ void tell(const Item& item) {
    const int slot = count % kItems;
    ptx::mbar_wait(&small->item_empty[slot], (count / kItems & 1) ^ 1);
    small->items[slot] = item;
    ptx::mbar_arrive(&small->item_full[slot]);
    ++count;
  }
};

#endif  // MLA_SM90A
}  // namespace decode
}  // namespace deltafuse::mla
