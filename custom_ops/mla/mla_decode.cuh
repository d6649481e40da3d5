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
};

namespace decode {

constexpr int kThreads = 512, kStages = 2, kTile = Cut::kTile, kRows = kDecodeRows;
constexpr int kBlock = kTile * 128;  // bytes of 64 channels of a tile
constexpr int kTileBytes = kBlock * (kLatent + kRotary) / 64;
constexpr int kQueryBlock = kRows * 128;
constexpr int kQueryBytes = kQueryBlock * (kLatent + kRotary) / 64;
constexpr int kWeightBytes = kRows * kTile * 2;  // P^T
constexpr int kRawBytes = kTile * kLatent;       // 8-bit codes of a tile
constexpr int kRegistersFew = 96, kRegistersMany = 160;

struct Small {
  uint64_t full[kStages], empty[kStages], weights_full[2], weights_empty[2];
  float rescale[2][kRows];              // of the leaf's sum before this tile
  float keep[2][kRows], add[2][kRows];  // total = total * keep + leaf * add
  float largest[2][4][kRows], sums[2][4][kRows], leaf_largest[2][kRows];
  float scales[kTile][kLatent / kFloat8Group];
};
constexpr int kSharedBytes = 1024 + kStages * kTileBytes + kQueryBytes + 2 * kWeightBytes + int(sizeof(Small));

}  // namespace decode

