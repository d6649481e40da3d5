// Decode's first warpgroup: scores of a tile and their softmax. See mla_decode.cuh.
#pragma once

#include "mla_decode_parts.cuh"

namespace deltafuse::mla {

#ifdef MLA_SM90A
namespace decode {

struct Largest {
  __device__ static __forceinline__ float of(float x, float y) { return fmaxf(x, y); }
};
struct Sum {
  __device__ static __forceinline__ float of(float x, float y) { return x + y; }
};

// One number of each of C columns in every lane becomes, over the 8 lanes that hold the same columns, C / 8 finished
// columns a lane: those from lane / 4 * (C / 8) on, left in x[0] on.
template <typename Of, int C, int kStep = 16>
__device__ __forceinline__ void join_lanes(float (&x)[C]) {
  constexpr int kLeft = C * kStep / 32;
  const bool upper = threadIdx.x & kStep;
#pragma unroll
  for (int i = 0; i < kLeft; ++i) {
    const float mine = upper ? x[i + kLeft] : x[i], other = upper ? x[i] : x[i + kLeft];
    x[i] = Of::of(mine, __shfl_xor_sync(~0u, other, kStep));
  }
  if constexpr (kStep > 4) join_lanes<Of, C, kStep / 2>(x);
}

template <typename T, int kTransA>
__device__ __forceinline__ void product(float (&d)[16], uint64_t a, uint64_t b, bool add) {
  ptx::wgmma_n32<kTransA, 0>(d, a, b, add, T{});
}
template <typename T, int kTransA>
__device__ __forceinline__ void product(float (&d)[32], uint64_t a, uint64_t b, bool add) {
  ptx::wgmma_n64<kTransA, 0>(d, a, b, add, T{});
}

// What every score of a tile goes through before the softmax: acc[4 j + 2 i + e] is key `tile0` + warp * 16 + lane / 4
// + 8 i, query row 8 j + 2 (lane % 4) + e.
template <typename T, bool kMask, int N, typename Small>
__device__ __forceinline__ void mask_scores(const DecodeKernelArgs& k, float (&acc)[N], int tile0, int warp,
                                            const Small* small) {
  const int lane = threadIdx.x % 32, reach = k.window > 0 ? k.window : 1 << 30;
#pragma unroll
  for (int x = 0; x < N; ++x) {
    const int column = x / 4 * 8 + 2 * (lane % 4) + x % 2, key = tile0 + warp * 16 + lane / 4 + (x & 2) * 4;
    const int high = small->high[column];
    const bool seen = key < high && key >= high - reach;
    float score = acc[x];
    if (kMask && seen) {
      const float mask = mask_value<T>(k, small->mask_row[column] + key * k.mask_strides[3]);
      score += kLog2e * mask;
      if (mask != -INFINITY) score = fmaxf(score, -3.0e38f);  // a lowest finite number does not mask out
    }
    acc[x] = seen ? score : -INFINITY;
  }
}

template <typename T, CacheType kType, bool kMask, int kRows, typename Small>
__device__ void scores(const DecodeKernelArgs& k, unsigned char* shared, Small* small) {
  using S = Shape<kType, kRows>;
  constexpr int kValues = kRows / 2, kColumns = kRows / 4, kLaneRows = kRows / 32;
  constexpr int kChains =
      kRows == 32 && !kMask ? 2 : 1;  // sums of the products, so that these need not wait for one another
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  const float factor = k.scale * kLog2e;
  const uint32_t q_operand = operand(shared + S::kQuery);
  Feed<Small> feed{small};
  Ring<S::kSlots> slots;
  Ring<kRopeSlots> ropes;
  int count = 0, turn = 0;  // tiles, and times that queries came

  while (const Item* item = feed.next()) {
    const int seq_len = k.seq_len, length = item->last - item->base;
    const int tiles = item->tiles, section_tiles = item->section;
    if (threadIdx.x < kRows) {
      const int row = item->first_row + threadIdx.x, s = seq_len == 1 ? 0 : min(row / k.num_heads, seq_len - 1);
      small->high[threadIdx.x] = k.causal ? length - seq_len + s + 1 : length;
      if (kMask) {
        small->mask_row[threadIdx.x] = item->b * k.mask_strides[0] + row % k.num_heads * k.mask_strides[1] +
                                       s * k.mask_strides[2] + item->base * k.mask_strides[3];
      }
    }
    ptx::bar_sync(1, 128);
    // Keys that all rows see.
    const int open_from = k.window > 0 ? length - k.window : 0, open_to = k.causal ? length - seq_len + 1 : length;

    // The first warp's lanes hold the totals of a row or two each. A tile's sum joins them when the next tile's
    // barrier, or the last one, has shown what the other warps found.
    Total section[kLaneRows], chapter[kLaneRows];
    Factors by_tile[kLaneRows], by_section[kLaneRows];
    bool section_ended = false;
    int summed = -1, in_section = 0;
    auto join_sums = [&] {
      if (warp != 0 || summed < 0) return;
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        const float4 s = *reinterpret_cast<const float4*>(small->sums[summed][r * 32 + lane]);
        section[r].join(s.x + s.y + s.z + s.w, by_tile[r]);
        if (section_ended) chapter[r].join(section[r].sum, by_section[r]), section[r] = Total{};
      }
    };
    if (item->fresh) ptx::mbar_wait(small->q_full, turn++ & 1);

#pragma unroll 1
    for (int i = 0; i < tiles; ++i, ++count) {
      const int buffer = count & 1, tile0 = item->begin + i * kTile;
      float acc[kValues];
      // -- products
      if constexpr (S::kScales) {
        // Each group of channels has its own scale a token.
        float part[2][kValues];
        float4 scale[2];
#pragma unroll
        for (int pair = 0; pair <= kPairs; ++pair) {
          const bool rope = pair == kPairs;
          ptx::mbar_wait(rope ? &small->rope_full[ropes.slot] : &small->full[slots.at(pair)],
                         rope ? ropes.phase : slots.parity(pair));
          const uint32_t tile = operand(shared + (rope ? S::kRope + ropes.slot * kBlock : slots.at(pair) * kPair));
          ptx::wgmma_fence();
#pragma unroll
          for (int block = 0; block < (rope ? 1 : 2); ++block) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              product<T, 0>(part[pair % 2], ptx::further(tile, block * kBlock + j * 32),
                            ptx::further(q_operand, (pair * 2 + block) * S::kQueryBlock + j * 32), block + j > 0);
            }
          }
          ptx::wgmma_commit();
          if (pair == 0) {
            // The scales come with the rotary keys. What lies behind the sequence may be anything.
            ptx::mbar_wait(&small->rope_full[ropes.slot], ropes.phase);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int token = warp * 16 + lane / 4 + 8 * h;
              scale[h] = *reinterpret_cast<const float4*>(small->scales[ropes.slot][token]);
              if (tile0 + token >= item->end) scale[h] = float4{};
            }
            continue;
          }
          ptx::wgmma_wait<1>();
          ptx::keep(part[(pair + 1) % 2]);
#pragma unroll
          for (int x = 0; x < kValues; ++x) {
            const float4& s = scale[x / 2 % 2];
            const float by = pair == 1 ? s.x : pair == 2 ? s.y : pair == 3 ? s.z : s.w;
            acc[x] = pair == 1 ? part[0][x] * by : __fmaf_rn(part[(pair + 1) % 2][x], by, acc[x]);
          }
        }
        ptx::wgmma_wait<0>();
        ptx::keep(part[0]);
#pragma unroll
        for (int x = 0; x < kValues; ++x) acc[x] += part[0][x];
      } else {
        float part[kChains][kValues];
#pragma unroll
        for (int pair = 0; pair <= kPairs; ++pair) {
          const bool rope = pair == kPairs;
          ptx::mbar_wait(rope ? &small->rope_full[ropes.slot] : &small->full[slots.at(pair)],
                         rope ? ropes.phase : slots.parity(pair));
          const uint32_t tile = operand(shared + (rope ? S::kRope + ropes.slot * kBlock : slots.at(pair) * kPair));
          ptx::wgmma_fence();
#pragma unroll
          for (int block = 0; block < (rope ? 1 : 2); ++block) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              product<T, 0>(part[j % kChains], ptx::further(tile, block * kBlock + j * 32),
                            ptx::further(q_operand, (pair * 2 + block) * S::kQueryBlock + j * 32),
                            pair * 8 + block * 4 + j >= kChains);
            }
          }
          ptx::wgmma_commit();
        }
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int c = 0; c < kChains; ++c) ptx::keep(part[c]);
#pragma unroll
        for (int x = 0; x < kValues; ++x) acc[x] = kChains == 2 ? part[0][x] + part[kChains - 1][x] : part[0][x];
        if (lane == 0) ptx::mbar_arrive(&small->rope_empty[ropes.slot]);
      }
      if (lane == 0 && i == tiles - 1 && item->leaves) ptx::mbar_arrive(small->q_empty);
      if (!S::kCodes && tile0 + kTile > item->end) {
        // What lies behind the sequence may be anything: zeros, since 0 times NaN is NaN. All four warps are done
        // reading.
        ptx::bar_sync(1, 128);
        const int from = item->end - tile0;
        for (int j = threadIdx.x; j < (kTile - from) * (kLatent / 8); j += 128) {
          const int row = from + j / (kLatent / 8), block = j % (kLatent / 8) / 8;
          unsigned char* at = shared + slots.at(block / 2) * kPair + block % 2 * kBlock + row * 128 + j % 8 * 16;
          *reinterpret_cast<uint4*>(at) = uint4{};
        }
      }

      // -- softmax of the tile by itself
