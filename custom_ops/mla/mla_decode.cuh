// Decode over the cache of latents, sm_90a: one block makes a leaf or a section of one sequence for 32 query rows
// (token and head). Keys are the products' rows and query rows their columns, so that 32 heads fill the tensor cores:
//
//   S^T [64 keys, 32] = tile [64, 576] q^T          one warpgroup, then its softmax
//   O^T [512, 32]    += tile [64, 512]^T P^T        two warpgroups, 256 channels each
//
// A tile of 64 tokens is read from memory once and serves both. The fourth warpgroup fetches: by tensor maps, or, for
// 8-bit caches, by asynchronous copies and a conversion to T.
#pragma once

#include <cuda.h>

#include "mla_device.cuh"
#include "mla_wgmma_sm90a.cuh"

namespace deltafuse::mla {

struct DecodeKernelArgs {
  DecodeArgs a;
  int row_blocks = 0;
  int rope_column = 0;  // of the rotated key in its map
  int box_rows = 64;    // tokens of one fetch
  int once = 0;         // the cache is larger than what the L2 cache can keep: leave that to the sums
};

namespace decode {

constexpr int kThreads = 512, kStages = 2, kTile = Cut::kTile, kRows = kDecodeRows;
constexpr int kBlock = kTile * 128;  // bytes of 64 channels of a tile
constexpr int kTileBytes = kBlock * (kLatent + kRotary) / 64;
constexpr int kQueryBlock = kRows * 128;
constexpr int kQueryBytes = kQueryBlock * (kLatent + kRotary) / 64;
constexpr int kWeightBytes = kRows * kTile * 2;  // P^T
constexpr int kRawBytes = kTile * kLatent;       // 8-bit codes of a tile
constexpr int kChains = 2;                       // sums of the scores' products
constexpr int kFetchRegisters = 64, kScoreRegisters = 144, kSumRegisters = 152;

struct Small {
  uint64_t full[kStages], empty[kStages], weights_full[2], weights_empty[2], q_full, q_empty;
  float rescale[2][kRows];              // of the leaf's sum before this tile
  float keep[2][kRows], add[2][kRows];  // total = total * keep + leaf * add
  float largest[2][4][kRows], sums[2][4][kRows], leaf_largest[kRows];
  float scales[kTile][kLatent / kFloat8Group];
  int64_t mask_row[kRows];
};
constexpr int kSharedBytes = 1024 + kStages * kTileBytes + kQueryBytes + 2 * kWeightBytes + int(sizeof(Small));

}  // namespace decode

#ifdef MLA_SM90A
namespace decode {

// Operands in shared memory start at addresses that all lanes share; said so, the compiler keeps them in uniform
// registers.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

__device__ __forceinline__ void zero16(void* p) { *static_cast<uint4*>(p) = uint4{0, 0, 0, 0}; }

// What a block does at a time: one part of a sequence for 32 query rows.
struct Item {
  int64_t at;  // its place among the partial sums
  int b, base, last, begin, end, tiles, leaf_tiles, first_row;

  // `work` counts row blocks first, then parts.
  __device__ Item(const DecodeKernelArgs& k, const Part& part, int work) {
    const int row_block = k.row_blocks == 1 ? 0 : work % k.row_blocks;
    b = part.b, base = part.base, last = part.last, begin = part.begin, end = part.end, leaf_tiles = part.leaf_tiles;
    tiles = (end - begin + kTile - 1) / kTile;
    first_row = row_block * kRows;
    at = (int64_t(b) * k.row_blocks + row_block) * k.a.items + part.index;
  }
};

// A block's share of the work: neighbours, so that its next part is mostly of the same sequence and needs no other
// queries; but where a part is read for several row blocks, they run side by side and share it in the L2 cache.
struct Share {
  int from, to, step;
  Part first;

