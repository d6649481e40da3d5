// The fourth warpgroup of decode: one warp starts the copies of tiles and queries, by tensor maps; where the cache
// holds 8-bit codes, the other three turn them into T. See mla_decode.cuh.
#pragma once

#include "mla_decode_parts.cuh"

namespace deltafuse::mla {

#ifdef MLA_SM90A
namespace decode {

struct Maps {
  const CUtensorMap *latent, *rope, *scale, *q;
};

// The place of a box of tokens in the tensor maps; outside of them, so that zeros come, where its block id is wrong.
__device__ __forceinline__ int box_row(const DecodeKernelArgs& k, const Item& item, int token) {
  if (!k.block_table) return item.b * k.batch_rows + token;
  const int slot = token / k.block_size;
  const int id = slot < k.max_blocks ? k.block_table[int64_t(item.b) * k.max_blocks + slot] : -1;
  return id < 0 || id >= k.num_blocks ? -(1 << 30) : id * k.block_size + token % k.block_size;
}

// What lies behind a sequence's rows are the next one's, or zeros: columns of the products that nobody looks at.
template <int kRows, typename Small>
__device__ __forceinline__ void fetch_queries(const DecodeKernelArgs& k, const CUtensorMap* map, const Item& item,
                                              int turn, unsigned char* q, Small* small) {
  const int row = item.b * k.seq_len * k.num_heads + item.first_row;
  if (turn > 0) ptx::mbar_wait(small->q_empty, (turn - 1) & 1);
  ptx::mbar_expect(small->q_full, kRows * 2 * (kLatent + kRotary));
  ptx::tma_load(q, map, small->q_full, 0, row, 0, ptx::evict_normal());
}

// Blocks of a paged cache that are smaller than a tile: copy(place in the tile, row) for each.
template <typename Copy>
__device__ __forceinline__ void fetch_boxes(const DecodeKernelArgs& k, const Item& item, int token, Copy copy) {
#pragma unroll 1
  for (int part = 0; part < kTile; part += k.box_rows) copy(part, box_row(k, item, token + part));
}

// One warp; its first lane starts the copies. It issues one instruction at a time, with nothing else to do meanwhile:
// what a copy takes of them decides how soon the first tile is there, and how fast tiles can come at all.
template <CacheType kType, int kRows, typename Small>
__device__ void fetch(const DecodeKernelArgs& k, const Maps& maps, Walk<kRows>& walk, unsigned char* shared,
                      Small* small) {
  using S = Shape<kType, kRows>;
  constexpr int kPairSlots = S::kCodes ? S::kRawSlots : S::kSlots, kBytes = S::kCodes ? kRaw : kPair;
  unsigned char* pairs = shared + (S::kCodes ? S::kCode : 0);
  uint64_t *full = S::kCodes ? small->raw_full : small->full, *empty = S::kCodes ? small->raw_empty : small->empty;
  const int lane = threadIdx.x % 32;
  const uint64_t policy = k.once ? ptx::evict_first() : ptx::evict_normal();
  Feed<Small> feed{small};
  Ring<kPairSlots> slots;
  Ring<kRopeSlots> ropes;
  int turn = 0;  // times that queries came
  ptx::wait_prior_grid();
  while (true) {
    const Item item = walk.next();
    if (lane == 0) {
      if (item.tiles == 0) {
        feed.tell(item);
        return;
      }
      int token = item.base + item.begin, row = item.b * k.batch_rows + token;
#pragma unroll 1
      for (int i = 0; i < item.tiles; ++i, token += kTile, row += kTile) {
        if (k.block_table && k.box_rows == kTile) row = box_row(k, item, token);
#pragma unroll 1
        for (int pair = 0; pair < kPairs; ++pair) {
          uint64_t* bar = &full[slots.slot];
          unsigned char* to = pairs + slots.slot * kBytes;
          if (S::kBurst == 2 && pair % 2 == 0) ptx::mbar_wait(&empty[slots.at(1)], slots.parity(1) ^ 1);
          ptx::mbar_wait(&empty[slots.slot], slots.phase ^ 1);
          ptx::mbar_expect(bar, kBytes);
          if (k.box_rows < kTile) {
            fetch_boxes(k, item, token, [&](int part, int at) {
              if constexpr (S::kCodes) {
                ptx::tma_load(to + part * 128, maps.latent, bar, pair * 128, at, policy);
              } else {
                ptx::tma_load(to + part * 128, maps.latent, bar, 0, at, pair * 2, policy);
                ptx::tma_load(to + kBlock + part * 128, maps.latent, bar, 0, at, pair * 2 + 1, policy);
              }
            });
          } else if constexpr (S::kCodes) {
            ptx::tma_load(to, maps.latent, bar, pair * 128, row, policy);
          } else {
            ptx::tma_load(to, maps.latent, bar, 0, row, pair * 2, policy);
          }
          slots.advance(1);
        }
        // Queries come behind the first pairs, which are longer on their way, and may have to wait for the last
        // products that take the ones before.
        if (i == 0 && item.fresh) fetch_queries<kRows>(k, maps.q, item, turn++, shared + S::kQuery, small);
        ptx::mbar_wait(&small->rope_empty[ropes.slot], ropes.phase ^ 1);
        ptx::mbar_expect(&small->rope_full[ropes.slot], kBlock + S::kScaleBytes);
        unsigned char* rope = shared + S::kRope + ropes.slot * kBlock;
        uint64_t* bar = &small->rope_full[ropes.slot];
        auto copy = [&](int part, int at) {
          ptx::tma_load(rope + part * 128, maps.rope, bar, 0, at, policy);
          if (S::kScales) ptx::tma_load(&small->scales[ropes.slot][part][0], maps.scale, bar, 0, at, policy);
        };
        if (k.box_rows < kTile) {
          fetch_boxes(k, item, token, copy);
        } else {
          copy(0, row);
        }
        ropes.advance(1);
        if (i == 0) feed.tell(item);  // the copies are under way
      }
    }
    if (item.tiles == 0) return;
    __syncwarp();
  }
}

// -- 8-bit codes to T -------------------------------------------------------------------------------------------------
// Exact, two codes an instruction where it can be, and never NaN: int8 becomes a whole number; float8 its value, where
// the code that stands for NaN becomes 480 (what lies behind a sequence may be anything, and 0 times NaN is NaN).
__device__ __forceinline__ uint32_t fma2(uint32_t x, uint32_t y, uint32_t z, __nv_bfloat16) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(x), "r"(y), "r"(z));
  return d;
}
__device__ __forceinline__ uint32_t fma2(uint32_t x, uint32_t y, uint32_t z, __half) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(x), "r"(y), "r"(z));
  return d;
}
// The two codes that `pick` takes out of four, bytes of `other` above (int8) or below (float8) them.
template <CacheType kType>
__device__ __forceinline__ uint32_t convert(uint32_t codes, bool upper, __nv_bfloat16 type) {
  if (kType == CacheType::kInt8) {
    // 0x43xx is 128 + the lower seven bits; the sign bit alone makes it 128 or 256.
    const uint32_t x = __byte_perm(codes, 0x43434343u, upper ? 0x4342 : 0x4140);
    return fma2(x & 0xFF80FF80u, 0xBF80BF80u, x & 0xFF7FFF7Fu, type);
  }
  // s eeee mmm in the place of s 0000 eeee mmm 0000, which is 2^-120 times it, zeros and subnormal numbers included.
  const uint32_t x = __byte_perm(codes, 0u, upper ? 0x3424 : 0x1404);
  return fma2((x & 0x80008000u) | (x >> 4 & 0x07F007F0u), 0x7B807B80u, 0x80008000u, type);
}
template <CacheType kType>
__device__ __forceinline__ uint32_t convert(uint32_t codes, bool upper, __half type) {
  if (kType == CacheType::kInt8) {
    // 0x64xx is 1024 + the byte, which is the code + 128 when its sign bit is turned over.
    const uint32_t x = __byte_perm(codes ^ 0x80808080u, 0x64646464u, upper ? 0x4342 : 0x4140);
    return fma2(x, 0x3C003C00u, 0xE480E480u, type);
  }
  const uint32_t x = __byte_perm(codes, 0u, upper ? 0x3424 : 0x1404);
  return fma2((x & 0x80008000u) | (x >> 1 & 0x3F803F80u), 0x5C005C00u, 0x80008000u, type);
}