#pragma unroll
      for (int x = 0; x < kValues; ++x) acc[x] *= factor;
      if (kMask || tile0 < open_from || tile0 + kTile > open_to) mask_scores<T, kMask>(k, acc, tile0, warp, small);
      float here[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) here[c] = fmaxf(acc[c / 2 * 4 + c % 2], acc[c / 2 * 4 + 2 + c % 2]);
      join_lanes<Largest>(here);
      const int column = lane / 4 * kLaneRows / 2 * 8 + 2 * t + (kLaneRows == 1 ? lane / 4 % 2 : 0);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) small->largest[buffer][column + r][warp] = here[r];
      ptx::bar_sync(1, 128);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float4 m = *reinterpret_cast<const float4*>(small->largest[buffer][c / 2 * 8 + 2 * t + c % 2]);
        const float top = fmaxf(fmaxf(m.x, m.y), fmaxf(m.z, m.w)), from = top == -INFINITY ? 0.0f : top;
        float& low = acc[c / 2 * 4 + c % 2];
        float& high = acc[c / 2 * 4 + 2 + c % 2];
        low = ptx::exp2(low - from), high = ptx::exp2(high - from);
        here[c] = low + high;
      }
      const int place = count % S::kWeightBuffers, round = count / S::kWeightBuffers;
      if (round > 0) ptx::mbar_wait(&small->weights_empty[place], (round - 1) & 1);