  __device__ explicit Share(const DecodeKernelArgs& k) {
    const int block = blockIdx.x, blocks = gridDim.x;
    first = k.a.parts[1 + block / k.row_blocks];  // on its way together with the number of parts
    const int all = k.a.parts->b * k.row_blocks;
    if (k.row_blocks > 1 || all <= blocks) {
      from = block, to = all, step = blocks;
      return;
    }
    from = static_cast<int>(int64_t(block) * all / blocks), to = static_cast<int>(int64_t(block + 1) * all / blocks);
    step = 1;
    first = k.a.parts[1 + from];
  }
};

// The next part is looked up before this one is begun. body(item, fresh, next part): fresh where other queries are
// needed than before.
template <typename Body>
__device__ __forceinline__ void for_each_item(const DecodeKernelArgs& k, const Share& share, Body body) {
  Part part = share.first;
  bool fresh = true;
  for (int work = share.from; work < share.to; work += share.step) {
    const int next = work + share.step < share.to ? work + share.step : work;
    const Part next_part = k.a.parts[1 + (k.row_blocks == 1 ? next : next / k.row_blocks)];
    body(Item(k, part, work), fresh, next_part);
    fresh = k.row_blocks > 1 || next_part.b != part.b;
    part = next_part;
  }
}

// -- fetching ---------------------------------------------------------------------------------------------------------
// The place of a box of tokens in the tensor maps; outside of them, so that zeros come, where its block id is wrong.
__device__ __forceinline__ int box_row(const DecodeKernelArgs& k, const Item& item, int token) {
  const View& v = k.a.cache;
  if (!v.block_table) return item.b * static_cast<int>(v.batch_rows) + token;
  const int64_t row = v.row(item.b, token);
  return row < 0 ? -(1 << 30) : static_cast<int>(row);
}

// What lies behind a sequence's rows are the next one's, or zeros: columns of the products that nobody looks at.
__device__ __forceinline__ void fetch_queries(const DecodeKernelArgs& k, const CUtensorMap* map, const Item& item,
                                              int turn, unsigned char* q, Small* small) {
  const int row = item.b * static_cast<int>(k.a.p.seq_len) * k.a.p.num_heads + item.first_row;
  if (turn > 0) ptx::mbar_wait(&small->q_empty, (turn - 1) & 1);
  ptx::mbar_expect(&small->q_full, kQueryBytes);
#pragma unroll 1
  for (int c = 0; c < (kLatent + kRotary) / 64; ++c) {
    ptx::tma_load(q + c * kQueryBlock, map, &small->q_full, c * 64, row);
  }
}

__device__ __forceinline__ void cp_async(void* shared, const void* global, int bytes) {
  if (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(ptx::shared_address(shared)), "l"(global)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(ptx::shared_address(shared)), "l"(global)
                 : "memory");
  }
}

// 16 codes as T, times a scale (float8).
template <typename T, CacheType kType>
__device__ __forceinline__ void convert(const uint4& codes, float scale, uint4 (&out)[2]) {
  const uint32_t* in = reinterpret_cast<const uint32_t*>(&codes);
  uint32_t* to = reinterpret_cast<uint32_t*>(out);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float x[4];
    if (kType == CacheType::kInt8) {
      const uint32_t shifted = in[i] ^ 0x80808080u;  // 0 to 255
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[j] = __uint_as_float(__byte_perm(shifted, 0x4B000000u, 0x7540 + j)) - 8388736.0f;
      }
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const __half2_raw h =
            __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(in[i] >> (16 * j)), __NV_E4M3);
        const float2 f = __half22float2(__half2(h));
        x[2 * j] = f.x * scale, x[2 * j + 1] = f.y * scale;
      }
    }
    to[2 * i] = pack(x[0], x[1], T{});
    to[2 * i + 1] = pack(x[2], x[3], T{});
  }
}

