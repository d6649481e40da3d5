// Decode's shared memory, its share of the work, and the warpgroup that fetches: by tensor maps, or, for 8-bit caches,
// by asynchronous copies and a conversion to T. See mla_decode.cuh.
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

}  // namespace decode
#endif  // MLA_SM90A

}  // namespace deltafuse::mla