// Some eighths of a pair: 64 tokens of 128 codes become two swizzled blocks. A lane takes 8 codes of every second row.
template <typename T, CacheType kType>
__device__ __forceinline__ void convert_eighths(const unsigned char* raw, unsigned char* pair, int first, int last) {
  const int lane = threadIdx.x % 32, half = lane / 16, piece = lane % 16;
  const unsigned char* from = raw + half * 128 + piece * 8;
  unsigned char* to = pair + piece / 8 * kBlock + half * 128;
#pragma unroll 1
  for (int eighth = first; eighth < last; ++eighth) {
    uint2 codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = *reinterpret_cast<const uint2*>(from + eighth * 1024 + i * 256);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<uint4*>(to + eighth * 1024 + i * 256 + ((piece % 8) ^ (i * 2 + half)) * 16) =
          make_uint4(convert<kType>(codes[i].x, false, T{}), convert<kType>(codes[i].x, true, T{}),
                     convert<kType>(codes[i].y, false, T{}), convert<kType>(codes[i].y, true, T{}));
    }
  }
}

// Three warps share each pair: it is ready sooner than if they took turns.
template <typename T, CacheType kType, int kRows, typename Small>
__device__ void convert_tiles(const DecodeKernelArgs& k, unsigned char* shared, Small* small) {
  using S = Shape<kType, kRows>;
  const int warp = threadIdx.x % 128 / 32 - 1, lane = threadIdx.x % 32;
  const int first = warp * 3, last = min(first + 3, 8);
  Feed<Small> feed{small};
  Ring<S::kSlots> slots;
  Ring<S::kRawSlots> raws;
  while (const Item* item = feed.next()) {
    const int pairs = item->tiles * kPairs;
    feed.done();
#pragma unroll 1
    for (int i = 0; i < pairs; ++i) {
      ptx::mbar_wait(&small->raw_full[raws.slot], raws.phase);
      ptx::mbar_wait(&small->empty[slots.slot], slots.phase ^ 1);
      convert_eighths<T, kType>(shared + S::kCode + raws.slot * kRaw, shared + slots.slot * kPair, first, last);
      ptx::fence_async();
      __syncwarp();
      if (lane == 0) ptx::mbar_arrive(&small->full[slots.slot]), ptx::mbar_arrive(&small->raw_empty[raws.slot]);
      slots.advance(1);
      raws.advance(1);
    }
  }
}

}  // namespace decode
#endif  // MLA_SM90A

}  // namespace deltafuse::mla