template <typename T, CacheType kType, typename BeforeFirst, typename AfterFirst>
__device__ void fetch(const DecodeKernelArgs& k, const CUtensorMap* latent_map, const CUtensorMap* rope_map,
                      const Item& item, int& count, unsigned char* tiles, unsigned char* raw, Small* small,
                      BeforeFirst before_first, AfterFirst after_first) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  if (kType == CacheType::kSame) {
    const uint64_t policy = k.once ? ptx::evict_first() : ptx::evict_normal();
    for (int i = 0; i < item.tiles; ++i, ++count) {
      const int stage = count % kStages;
      if (count >= kStages) ptx::mbar_wait(&small->empty[stage], (count / kStages - 1) & 1);
      ptx::mbar_expect(&small->full[stage], kTileBytes);
      unsigned char* tile = tiles + stage * kTileBytes;
      if (i == 0) before_first();
      for (int part = 0; part < kTile; part += k.box_rows) {
        const int row = box_row(k, item, item.base + item.begin + i * kTile + part);
        unsigned char* to = tile + part * 128;
#pragma unroll
        for (int c = 0; c < kLatent / 64; ++c) {
          ptx::tma_load(to + c * kBlock, latent_map, &small->full[stage], c * 64, row, policy);
        }
        ptx::tma_load(to + kLatent / 64 * kBlock, rope_map, &small->full[stage], k.rope_column, row, policy);
      }
      if (i == 0) after_first();
    }
    return;
  }
  // Each warp fetches and converts every fourth token: 32 lanes of 16 codes.
  const View& v = k.a.cache;
  const int64_t first_row = item.b * v.batch_rows + item.base;  // not paged
  constexpr int kTurns = kTile / 4, kBatch = 4;
  auto start = [&](int tile, int turn) {
    const int at = turn * 4 + warp;
    const int t = item.begin + tile * kTile + at;
    if (tile < item.tiles && t < item.end) {
      const int64_t row = v.block_table ? v.row(item.b, item.base + t) : first_row + t;
      if (row >= 0) {
        cp_async(raw + at * kLatent + lane * 16, static_cast<const uint8_t*>(v.latent) + row * v.latent_row + lane * 16,
                 16);
        if (kType == CacheType::kFloat8 && lane < kLatent / kFloat8Group) {
          cp_async(&small->scales[at][lane], v.scale + row * (kLatent / kFloat8Group) + lane, 4);
        }
      }
    }
    if (turn % kBatch == kBatch - 1) asm volatile("cp.async.commit_group;\n" ::: "memory");
  };
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) start(0, turn);
#pragma unroll 1
  for (int i = 0; i < item.tiles; ++i, ++count) {
    const int stage = count % kStages;
    if (count >= kStages) ptx::mbar_wait(&small->empty[stage], (count / kStages - 1) & 1);
    unsigned char* tile = tiles + stage * kTileBytes;
    if (thread == 0) {
      ptx::mbar_expect(&small->full[stage], kBlock);
      if (i == 0) before_first();
      for (int part = 0; part < kTile; part += k.box_rows) {
        ptx::tma_load(tile + kLatent / 64 * kBlock + part * 128, rope_map, &small->full[stage], k.rope_column,
                      box_row(k, item, item.base + item.begin + i * kTile + part));
      }
      if (i == 0) after_first();
    }
#pragma unroll 1
    for (int batch = 0; batch < kTurns; batch += kBatch) {
      asm volatile("cp.async.wait_group %0;\n" ::"n"(kTurns / kBatch - 1) : "memory");
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int at = (batch + j) * 4 + warp, t = item.begin + i * kTile + at;
        uint4 out[2] = {};
        if (t < item.end && (!v.block_table || v.row(item.b, item.base + t) >= 0)) {
          const uint4 codes = *reinterpret_cast<const uint4*>(raw + at * kLatent + lane * 16);
          convert<T, kType>(codes, kType == CacheType::kFloat8 ? small->scales[at][lane / 8] : 1.0f, out);
        }
        unsigned char* to = tile + lane / 4 * kBlock + at * 128;
        *reinterpret_cast<uint4*>(to + ((lane % 4 * 2) ^ (at % 8)) * 16) = out[0];
        *reinterpret_cast<uint4*>(to + ((lane % 4 * 2 + 1) ^ (at % 8)) * 16) = out[1];
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kBatch; ++j) start(i + 1, batch + j);
    }
    ptx::fence_async();
    ptx::mbar_arrive(&small->full[stage]);
  }
  asm volatile("cp.async.wait_group 0;\n" ::: "memory");
}

