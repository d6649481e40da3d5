// Decode over the cache of latents, sm_90a: one block makes parts of sequences for 32 or 64 query rows (token and
// head). Keys are the products' rows and query rows their columns, so that 32 heads fill the tensor cores:
//
//   S^T [64 keys, rows] = tile [64, 576] q^T        one warpgroup, then its softmax (mla_decode_scores.cuh)
//   O^T [512, rows]     = tile [64, 512]^T P^T      two warpgroups, 256 channels each, into sections and chapters
//
// A tile of 64 tokens is read from memory once and serves both. The fourth warpgroup fetches (mla_decode_fetch.cuh).
// Every tile has a softmax of its own and products that start from nothing; nothing but a few factors a row passes from
// one tile to the next, so that tiles overlap.
#pragma once

#include "mla_decode_fetch.cuh"
#include "mla_decode_scores.cuh"

namespace deltafuse::mla {

#ifdef MLA_SM90A
namespace decode {

// total = total * keep + x * add, x rounded to what travels; factors of query rows 2 i and 2 i + 1 in factors[i].
template <typename T, int N>
__device__ __forceinline__ void fold(float (&total)[N], const float (&x)[N], const float (*factors)[4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    const float2 keep = *reinterpret_cast<const float2*>(factors[j * 4 + t]);
    const float2 add = *reinterpret_cast<const float2*>(factors[j * 4 + t] + 2);
    const float4 y = travelled<T>(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
    total[4 * j] = joined(total[4 * j], y.x, keep.x, add.x);
    total[4 * j + 1] = joined(total[4 * j + 1], y.y, keep.y, add.y);
    total[4 * j + 2] = joined(total[4 * j + 2], y.z, keep.x, add.x);
    total[4 * j + 3] = joined(total[4 * j + 3], y.w, keep.y, add.y);
  }
}

template <typename T, CacheType kType, int kRows, typename Small>
__device__ void weighted_sum(const DecodeKernelArgs& k, unsigned char* shared, Small* small) {
  using S = Shape<kType, kRows>;
  constexpr int kValues = kRows / 2;
  // Two heights of sums fit into the registers for 32 rows; with 64 every part is one section.
  constexpr bool kChapters = kRows == 32;
  const int half = threadIdx.x / 128 - 1;  // of the channels
  const auto pair_of = [half](int m) { return S::kEachPair ? m : half * 2 + m / 2; };
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  float section[4][kValues], chapter[kChapters ? 4 : 1][kValues];
  Feed<Small> feed{small};
  Ring<S::kSlots> slots;
  int count = 0;
  ptx::wait_prior_grid();  // which may read the sums of the call before
  while (const Item* item = feed.next()) {
    const int tiles = item->tiles, section_tiles = item->section;
    // In the order of the accumulators: whole lines are written.
    using Four = typename Travel<T>::Four;
    Four* out = static_cast<Four*>(k.partial) + int64_t(item->at) * (kLatent * kRows / 4) + lane;
    auto store = [&](const float (&x)[kValues], int m) {
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        out[(((S::kEachPair ? m * 2 + half : half * 4 + m) * 4 + warp) * (kRows / 8) + j) * 32] =
            Travel<T>::pack(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
      }
    };
    const bool alone = kRows == 32 && tiles == 1;  // one tile is the part
    int in_section = 0;
    if (!alone) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int x = 0; x < kValues; ++x) section[m][x] = 0.0f;
        if (kChapters) {
#pragma unroll
          for (int x = 0; x < kValues; ++x) chapter[m % (kChapters ? 4 : 1)][x] = 0.0f;
        }
      }
    }
#pragma unroll 1
    for (int i = 0; i < tiles; ++i, ++count) {
      const int buffer = count & 1, place = count % S::kWeightBuffers;
      ptx::mbar_wait(&small->weights_full[place], count / S::kWeightBuffers & 1);
      const unsigned char* weights = shared + S::kWeights + place * S::kVersions * S::kWeightBytes;
      // 64 channels of a pair at a time; for 32 rows the next ones' products go on while these are added.
      auto start = [&](float (&leaf)[kValues], int m) {
        const uint32_t tile = operand(shared + slots.at(pair_of(m)) * kPair + (S::kEachPair ? half : m % 2) * kBlock);
        const uint32_t w = operand(weights + (S::kScales ? pair_of(m) : 0) * S::kWeightBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int j = 0; j < kTile / 16; ++j) {
          product<T, 1>(leaf, ptx::further(tile, j * 2048), ptx::further(w, j * 32), j > 0);
        }
        ptx::wgmma_commit();
      };
      auto finish = [&](float (&leaf)[kValues], int m) {
        ptx::keep(leaf);
        if (lane == 0 && (S::kEachPair || m % 2 == 1)) ptx::mbar_arrive(&small->empty[slots.at(pair_of(m))]);
        if (m == 0) ptx::mbar_wait(&small->factors_full[place], count / S::kWeightBuffers & 1);
        if (alone) {
          store(leaf, m);
        } else {
          fold<T>(section[m], leaf, small->by_tile[buffer]);
        }
      };
      if constexpr (kRows == 32) {
        float leaf[2][kValues];
        start(leaf[0], 0);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          if (m < 3) {
            start(leaf[(m + 1) % 2], m + 1);
            ptx::wgmma_wait<1>();
          } else {
            ptx::wgmma_wait<0>();
          }
          finish(leaf[m % 2], m);
        }
      } else {
        float leaf[kValues];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          start(leaf, m);
          ptx::wgmma_wait<0>();
          finish(leaf, m);
        }
      }
      slots.advance(kPairs);
      ++in_section;
      if (!alone && (in_section == section_tiles || i == tiles - 1)) {
        in_section = 0;
        if constexpr (kChapters) {
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            fold<T>(chapter[m], section[m], small->by_section[buffer]);
#pragma unroll
            for (int x = 0; x < kValues; ++x) section[m][x] = 0.0f;
          }
        }
      }
      __syncwarp();
      if (lane == 0) ptx::mbar_arrive(&small->weights_empty[place]);
    }
    if (!alone) {
#pragma unroll
      for (int m = 0; m < 4; ++m) store(kChapters ? chapter[m % (kChapters ? 4 : 1)] : section[m], m);
    }
    feed.done();
  }
}

}  // namespace decode
#endif  // MLA_SM90A