#pragma unroll
      for (int version = 0; version < S::kVersions; ++version) {
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
          const uint32_t to =
              ptx::shared_address(shared + S::kWeights + (place * S::kVersions + version) * S::kWeightBytes) +
              (r * 32 + lane) * 128;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float by = 1.0f;
            if constexpr (S::kScales) {
              const int token = warp * 16 + lane / 4 + 8 * half;
              by = tile0 + token < item->end ? small->scales[ropes.slot][token][version] : 0.0f;
            }
            uint32_t packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const float x = acc[r * 16 + j * 4 + 2 * half], y = acc[r * 16 + j * 4 + 2 * half + 1];
              packed[j] = S::kScales ? pack(x * by, y * by, T{}) : pack(x, y, T{});
            }
            ptx::stmatrix_trans(to + ((warp * 2 + half) ^ (lane % 8)) * 16, packed[0], packed[1], packed[2], packed[3]);
          }
        }
      }
      ptx::fence_async();
      __syncwarp();
      if (lane == 0) ptx::mbar_arrive(&small->weights_full[place]);
      // -- how the tile joins its section, and the section, at its end, its chapter: while the products begin
      ++in_section;
      const bool ends = in_section == section_tiles || i == tiles - 1;
      if (warp == 0) {
        join_sums();
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
          const int row = r * 32 + lane;
          const float4 m = *reinterpret_cast<const float4*>(small->largest[buffer][row]);
          by_tile[r] = section[r].raise(fmaxf(fmaxf(m.x, m.y), fmaxf(m.z, m.w)));
          small->by_tile[buffer][row / 2][row % 2] = by_tile[r].keep;
          small->by_tile[buffer][row / 2][row % 2 + 2] = by_tile[r].add;
          if (ends) {
            by_section[r] = chapter[r].raise(section[r].top);
            small->by_section[buffer][row / 2][row % 2] = by_section[r].keep;
            small->by_section[buffer][row / 2][row % 2 + 2] = by_section[r].add;
          }
        }
        ptx::mbar_arrive(&small->factors_full[place]);
        summed = buffer;
        section_ended = ends;
      }
      if (ends) in_section = 0;
      if (S::kScales) {
        __syncwarp();
        if (lane == 0) ptx::mbar_arrive(&small->rope_empty[ropes.slot]);
      }
      // -- the sums of its weights, while the products with them go on
      join_lanes<Sum>(here);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) small->sums[buffer][column + r][warp] = here[r];
      slots.advance(kPairs);
      ropes.advance(1);
    }
    ptx::bar_sync(1, 128);
    join_sums();
    if (warp == 0) {
      ptx::wait_prior_grid();
      // The second kernel finds a sequence's parts by this.
      if (lane == 0 && item->begin == 0 && item->first_row == 0) {
        k.places[item->b] = make_int4(item->at, item->parts, item->chapter, 0);
      }
      float* stats = k.stats + int64_t(item->at) * 2 * kRows;
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        stats[r * 32 + lane] = chapter[r].top;
        stats[kRows + r * 32 + lane] = chapter[r].sum;
      }
    }
    feed.done();
  }
}

}  // namespace decode
#endif  // MLA_SM90A

}  // namespace deltafuse::mla