// -- scores and softmax
// -------------------------------------------------------------------------------------------------
template <typename T, CacheType kType, bool kMask>
__device__ void scores(const DecodeKernelArgs& k, const Item& item, const Part& next, int turn, int& count,
                       unsigned char* tiles, unsigned char* q, unsigned char* weights, Small* small) {
  const Params& p = k.a.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rows = static_cast<int>(p.seq_len) * p.num_heads;
  const int first_row = item.first_row;
  if (kMask && threadIdx.x < kRows) {
    const int mask_row = first_row + threadIdx.x;
    small->mask_row[threadIdx.x] = item.b * p.mask_strides[0] + mask_row % p.num_heads * p.mask_strides[1] +
                                   mask_row / p.num_heads * p.mask_strides[2] + item.base * p.mask_strides[3];
  }
  // The keys that each of this thread's 8 columns sees, from the cut's base.
  int high[8];
  const int reach = p.window > 0 ? p.window : 1 << 30;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = first_row + i / 2 * 8 + 2 * t + i % 2, s = p.seq_len == 1 ? 0 : row / p.num_heads;
    high[i] = (p.causal ? item.last - static_cast<int>(p.seq_len) + s + 1 : item.last) - item.base;
    if (row >= rows) high[i] = 0;
  }
  if (kMask) ptx::bar_sync(1, 128);

  const float factor = p.scale * kLog2e;
  float top[8], sum[8];
  // The first warp's lanes hold the totals of one row each. A leaf's sum joins them when the next tile's barrier, or
  // the last one, has shown what the other warps found.
  float total_top = -INFINITY, total_sum = 0.0f, keep = 0.0f, add = 0.0f;
  int summed = -1;
  auto join_sum = [&]() {
    if (warp != 0 || summed < 0) return;
    float leaf_sum = small->sums[summed][0][lane];
#pragma unroll
    for (int w = 1; w < 4; ++w) leaf_sum += small->sums[summed][w][lane];
    total_sum = __fmaf_rn(leaf_sum, add, __fmul_rn(total_sum, keep));
    summed = -1;
  };
  const uint32_t q_operand = uniform(static_cast<uint32_t>(ptx::descriptor(ptx::shared_address(q))));
  int in_leaf = 0;  // tiles
  bool first_leaf = true;
  ptx::mbar_wait(&small->q_full, turn & 1);
  for (int i = 0; i < item.tiles; ++i, ++count) {
    const int stage = count % kStages, buffer = count & 1, tile0 = item.begin + i * kTile;
    unsigned char* tile = tiles + stage * kTileBytes;
    ptx::mbar_wait(&small->full[stage], (count / kStages) & 1);
    if (kType == CacheType::kSame && tile0 + kTile > item.end) {
      // What lies behind the sequence may be anything: zeros, since 0 times NaN is NaN.
      const int from = item.end - tile0;
      for (int j = threadIdx.x; j < (kTile - from) * (kLatent / 8); j += 128) {
        zero16(tile + j % (kLatent / 8) / 8 * kBlock + (from + j / (kLatent / 8)) * 128 + j % 8 * 16);
      }
      ptx::fence_async();
      ptx::bar_sync(1, 128);
    }
    // Several sums, so that products need not wait for one another.
    float acc[16], others[kChains - 1][16];
    const uint32_t tile_operand = uniform(static_cast<uint32_t>(ptx::descriptor(ptx::shared_address(tile))));
    ptx::wgmma_fence();
#pragma unroll
    for (int c = 0; c < (kLatent + kRotary) / 64; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        ptx::wgmma_n32<0, 0>(j % kChains == 0 ? acc : others[j % kChains - 1],
                             ptx::further(tile_operand, c * kBlock + j * 32),
                             ptx::further(q_operand, c * kQueryBlock + j * 32), c * 4 + j >= kChains, T{});
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::keep(acc);
#pragma unroll
    for (int j = 0; j < kChains - 1; ++j) ptx::keep(others[j]);
#pragma unroll
    for (int j = 0; j < kChains - 1; ++j) {
#pragma unroll
      for (int x = 0; x < 16; ++x) acc[x] += others[j][x];
    }

    if (i == item.tiles - 1 && lane == 0 && (k.row_blocks > 1 || next.b != item.b)) ptx::mbar_arrive(&small->q_empty);
    // acc[4 j + 2 i + e]: key warp * 16 + g + 8 i, column 8 j + 2 t + e.
    float here[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) here[c] = -INFINITY;
#pragma unroll
    for (int x = 0; x < 16; ++x) {
      const int c = x / 4 * 2 + x % 2, key = tile0 + warp * 16 + g + (x & 2) * 4;
      float score = acc[x] * factor;
      const bool seen = key < high[c] && key >= high[c] - reach;
      if (kMask && seen) {
        const int64_t mask_at = small->mask_row[x / 4 * 8 + 2 * t + x % 2] + key * p.mask_strides[3];
        const float mask = mask_value<T>(p, mask_at);
        score += kLog2e * mask;
        if (mask != -INFINITY) score = fmaxf(score, -3.0e38f);  // a lowest finite number does not mask out
      }
      acc[x] = seen ? score : -INFINITY;
      here[c] = fmaxf(here[c], acc[x]);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) here[c] = fmaxf(here[c], __shfl_xor_sync(~0u, here[c], step));
    }
    if (g == 0) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        *reinterpret_cast<float2*>(&small->largest[buffer][warp][j * 8 + 2 * t]) =
            make_float2(here[2 * j], here[2 * j + 1]);
      }
    }
    ptx::bar_sync(1, 128);
    join_sum();
    float scale_by[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2 m = *reinterpret_cast<const float2*>(&small->largest[buffer][0][j * 8 + 2 * t]);
#pragma unroll
      for (int w = 1; w < 4; ++w) {
        const float2 n = *reinterpret_cast<const float2*>(&small->largest[buffer][w][j * 8 + 2 * t]);
        m.x = fmaxf(m.x, n.x), m.y = fmaxf(m.y, n.y);
      }
      here[2 * j] = m.x, here[2 * j + 1] = m.y;
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      if (in_leaf > 0) {
        here[c] = fmaxf(here[c], top[c]);
        scale_by[c] = ratio(top[c], here[c]);
        sum[c] *= scale_by[c];
      } else {
        scale_by[c] = 1.0f;
        sum[c] = 0.0f;
      }
      top[c] = here[c];
      if (here[c] == -INFINITY) here[c] = 0.0f;
    }
