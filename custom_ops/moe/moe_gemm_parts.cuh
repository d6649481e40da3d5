// The experts' products on Hopper: what a block keeps in shared memory, and the warps that fetch. A tile is 256 weight
// rows by the tokens of one expert; its weights come by bulk copies, its tokens row by row from where they lie.
#pragma once

#include "moe_fragment.cuh"
#include "moe_wgmma.cuh"

namespace deltafuse::moe {
namespace sm90 {

// Two warpgroups multiply two units each. Where tiles have few tokens integers take four of one unit: converting them
// takes longer than anything else then, and more warps wait for each other's latencies.
__host__ __device__ constexpr int consumers(int units) { return 512 / units; }
constexpr int kFewTokens = 64;   // of such tiles, at most
constexpr int kProducers = 128;  // the registers of whole warpgroups can be dealt out anew
constexpr int kFetchers = 96;    // of them: three warps fetch tokens, one thread fetches weights and looks tiles up
constexpr int kMostStages = 6;
constexpr int kSlots = 4;  // tiles that are known ahead

// Tokens of a tile, at most: accumulators and operands must fit the registers.
__host__ __device__ constexpr int most_tokens(Pack p) {
  return p == Pack::kPlain ? 192 : p == Pack::kFloat8 ? 160 : 128;
}
// Columns of the products for so many tokens. Float8 has no 144: the compiler finds registers for 160 only.
__host__ __device__ constexpr int tile_columns(Pack p, int tokens) {
  const int columns = tokens <= 32 ? 32 : tokens <= 64 ? 64 : (tokens + 15) / 16 * 16;
  return p == Pack::kFloat8 && columns == 144 ? 160 : columns;
}
__host__ __device__ constexpr int right_halves(Pack p) {  // of 128 bytes of a token in a stage
  return p == Pack::kInt4 || p == Pack::kInt8 ? 2 : 1;
}

struct StageLayout {
  int right, half, bytes;  // offsets in a stage, of the tokens' second half from their first; its size
  int stages;
};
inline StageLayout stage_layout(const GemmArgs& a, int shared_bytes, int fixed_bytes) {  // the same for both of a pair
  const Packed& w = a.weights;
  StageLayout s;
  s.right = (w.stage_bytes() + 1023) / 1024 * 1024;
  s.half = tile_columns(w.pack, a.tile_tokens) * 128;
  s.bytes = s.right + s.half * right_halves(w.pack);
  const int most = a.tuning.stages > 1 && a.tuning.stages < kMostStages ? a.tuning.stages : kMostStages;
  const int room = (shared_bytes - fixed_bytes - 1024) / s.bytes;  // 1024: alignment
  s.stages = room < most ? room : most;
  return s;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// One tile: what everybody has to know of it. count 0: there is none any more.
struct Work {
  const unsigned char* weights;
  float factor;  // of the products, for scales that are stored divided by it
  int32_t stages, row_tile, count;
  int32_t start;    // its first row in out
  int32_t x_start;  // and in x, or in `rows`
  int32_t gathered;
  int32_t again;       // other tiles read the same weights
  int32_t product;     // of the pair
  int32_t token_tile;  // of the list; the shared expert's lie behind it
  int32_t needed;      // tiles of the first product that must be stored before the second one reads these tokens
};

struct Shared {
  uint64_t full[kMostStages], empty[kMostStages];
  uint64_t ready[kSlots], free[kSlots];
  Work work[kSlots];
};

// Tiles that other blocks store. What was stored before a number is added is seen by those who see the number.
__device__ __forceinline__ void one_more(uint32_t* count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;\n" ::"l"(count) : "memory");
}
__device__ __forceinline__ uint32_t how_many(const uint32_t* count) {
  uint32_t there;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(there) : "l"(count) : "memory");
  return there;
}

// Scales of a tile's float8 tokens.
using RowScales = float[most_tokens(Pack::kFloat8)];

__device__ __forceinline__ void init_barriers(Shared& s, int stages, int consumers) {
  for (int i = 0; i < stages; ++i) {
    barrier_init(&s.full[i], kFetchers + 1);
    barrier_init(&s.empty[i], consumers / 32);
  }
  for (int i = 0; i < kSlots; ++i) {
    barrier_init(&s.ready[i], 1);
    barrier_init(&s.free[i], (consumers + kFetchers) / 32);
  }
  barrier_init_fence();
}

struct Pipeline {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};

__device__ __forceinline__ uint32_t tile_count(const GemmArgs& a, int listed, int shared_tiles) {
  return static_cast<uint32_t>(listed) * a.weights.tiles + static_cast<uint32_t>(shared_tiles) * a.shared.tiles;
}

// The tile of a number, where the list has `listed`. The shared expert's tiles, which read
// little, are spread over the experts', which read much.
__device__ __forceinline__ Work locate(const GemmPair& pair, int listed, uint32_t index) {
  Work work{};
  const GemmArgs& a0 = pair.product[0];
  const int shared_tiles = a0.shared.count ? (a0.shared_rows + a0.tile_tokens - 1) / a0.tile_tokens : 0;
  if (pair.count == 2) {
    const uint32_t before = tile_count(a0, listed, shared_tiles);
    if (index >= before) work.product = 1, index -= before;
  }
  const GemmArgs& a = pair.product[work.product];
  const uint32_t own = static_cast<uint32_t>(listed) * a.weights.tiles;
  const uint32_t other = static_cast<uint32_t>(shared_tiles) * a.shared.tiles;
  if (index >= own + other) return work;
  bool is_shared = false;
  uint32_t at = index;
  if (other) {  // the last of every `period`, until there is none any more
    const uint32_t period = (own + other) / other, before = index / period;
    is_shared = before < other && index - before * period == period - 1;
    at = is_shared ? before : index - min(before, other);
  }
  const Packed& w = is_shared ? a.shared : a.weights;
  const int token_tile = static_cast<int>(at / w.tiles);
  work.row_tile = static_cast<int>(at) - token_tile * w.tiles;
  work.stages = w.stages, work.factor = 1.0f;
  work.token_tile = is_shared ? listed + token_tile : token_tile;
  work.needed = is_shared ? a0.shared.tiles : a0.weights.tiles;
  int expert = 0;
  if (is_shared) {
    const int each = ((a.shared_rows + shared_tiles - 1) / shared_tiles + 7) / 8 * 8;
    const int begin = min(token_tile * each, a.shared_rows);
    work.count = min(each, a.shared_rows - begin);
    work.start = a.shared_out + begin, work.x_start = a.shared_x + begin, work.again = 1;
  } else {
    const TokenTile tile = a.tiles[token_tile];
    expert = tile.expert;
    work.count = tile.count, work.start = work.x_start = tile.start, work.gathered = a.rows != nullptr;
    // An expert's tiles are neighbours.
    const int before = a.tiles[max(token_tile - 1, 0)].expert, after = a.tiles[min(token_tile + 1, listed - 1)].expert;
    work.again = (token_tile > 0 && before == expert) || (token_tile < listed - 1 && after == expert);
  }
  work.weights = w.data + expert * w.expert_bytes() + work.row_tile * w.tile_bytes();
  if (w.multiplier) work.factor = w.multiplier[expert];
  return work;
}

// The thread that fetches weights. It alone knows which tile is next, and looks it up while there are stages to wait
// for.
__device__ __forceinline__ void fetch_weights(const GemmPair& pair, const StageLayout& layout, uint32_t base,
                                              Shared& shared) {
  const GemmArgs& a = pair.product[0];  // in what is asked of it both are alike
  const uint32_t stage_bytes = a.weights.stage_bytes();
  const int listed = *a.num_tiles;
  uint32_t index = blockIdx.x;
  Work work = locate(pair, listed, index);
  Pipeline at;
  for (int turn = 0;; ++turn) {
    const int slot = turn % kSlots;
    barrier_wait(&shared.free[slot], (turn / kSlots & 1) ^ 1);
    shared.work[slot] = work;
    barrier_arrive(&shared.ready[slot]);
    if (work.count == 0) break;
    const unsigned char* from = work.weights;
    const int stages = work.stages;
    const uint64_t policy = a.tuning.keep_weights || work.again ? evict_normal_policy() : evict_first_policy();
    for (int k = 0; k < stages; ++k) {
      barrier_wait(&shared.empty[at.stage], at.phase ^ 1);
      uint64_t* bar = &shared.full[at.stage];
      barrier_expect(bar, stage_bytes);
      bulk_copy(base + at.stage * layout.bytes, from, stage_bytes, bar, policy);
      from += stage_bytes;
      at.next(layout.stages);
      // Late enough to leave tiles to others, early enough not to wait.
      if (k == max(stages - 5, 0)) index = a.counter ? gridDim.x + atomicAdd(a.counter, 1u) : index + gridDim.x;
      if (k == max(stages - 3, 0)) work = locate(pair, listed, index);
    }
  }
}

// The three warps that fetch tokens. A thread copies one 16-byte chunk of every twelfth token; which those are differs
// within a warp, how many they are does not: what is beyond the last is the last again. Scales of float8 tokens come
// with a tile's first stage.
template <Pack P, int kMost>
__device__ __forceinline__ void fetch_tokens(const GemmPair& pair, const StageLayout& layout, uint32_t base,
                                             Shared& shared, RowScales* row_scales, int thread) {
  constexpr int kHalves = right_halves(P), kStep = kFetchers / 8, kRows = (kMost + kStep - 1) / kStep;
  const int chunk = thread % 8, row0 = thread / 8;
  // Every other row's chunk has bit 2 of its place turned over: twelve is four more than eight.
  const uint32_t to0 = base + layout.right + row0 * 128 + ((chunk ^ (row0 & 7)) * 16);
  Pipeline at;
  // Tiles of the first product that are being multiplied: the one before and that before it. The second product is told
  // of them late, when nobody has to wait any more until they are stored; or when it has to wait itself.
  int last = -1, before = -1;
  auto hand_on = [&](int token_tile, int turn) {
    if (token_tile < 0) return;
    barrier_wait(&shared.free[turn % kSlots], turn / kSlots & 1);
    one_more(pair.stored + token_tile);
  };
  for (int turn = 0;; ++turn) {
    const int slot = turn % kSlots;
    barrier_wait(&shared.ready[slot], turn / kSlots & 1);
    const Work& work = shared.work[slot];
    const int count = work.count, start = work.x_start, stages = work.stages;
    const bool gathered = work.gathered;
    const GemmArgs& a = pair.product[work.product];
    if (pair.count == 2 && threadIdx.x % 32 == 0) {
      auto there = [&] {
        return count == 0 || work.product == 0 ||
               how_many(pair.stored + work.token_tile) >= static_cast<uint32_t>(work.needed);
      };
      if (thread == 0) {
        hand_on(before, turn - 2);
        before = last, last = -1;
        if (count == 0 || !there()) hand_on(before, turn - 1), before = -1;
        if (count != 0 && work.product == 0) last = work.token_tile;
      }
      while (!there()) {
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&shared.free[slot]);
    if (count == 0) break;
    const int chunks = a.x_cols * (P == Pack::kFloat8 ? 1 : 2) / 16;  // of a row
    auto source = [&](int r) { return static_cast<uint32_t>(gathered ? a.rows[start + r] : start + r); };
    const uint32_t stride = static_cast<uint32_t>(a.x_stride / 16);
    uint32_t from[kRows];  // in 16 bytes
#pragma unroll
    for (int i = 0; i < kRows; ++i) from[i] = source(min(row0 + kStep * i, count - 1)) * stride + chunk;
    if constexpr (P == Pack::kFloat8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = thread + kFetchers * i;
        if (r < count) copy4(address(&row_scales[slot][r]), a.x_scale + source(r));
      }
    }
    const int rows = (count - row0 / 4 * 4 + kStep - 1) / kStep;
    for (int k = 0; k < stages; ++k) {
      barrier_wait(&shared.empty[at.stage], at.phase ^ 1);
      const uint32_t stage = at.stage * layout.bytes;
      uint64_t* bar = &shared.full[at.stage];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int block = k * kHalves + half;
        const uint32_t bytes = block * 8 + chunk < chunks ? 16 : 0;
        const unsigned char* block_from = static_cast<const unsigned char*>(a.x) + (bytes ? block * 128 : 0);
        asm volatile("" : "+l"(block_from));  // one sum, not one a row
        const uint32_t even = stage + to0 + half * layout.half, odd = even ^ 64;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (i < rows) copy16((i & 1 ? odd : even) + i * kStep * 128, block_from + uint64_t(from[i]) * 16, bytes);
        }
      }
      barrier_arrive_copied(bar);
      at.next(layout.stages);
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sm90
}  // namespace deltafuse::moe
