// The experts' products on Hopper: what a block keeps in shared memory, and the warps that fetch. A tile is 256 weight
// rows by the tokens of one expert; its weights come by bulk copies, its tokens row by row from where they lie.
#pragma once

#include "moe_fragment.cuh"
#include "moe_wgmma.cuh"

namespace deltafuse::moe {
namespace sm90 {

constexpr int kConsumers = 256;
constexpr int kProducers = 128;  // the registers of whole warpgroups can be dealt out anew
constexpr int kThreads = kConsumers + kProducers;
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
  int right, half, scales, bytes;  // offsets in a stage, of the tokens' second half from their first; its size
  int stages;
};
inline StageLayout stage_layout(const GemmArgs& a, int shared_bytes, int fixed_bytes) {
  const Packed& w = a.weights;
  StageLayout s;
  s.right = (w.stage_bytes() + 1023) / 1024 * 1024;
  s.half = tile_columns(w.pack, a.tile_tokens) * 128;
  s.scales = s.right + s.half * right_halves(w.pack);
  s.bytes = s.scales + (w.pack == Pack::kFloat8 ? 1024 : 0);
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
  int32_t again;  // other tiles read the same weights
};

struct Shared {
  uint64_t full[kMostStages], empty[kMostStages];
  uint64_t ready[kSlots], free[kSlots];
  uint64_t begun;  // the first warpgroup has had a stage
  Work work[kSlots];
  Work next;
  uint32_t index;  // its number
};

__device__ __forceinline__ void init_barriers(Shared& s, int stages) {
  for (int i = 0; i < stages; ++i) {
    barrier_init(&s.full[i], kProducers + 1);
    barrier_init(&s.empty[i], kConsumers / 32);
  }
  for (int i = 0; i < kSlots; ++i) {
    barrier_init(&s.ready[i], 1);
    barrier_init(&s.free[i], kConsumers / 32);
  }
  barrier_init(&s.begun, kConsumers / 64);
  barrier_init_fence();
}

struct Pipeline {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};

// The tile of a number. The shared expert's tiles, which read little, are spread over the experts', which read much.
__device__ __forceinline__ Work locate(const GemmArgs& a, uint32_t index) {
  Work work{};
  const uint32_t own = static_cast<uint32_t>(*a.num_tiles) * a.weights.tiles;
  const int shared_tiles = a.shared.count ? (a.shared_rows + a.tile_tokens - 1) / a.tile_tokens : 0;
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
    const int last = *a.num_tiles - 1;  // an expert's tiles are neighbours
    work.again = (token_tile > 0 && a.tiles[token_tile - 1].expert == expert) ||
                 (token_tile < last && a.tiles[token_tile + 1].expert == expert);
  }
  work.weights = w.data + expert * w.expert_bytes() + work.row_tile * w.tile_bytes();
  if (w.multiplier) work.factor = w.multiplier[expert];
  return work;
}

// The four warps that fetch. A thread copies one 16-byte chunk of every sixteenth token.
template <Pack P>
__device__ __forceinline__ void produce(const GemmArgs& a, const StageLayout& layout, uint32_t base, Shared& shared) {
  constexpr int kHalves = right_halves(P), kRows = most_tokens(P) / 16;
  const int thread = threadIdx.x - kConsumers, chunk = thread % 8, row0 = thread / 8;
  const uint32_t stage_bytes = a.weights.stage_bytes();
  const uint32_t to0 = layout.right + row0 * 128 + ((chunk ^ (row0 & 7)) * 16);
  const unsigned char* x = static_cast<const unsigned char*>(a.x);
  const uint32_t stride = static_cast<uint32_t>(a.x_stride / 16);
  const int chunks = a.x_cols * (P == Pack::kFloat8 ? 1 : 2) / 16;  // of a row
  Pipeline at;
  if (thread == 0) shared.index = blockIdx.x, shared.next = locate(a, blockIdx.x);
  for (int turn = 0;; ++turn) {
    const int slot = turn % kSlots;
    if (thread == 0) {
      barrier_wait(&shared.free[slot], (turn / kSlots & 1) ^ 1);
      shared.work[slot] = shared.next;
      barrier_arrive(&shared.ready[slot]);
    }
    named_barrier(2, kProducers);
    const Work& work = shared.work[slot];  // read again and again: registers are few
    if (work.count == 0) break;
    auto source = [&](int r) { return work.gathered ? a.rows[work.x_start + r] : work.x_start + r; };
    uint32_t from[kRows];  // in 16 bytes
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      from[i] = row0 + 16 * i < work.count ? static_cast<uint32_t>(source(row0 + 16 * i)) * stride + chunk : 0;
    }
    // Of eight threads with the same rows each copies every eighth row's scale: a row of x_blocks beside a row of
    // x_blocks * 128 bytes.
    uint32_t scales[2] = {0, 0};
    if constexpr (P == Pack::kFloat8) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i % 8 == chunk) scales[i / 8] = from[i] / 8;
      }
    }
    const int rows = (work.count - row0 + 15) / 16;  // this thread's
    for (int k = 0; k < work.stages; ++k) {
      barrier_wait(&shared.empty[at.stage], at.phase ^ 1);
      const uint32_t stage = base + at.stage * layout.bytes;
      uint64_t* bar = &shared.full[at.stage];
      if (thread == 0) {
        barrier_expect(bar, stage_bytes);
        bulk_copy(stage, work.weights + int64_t(k) * stage_bytes, stage_bytes, bar,
                  a.tuning.keep_weights || work.again ? evict_normal_policy() : evict_first_policy());
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int block = k * kHalves + half;
        const uint32_t bytes = block * 8 + chunk < chunks ? 16 : 0;
        const unsigned char* block_from = x + (bytes ? block * 128 : 0);
        const uint32_t to = stage + to0 + half * layout.half;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (i < rows) copy16(to + i * 2048, block_from + uint64_t(from[i]) * 16, bytes);
        }
      }
      if constexpr (P == Pack::kFloat8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int r = chunk + 8 * i;
          if (r < rows) copy4(stage + layout.scales + (row0 + 16 * r) * 4, a.x_scale + scales[i] + k);
        }
      }
      barrier_arrive_copied(bar);
      at.next(layout.stages);
      if (thread == 0) {  // late enough to leave tiles to others, early enough not to wait
        if (k == max(work.stages - 4, 0)) {
          shared.index = a.counter ? gridDim.x + atomicAdd(a.counter, 1u) : shared.index + gridDim.x;
        }
        if (k == max(work.stages - 2, 0)) shared.next = locate(a, shared.index);
      }
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sm90
}  // namespace deltafuse::moe