#pragma unroll
    for (int x = 0; x < 16; ++x) {
      const int c = x / 4 * 2 + x % 2;
      acc[x] = ptx::exp2(acc[x] - here[c]);
      sum[c] += acc[x];
    }
    if (count >= 2) ptx::mbar_wait(&small->weights_empty[buffer], (count / 2 - 1) & 1);
    const uint32_t to = ptx::shared_address(weights + buffer * kWeightBytes) + lane * 128;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::stmatrix_trans(to + ((warp * 2 + half) ^ (lane % 8)) * 16, pack(acc[2 * half], acc[2 * half + 1], T{}),
                          pack(acc[4 + 2 * half], acc[5 + 2 * half], T{}),
                          pack(acc[8 + 2 * half], acc[9 + 2 * half], T{}),
                          pack(acc[12 + 2 * half], acc[13 + 2 * half], T{}));
    }
    if (warp == 0 && g == 0) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        *reinterpret_cast<float2*>(&small->rescale[buffer][j * 8 + 2 * t]) =
            make_float2(scale_by[2 * j], scale_by[2 * j + 1]);
      }
    }
    ++in_leaf;
    if (in_leaf == item.leaf_tiles || i == item.tiles - 1) {  // the leaf's end: how it joins the total
      in_leaf = 0;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum[c] += __shfl_xor_sync(~0u, sum[c], step);
      }
      if (g == 0) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          *reinterpret_cast<float2*>(&small->sums[buffer][warp][j * 8 + 2 * t]) =
              make_float2(sum[2 * j], sum[2 * j + 1]);
          if (warp == 0) {
            *reinterpret_cast<float2*>(&small->leaf_largest[j * 8 + 2 * t]) = make_float2(top[2 * j], top[2 * j + 1]);
          }
        }
      }
      if (warp == 0) {  // lane: the query row
        __syncwarp();
        const float leaf_top = small->leaf_largest[lane], both = fmaxf(total_top, leaf_top);
        keep = first_leaf ? 0.0f : ratio(total_top, both);  // the first time: 0 of nothing and all of the leaf
        add = ratio(leaf_top, both);
        total_top = both;
        small->keep[buffer][lane] = keep;
        small->add[buffer][lane] = add;
      }
      first_leaf = false;
      summed = buffer;
    }
    ptx::fence_async();
    ptx::mbar_arrive(&small->weights_full[buffer]);
  }
  ptx::bar_sync(1, 128);
  join_sum();
  if (warp == 0) {
    float* stats = k.a.stats + item.at * 2 * kRows;
    stats[lane] = total_top;
    stats[kRows + lane] = total_sum;
  }
}

