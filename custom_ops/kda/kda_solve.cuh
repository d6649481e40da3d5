// Prefill, the end of the first kernel: (I + A)^-1 applied to keys and values.
#pragma once

#include "kda_prepare_parts.cuh"

namespace deltafuse::kda {

// (I + A)^-1 of a warp's own 16 x 16 block as a left operand: forward substitution in float32, one column in each of 16
// lanes. square: A, transposed; it is overwritten.
template <typename N>
__device__ __forceinline__ Tile<N> invert_block(float* square, int lane) {
  __syncwarp();
  float x[16];
  const int column = lane & 15;
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.f : 0.f;
#pragma unroll
  for (int j = 0; j < 15; ++j) {
    float a[16];
#pragma unroll
    for (int i = (j + 1) / 4 * 4; i < 16; i += 4) {
      const float4 part = *reinterpret_cast<const float4*>(square + j * 16 + i);
      a[i] = part.x, a[i + 1] = part.y, a[i + 2] = part.z, a[i + 3] = part.w;
    }
#pragma unroll
    for (int i = j + 1; i < 16; ++i) x[i] = fmaf(-a[i], x[j], x[i]);
  }
  __syncwarp();
  if (lane < 16) {
#pragma unroll
    for (int i = 0; i < 16; ++i) square[i * 16 + column] = x[i];
  }
  __syncwarp();
  const float* upper = square + lane / 4 * 16 + lane % 4 * 2;
  const float* lower = upper + 8 * 16;
  return make_tile<N>(upper[0], upper[1], lower[0], lower[1], upper[8], upper[9], lower[8], lower[9]);
}

// -W and U of the chunk, once every warp's part of A and of the keys is in shared memory.
// first: the chunk's first row, of which `tokens` are there; index: of the chunk and value head in the workspace.
template <typename N>
__device__ __forceinline__ void solve_chunk(const PrepareArgs& args, unsigned char* shared, int64_t first, int tokens,
                                            int head, int64_t index) {
  using T = typename N::T;
  constexpr int kTerms = N::kTerms;
  const PrepareShared at{kTerms, args.k};
  const UnitLayout unit{kTerms, args.k, args.v};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, t = lane % 4, region = at.region();
  const int64_t key_term = int64_t(4) * (args.k / 16) * kTileBytes, a_term = 6 * kTileBytes;
  const unsigned char* keys = shared + at.keys_offset();
  unsigned char* out = args.units + index * unit.bytes();
  // By forward substitution over the four blocks of tokens: 32
  // columns at a time, all in registers.
  const float* beta = reinterpret_cast<const float*>(shared + at.beta_offset());
  for (int group = warp; group < (args.k + args.v) / 32; group += 4) {
    const bool is_w = group < args.k / 32;
    const int tile = is_w ? group * 2 : group * 2 - args.k / 16;
    const bool staged_v = args.staged && !is_w && tile / 2 < args.k / 32;
    Tile<N> done[3][2];
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      float acc[4][4], y[4][4] = {};
      if (is_w) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Tile<N> part = load_tile<N>(keys + (block * (args.k / 16) + tile + half) * kTileBytes, key_term, lane);
          uint32_t a[kTerms], b[kTerms], c[kTerms], d[kTerms];
#pragma unroll
          for (int i = 0; i < kTerms; ++i) {
            a[i] = part.term[i].x, b[i] = part.term[i].y, c[i] = part.term[i].z, d[i] = part.term[i].w;
          }
          const float2 fa = join<N>(a), fb = join<N>(b), fc = join<N>(c), fd = join<N>(d);
          acc[half * 2][0] = fa.x, acc[half * 2][1] = fa.y, acc[half * 2][2] = fb.x, acc[half * 2][3] = fb.y;
          acc[half * 2 + 1][0] = fc.x, acc[half * 2 + 1][1] = fc.y, acc[half * 2 + 1][2] = fd.x,
                         acc[half * 2 + 1][3] = fd.y;
        }
      } else {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const int token = block * 16 + s * 8 + row;
          const T* v_row = static_cast<const T*>(args.rows.v) +
                           (first + (token < tokens ? token : 0)) * args.rows.v_stride + int64_t(head) * args.v +
                           tile * 16 + t * 4;
          const float b = beta[token];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float v[4];
            if (staged_v) {  // as the block's own warp staged it: eight neighbours a lane
              const int element = half * 16 + t * 4, bytes = element % 8 * static_cast<int>(sizeof(T));
              const unsigned char* from = keys + region + bytes / 16 * key_term + bytes % 16 +
                                          (block * (args.k / 16) + tile + s) * kTileBytes +
                                          (row * 4 + element / 8) * 16;
              load4(reinterpret_cast<const T*>(from), v);
            } else {
              load4(v_row + half * 16, v);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              acc[half * 2 + i / 2][s * 2 + i % 2] = token < tokens ? v[i] * b : 0.f;
            }
          }
        }
      }
#pragma unroll
      for (int earlier = 0; earlier < block; ++earlier) {
        const Tile<N> a =
            load_tile<N>(shared + at.a_offset() + (block * (block - 1) / 2 + earlier) * kTileBytes, a_term, lane);
        multiply<N>(acc[0], acc[1], a, done[earlier][0]);
        multiply<N>(acc[2], acc[3], a, done[earlier][1]);
      }
      const Tile<N> inverse = load_tile<N>(shared + at.inverse_offset() + block * kTileBytes, 4 * kTileBytes, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float (&c0)[4] = acc[half * 2];
        const float (&c1)[4] = acc[half * 2 + 1];
        const Tile<N> b = transpose_parts(make_tile<N>(c0[0], c0[1], c0[2], c0[3], c1[0], c1[1], c1[2], c1[3]));
        float (&y0)[4] = y[half * 2];
        float (&y1)[4] = y[half * 2 + 1];
        multiply<N>(y0, y1, inverse, b);
        const Tile<N> result = make_tile<N>(y0[0], y0[1], y0[2], y0[3], y1[0], y1[1], y1[2], y1[3]);
        const Tile<N> turned = transpose_parts(result);
        if (block < 3) done[block][half] = turned;
        if (is_w) {
          store_tile<N>(out + (block * (args.k / 16) + tile + half) * kTileBytes, unit.region(), lane,
                        as_right(result));
        } else {  // rows are value channels here: (v, first tokens), (v + 8, first), (v, second), (v + 8, second)
          Tile<N> columns;
#pragma unroll
          for (int i = 0; i < kTerms; ++i) {
            columns.term[i] = make_uint4(turned.term[i].x, turned.term[i].z, turned.term[i].y, turned.term[i].w);
          }
          store_tile<N>(args.u + index * unit.u_bytes() + (tile + half) * kTerms * unit.u_tile() + block * kTileBytes,
                        unit.u_tile(), lane, columns);
        }
      }
    }
  }
}

}  // namespace deltafuse::kda
