// Decode over the cache of latents, sm_90a: one block makes a leaf or a section of one sequence for 32 query rows
// (token and head). Keys are the products' rows and query rows their columns, so that 32 heads fill the tensor cores:
//
//   S^T [64 keys, 32] = tile [64, 576] q^T          one warpgroup, then its softmax
//   O^T [512, 32]    += tile [64, 512]^T P^T        two warpgroups, 256 channels each
//
// A tile of 64 tokens is read from memory once and serves both. The fourth warpgroup fetches: by tensor maps, or, for
// 8-bit caches, by asynchronous copies and a conversion to T.
#pragma once

#include "mla_decode_fetch.cuh"

namespace deltafuse::mla {

#ifdef MLA_SM90A
namespace decode {

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