// -- the weighted sum
// ---------------------------------------------------------------------------------------------------
template <typename T>
__device__ void weighted_sum(const DecodeKernelArgs& k, const Item& item, int& count, unsigned char* tiles,
                             unsigned char* weights, Small* small) {
  const int half = threadIdx.x / 128 - 1;  // of the channels
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, t = lane % 4;
  float leaf[4][16], total[4][16] = {};
  int in_leaf = 0;
  for (int i = 0; i < item.tiles; ++i, ++count) {
    const int stage = count % kStages, buffer = count & 1;
    ptx::mbar_wait(&small->weights_full[buffer], (count / 2) & 1);
    if (in_leaf > 0) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 r = *reinterpret_cast<const float2*>(&small->rescale[buffer][j * 8 + 2 * t]);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          leaf[m][4 * j] *= r.x, leaf[m][4 * j + 1] *= r.y, leaf[m][4 * j + 2] *= r.x, leaf[m][4 * j + 3] *= r.y;
        }
      }
    }
    const uint32_t tile = uniform(
        static_cast<uint32_t>(ptx::descriptor(ptx::shared_address(tiles + stage * kTileBytes) + half * 4 * kBlock)));
    const uint32_t w =
        uniform(static_cast<uint32_t>(ptx::descriptor(ptx::shared_address(weights + buffer * kWeightBytes))));
#pragma unroll
    for (int m = 0; m < 4; ++m) ptx::keep(leaf[m]);
    ptx::wgmma_fence();