#ifdef MLA_SM90A
namespace decode {

__device__ __forceinline__ void zero16(void* p) { *static_cast<uint4*>(p) = uint4{0, 0, 0, 0}; }

// The tokens of one block, counted from the cut's base.
struct Item {
  int begin, end, tiles;
  int leaf_tiles;
};

// -- fetching ---------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void fetch_box(const DecodeKernelArgs& k, const CUtensorMap* map, unsigned char* to,
                                          uint64_t* bar, int column, int64_t b, int64_t token) {
  const View& v = k.a.cache;
  for (int part = 0; part < kTile; part += k.box_rows) {
    int64_t row = v.row(b, token + part);
    if (row < 0) row = -(1 << 30);  // outside: zeros
    ptx::tma_load(to + part * 128, map, bar, column, static_cast<int>(row));
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

template <typename T, CacheType kType>
__device__ void fetch(const DecodeKernelArgs& k, const CUtensorMap* latent_map, const CUtensorMap* rope_map,
                      const Item& item, int64_t base, int64_t b, unsigned char* tiles, unsigned char* raw,
                      Small* small) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  if (kType == CacheType::kSame) {
    if (thread != 0) return;
    for (int i = 0; i < item.tiles; ++i) {
      const int stage = i % kStages;
      if (i >= kStages) ptx::mbar_wait(&small->empty[stage], (i / kStages - 1) & 1);
      ptx::mbar_expect(&small->full[stage], kTileBytes);
      unsigned char* tile = tiles + stage * kTileBytes;
      const int64_t token = base + item.begin + i * kTile;
#pragma unroll 1
      for (int c = 0; c < kLatent / 64; ++c) {
        fetch_box(k, latent_map, tile + c * kBlock, &small->full[stage], c * 64, b, token);
      }
      fetch_box(k, rope_map, tile + kLatent / 64 * kBlock, &small->full[stage], k.rope_column, b, token);
    }
    return;
  }
  // Each warp fetches and converts every fourth token: 32 lanes of 16 codes.
  const View& v = k.a.cache;
  constexpr int kTurns = kTile / 4, kBatch = 4;
  auto start = [&](int tile, int turn) {
    const int at = turn * 4 + warp;
    const int t = item.begin + tile * kTile + at;
    if (tile < item.tiles && t < item.end) {
      const int64_t row = v.row(b, base + t);
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
  for (int i = 0; i < item.tiles; ++i) {
    const int stage = i % kStages;
    if (i >= kStages) ptx::mbar_wait(&small->empty[stage], (i / kStages - 1) & 1);
    unsigned char* tile = tiles + stage * kTileBytes;
    if (thread == 0) {
      ptx::mbar_expect(&small->full[stage], kBlock);
      fetch_box(k, rope_map, tile + kLatent / 64 * kBlock, &small->full[stage], k.rope_column, b,
                base + item.begin + i * kTile);
    }
#pragma unroll 1
    for (int batch = 0; batch < kTurns; batch += kBatch) {
      asm volatile("cp.async.wait_group %0;\n" ::"n"(kTurns / kBatch - 1) : "memory");
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int at = (batch + j) * 4 + warp, t = item.begin + i * kTile + at;
        uint4 out[2] = {};
        if (t < item.end && v.row(b, base + t) >= 0) {
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
template <typename T>
__device__ void load_queries(const DecodeKernelArgs& k, int64_t b, int first_row, unsigned char* q) {
  const int rows = static_cast<int>(k.a.p.seq_len) * k.a.p.num_heads;
  constexpr int kChunks = (kLatent + kRotary) / 8;
  const T* from = static_cast<const T*>(k.a.q) + (b * rows + first_row) * (kLatent + kRotary);
#pragma unroll 6
  for (int i = threadIdx.x; i < kRows * kChunks; i += 128) {
    const int row = i / kChunks, chunk = i % kChunks;
    uint4 x = {};
    if (first_row + row < rows)
      x = *reinterpret_cast<const uint4*>(from + int64_t(row) * (kLatent + kRotary) + chunk * 8);
    *reinterpret_cast<uint4*>(q + chunk / 8 * kQueryBlock + row * 128 + ((chunk % 8) ^ (row % 8)) * 16) = x;
  }
}

template <typename T, CacheType kType>
__device__ void scores(const DecodeKernelArgs& k, const Item& item, const Cut& cut, int64_t b, int first_row,
                       float* stats, unsigned char* tiles, unsigned char* q, unsigned char* weights, Small* small) {
  const Params& p = k.a.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rows = static_cast<int>(p.seq_len) * p.num_heads;
  load_queries<T>(k, b, first_row, q);
  // The keys that each of this thread's 8 columns sees, from the cut's base.
  int low[8], high[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = first_row + i / 2 * 8 + 2 * t + i % 2, s = row / p.num_heads;
    const int64_t position = cut.end - p.seq_len + s;
    high[i] = static_cast<int>((p.causal ? position + 1 : cut.end) - cut.base);
    low[i] = p.window > 0 ? static_cast<int>(position - p.window + 1 - cut.base) : 0;
    if (row >= rows) high[i] = 0;
  }
  ptx::fence_async();
  ptx::bar_sync(1, 128);

  const float factor = p.scale * kLog2e;
  float top[8], sum[8];
  float total_top = -INFINITY, total_sum = 0.0f;  // of head `lane`, in the first warp
  const uint32_t q_address = ptx::shared_address(q);
  int in_leaf = 0;  // tiles
  bool first_leaf = true;
  for (int i = 0; i < item.tiles; ++i) {
    const int stage = i % kStages, buffer = i & 1, tile0 = item.begin + i * kTile;
    unsigned char* tile = tiles + stage * kTileBytes;
    ptx::mbar_wait(&small->full[stage], (i / kStages) & 1);
    if (kType == CacheType::kSame && tile0 + kTile > item.end) {
      // What lies behind the sequence may be anything: zeros, since 0 times NaN is NaN.
      const int from = item.end - tile0;
      for (int j = threadIdx.x; j < (kTile - from) * (kLatent / 8); j += 128) {
        zero16(tile + j % (kLatent / 8) / 8 * kBlock + (from + j / (kLatent / 8)) * 128 + j % 8 * 16);
      }
      ptx::fence_async();
      ptx::bar_sync(1, 128);
    }
    float acc[16];
    const uint32_t tile_address = ptx::shared_address(tile);
    ptx::wgmma_fence();
#pragma unroll
    for (int c = 0; c < (kLatent + kRotary) / 64; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        ptx::wgmma_n32<0, 0>(acc, ptx::descriptor(tile_address + c * kBlock + j * 32),
                             ptx::descriptor(q_address + c * kQueryBlock + j * 32), c + j > 0, T{});
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::keep(acc);

    // acc[4 j + 2 i + e]: key warp * 16 + g + 8 i, column 8 j + 2 t + e.
    float here[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) here[c] = -INFINITY;
#pragma unroll
    for (int x = 0; x < 16; ++x) {
      const int c = x / 4 * 2 + x % 2, key = tile0 + warp * 16 + g + (x & 2) * 4;
      float score = acc[x] * factor;
      const bool seen = key < high[c] && key >= low[c];
      if (p.mask_type != MaskType::kNone && seen) {
        const int row = first_row + x / 4 * 8 + 2 * t + x % 2;
        const float mask = mask_value<T>(p, b, row % p.num_heads, row / p.num_heads, cut.base + key);
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
    if (i >= 2) ptx::mbar_wait(&small->weights_empty[buffer], (i / 2 - 1) & 1);
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
            *reinterpret_cast<float2*>(&small->leaf_largest[buffer][j * 8 + 2 * t]) =
                make_float2(top[2 * j], top[2 * j + 1]);
          }
        }
      }
      ptx::bar_sync(1, 128);
      if (warp == 0) {
        float leaf_sum = small->sums[buffer][0][lane];
#pragma unroll
        for (int w = 1; w < 4; ++w) leaf_sum += small->sums[buffer][w][lane];
        const float leaf_top = small->leaf_largest[buffer][lane];
        const float both = fmaxf(total_top, leaf_top);  // the first time: 0 of nothing and all of the leaf
        const float keep = first_leaf ? 0.0f : ratio(total_top, both), add = ratio(leaf_top, both);
        total_sum = __fmaf_rn(leaf_sum, add, __fmul_rn(total_sum, keep));
        total_top = both;
        small->keep[buffer][lane] = keep;
        small->add[buffer][lane] = add;
      }
      first_leaf = false;
    }
    ptx::fence_async();
    ptx::mbar_arrive(&small->weights_full[buffer]);
  }
  if (warp == 0) {
    stats[lane] = total_top;
    stats[kRows + lane] = total_sum;
  }
}

// -- the weighted sum
// ---------------------------------------------------------------------------------------------------
template <typename T>
__device__ void weighted_sum(const Item& item, float* partial, unsigned char* tiles, unsigned char* weights,
                             Small* small) {
  const int half = threadIdx.x / 128 - 1;  // of the channels
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float leaf[4][16], total[4][16] = {};
  int in_leaf = 0;
  for (int i = 0; i < item.tiles; ++i) {
    const int stage = i % kStages, buffer = i & 1;
    ptx::mbar_wait(&small->weights_full[buffer], (i / 2) & 1);
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
    const uint32_t tile = ptx::shared_address(tiles + stage * kTileBytes) + half * 4 * kBlock;
    const uint32_t w = ptx::shared_address(weights + buffer * kWeightBytes);
#pragma unroll
    for (int m = 0; m < 4; ++m) ptx::keep(leaf[m]);
    ptx::wgmma_fence();
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int j = 0; j < kTile / 16; ++j) {
        ptx::wgmma_n32<1, 0>(leaf[m], ptx::descriptor(tile + m * kBlock + j * 2048), ptx::descriptor(w + j * 32),
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
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    float* out = partial + ((half * 4 + m) * 64 + warp * 16 + g) * kRows + 2 * t;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      *reinterpret_cast<float2*>(out + j * 8) = make_float2(total[m][4 * j], total[m][4 * j + 1]);
      *reinterpret_cast<float2*>(out + 8 * kRows + j * 8) = make_float2(total[m][4 * j + 2], total[m][4 * j + 3]);
    }
  }
}

}  // namespace decode
#endif  // MLA_SM90A

template <typename T, CacheType kType>
__global__ void __launch_bounds__(decode::kThreads, 1)
    decode_kernel(const __grid_constant__ CUtensorMap latent_map, const __grid_constant__ CUtensorMap rope_map,
                  const __grid_constant__ DecodeKernelArgs k) {
#ifdef MLA_SM90A
  using namespace decode;
  extern __shared__ unsigned char unaligned[];
  unsigned char* tiles = unaligned + (1024 - ptx::shared_address(unaligned) % 1024) % 1024;
  unsigned char* q = tiles + kStages * kTileBytes;
  unsigned char* weights = q + kQueryBytes;
  Small* small = reinterpret_cast<Small*>(weights + 2 * kWeightBytes);
  unsigned char* raw = reinterpret_cast<unsigned char*>(small + 1);

  const Params& p = k.a.p;
  const int64_t b = blockIdx.y;
  const int row_block = blockIdx.x % k.row_blocks, index = blockIdx.x / k.row_blocks;
  const Cut cut = Cut::of(k.a.lengths.total(b), p.seq_len, p.window);
  const int parts = k.a.by_section ? cut.sections : cut.leaves;
  const int span = k.a.by_section ? cut.leaf * cut.leaves_per_section : cut.leaf;
  if (index >= parts) {
    ptx::launch_dependents();
    ptx::wait_prior_grid();
    return;
  }
  Item item;
  item.begin = index * span;
  const int n = static_cast<int>(cut.end - cut.base);
  item.end = item.begin + span < n ? item.begin + span : n;
  item.tiles = (item.end - item.begin + kTile - 1) / kTile;
  item.leaf_tiles = cut.leaf / kTile;
  const int64_t at = (b * k.row_blocks + row_block) * k.a.items + index;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbar_init(&small->full[i], kType == CacheType::kSame ? 1 : 129);
      ptx::mbar_init(&small->empty[i], 8);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbar_init(&small->weights_full[i], 128);
      ptx::mbar_init(&small->weights_empty[i], 8);
    }
    ptx::mbar_init_fence();
    ptx::prefetch_map(&latent_map);
    ptx::prefetch_map(&rope_map);
  }
  __syncthreads();
  ptx::launch_dependents();
  ptx::wait_prior_grid();

  const int group = threadIdx.x / 128;
  if (group == 0) {
    ptx::set_registers_less<kRegistersFew>();
    scores<T, kType>(k, item, cut, b, row_block * kRows, k.a.stats + at * 2 * kRows, tiles, q, weights, small);
  } else if (group == 3) {
    ptx::set_registers_less<kRegistersFew>();
    fetch<T, kType>(k, &latent_map, &rope_map, item, cut.base, b, tiles, raw, small);
  } else {
    ptx::set_registers_more<kRegistersMany>();
    weighted_sum<T>(item, k.a.partial + at * kLatent * kRows, tiles, weights, small);
  }
#endif
}

}  // namespace deltafuse::mla