template <typename T, CacheType kType, bool kMask, int kRows>
__global__ void __launch_bounds__(decode::kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeKernelArgs k, const __grid_constant__ CUtensorMap latent_map,
                  const __grid_constant__ CUtensorMap rope_map, const __grid_constant__ CUtensorMap scale_map,
                  const __grid_constant__ CUtensorMap q_map) {
#ifdef MLA_SM90A
  using namespace decode;
  using S = Shape<kType, kRows>;
  // Of a thread of each role, 512 together.
  constexpr int kSumRegisters = S::kScales ? 176 : 184, kScoreRegisters = S::kScales || kRows == 64 ? 96 : 88;
  constexpr int kFetchRegisters = 512 - 2 * kSumRegisters - kScoreRegisters;
  extern __shared__ unsigned char unaligned[];
  unsigned char* shared = unaligned + (1024 - ptx::shared_address(unaligned) % 1024) % 1024;
  auto* small = reinterpret_cast<typename S::Small*>(shared + S::kSmall);

  const int warp = threadIdx.x / 32;
  const Maps maps{&latent_map, &rope_map, &scale_map, &q_map};
  Walk<kRows> walk(k, small->cuttings, warp == 12);
  if (warp < 4) {
    S::make_barriers(small);
  } else if (warp == 12) {
    walk.begin();
  } else if (threadIdx.x == 13 * 32) {
    ptx::prefetch_map(maps.q), ptx::prefetch_map(maps.latent), ptx::prefetch_map(maps.rope);
  }
  __syncthreads();
  ptx::launch_dependents();

  if (warp < 4) {
    ptx::set_registers_less<kScoreRegisters>();
    scores<T, kType, kMask, kRows>(k, shared, small);
  } else if (warp < 12) {
    ptx::set_registers_more<kSumRegisters>();
    weighted_sum<T, kType, kRows>(k, shared, small);
  } else {
    ptx::set_registers_less<kFetchRegisters>();
    if (warp == 12) {
      fetch<kType, kRows>(k, maps, walk, shared, small);
    } else if constexpr (S::kCodes) {
      convert_tiles<T, kType, kRows>(k, shared, small);
    }
  }
#endif
}

}  // namespace deltafuse::mla