#pragma unroll
    for (int j = 0; j < kTile / 16; ++j) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        ptx::wgmma_n32<1, 0>(leaf[m], ptx::further(tile, m * kBlock + j * 2048), ptx::further(w, j * 32),
                             in_leaf + j > 0, T{});
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < 4; ++m) ptx::keep(leaf[m]);
    if (lane == 0) ptx::mbar_arrive(&small->empty[stage]);
    ++in_leaf;
    if (in_leaf == item.leaf_tiles || i == item.tiles - 1) {
      in_leaf = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 keep = *reinterpret_cast<const float2*>(&small->keep[buffer][j * 8 + 2 * t]);
        const float2 add = *reinterpret_cast<const float2*>(&small->add[buffer][j * 8 + 2 * t]);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            total[m][4 * j + x] = __fmaf_rn(leaf[m][4 * j + x], x % 2 ? add.y : add.x,
                                            __fmul_rn(total[m][4 * j + x], x % 2 ? keep.y : keep.x));
          }
        }
      }
    }
    __syncwarp();
    if (lane == 0) ptx::mbar_arrive(&small->weights_empty[buffer]);
  }
  // In the order of these registers: whole lines are written.
  float4* out = reinterpret_cast<float4*>(k.a.partial) + item.at * (kLatent * kRows / 4) + lane;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      out[(((half * 4 + m) * 4 + warp) * 4 + j) * 32] =
          make_float4(total[m][4 * j], total[m][4 * j + 1], total[m][4 * j + 2], total[m][4 * j + 3]);
    }
  }
}

}  // namespace decode
#endif  // MLA_SM90A

template <typename T, CacheType kType, bool kMask>
__global__ void __launch_bounds__(decode::kThreads, 1)
    decode_kernel(const __grid_constant__ CUtensorMap latent_map, const __grid_constant__ CUtensorMap rope_map,
                  const __grid_constant__ CUtensorMap q_map, const __grid_constant__ DecodeKernelArgs k) {
#ifdef MLA_SM90A
  using namespace decode;
  extern __shared__ unsigned char unaligned[];
  unsigned char* tiles = unaligned + (1024 - ptx::shared_address(unaligned) % 1024) % 1024;
  unsigned char* q = tiles + kStages * kTileBytes;
  unsigned char* weights = q + kQueryBytes;
  Small* small = reinterpret_cast<Small*>(weights + 2 * kWeightBytes);
  unsigned char* raw = reinterpret_cast<unsigned char*>(small + 1);

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbar_init(&small->full[i], kType == CacheType::kSame ? 1 : 129);
      ptx::mbar_init(&small->empty[i], 8);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbar_init(&small->weights_full[i], 128);
      ptx::mbar_init(&small->weights_empty[i], 8);
    }
    ptx::mbar_init(&small->q_full, 1);
    ptx::mbar_init(&small->q_empty, 4);
    ptx::mbar_init_fence();
    ptx::prefetch_map(&q_map);
    ptx::prefetch_map(&latent_map);
    ptx::prefetch_map(&rope_map);
  }
  __syncthreads();
  ptx::launch_dependents();
  ptx::wait_prior_grid();

  // Tiles of the next item are fetched while this one's sums are written.
  const Share share(k);
  const int group = threadIdx.x / 128;
  int count = 0, turn = 0;  // tiles, and times that queries came
  if (group == 0) {
    ptx::set_registers_more<kScoreRegisters>();
    for_each_item(k, share, [&](const Item& item, bool fresh, const Part& next) {
      if (fresh) ++turn;
      scores<T, kType, kMask>(k, item, next, turn - 1, count, tiles, q, weights, small);
    });
  } else if (group == 3) {
    ptx::set_registers_less<kFetchRegisters>();
    if (kType == CacheType::kSame && threadIdx.x % 128 != 0) return;
    for_each_item(k, share, [&](const Item& item, bool fresh, const Part&) {
      // The first queries come before the first tile; later ones wait for the last products that take the ones before.
      fetch<T, kType>(
          k, &latent_map, &rope_map, item, count, tiles, raw, small,
          [&] {
            if (turn == 0) fetch_queries(k, &q_map, item, turn, q, small);
          },
          [&] {
            if (turn > 0 && fresh) fetch_queries(k, &q_map, item, turn, q, small);
            if (fresh) ++turn;
          });
    });
  } else {
    ptx::set_registers_more<kSumRegisters>();
    for_each_item(k, share,
                  [&](const Item& item, bool, const Part&) { weighted_sum<T>(k, item, count, tiles, weights, small); });
  }
#endif
}

}  // namespace deltafuse::mla
