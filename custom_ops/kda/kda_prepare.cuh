// Prefill, first kernel: everything about a chunk that needs no state. One block of four warps for a chunk of 64 tokens
// and a value head; warp a owns the chunk's 16 tokens from 16 a on. It leaves in the workspace, in the order in which
// the scan's warps want their matrix operands: -W, Q exp(G) scale, K exp(G_C - G), M, exp(G_C) and U (see NOTES.md).
//
// Decays are multiplied, never subtracted in the exponent: d = exp(g) is made once for an element, then blocks of 1, 2,
// 4 and 8 tokens are joined two and two. At each joining, tokens of the later block carry the product of decays since
// the border and tokens of the earlier one the product up to it; their product is the decay between the two tokens.
// Every factor is at most 1, so nothing overflows whatever the gate, and what underflows is nothing.
#pragma once

#include "kda_prepare_parts.cuh"
#include "kda_solve.cuh"

namespace deltafuse::kda {

template <typename N>
__global__ void __launch_bounds__(128, N::kTerms == 1 ? 3 : 2) prepare_kernel(const PrepareArgs args) {
  using T = typename N::T;
  constexpr int kTerms = N::kTerms;
  constexpr uint32_t kAll = 0xffffffffu;
  KDA_DYNAMIC_SHARED(shared);
  const PrepareShared at{kTerms, args.k};
  const UnitLayout unit{kTerms, args.k, args.v};

  const int head = blockIdx.x % args.v_heads;
  const int64_t slot = blockIdx.x / args.v_heads;
  const int64_t seq = sequence_of_slot(args.seqs, slot);
  const Span span = span_of(args.seqs, seq);
  const int64_t first = span.begin + (slot - span.slot) * kChunk;
  if (first >= span.end) return;
  const int tokens = span.end - first < kChunk ? static_cast<int>(span.end - first) : kChunk;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
  const int q_head = head / (args.v_heads / args.heads);
  const int64_t index = slot * args.v_heads + head;
  unsigned char* out = args.units + index * unit.bytes();
  unsigned char* keys = shared + at.keys_offset();
  const int64_t key_term = int64_t(4) * (args.k / 16) * kTileBytes;

  // The lane's two tokens; absent ones keep zero keys, queries and rates, and decay 1.
  bool present[2];
  const T *q_row[2], *k_row[2], *g_row[2];
  float q_scale[2], k_scale[2], rate[2];
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const int token = warp * 16 + s * 8 + row;
    present[s] = token < tokens;
    const int64_t r = first + (present[s] ? token : 0);
    q_row[s] = static_cast<const T*>(args.rows.q) + r * args.rows.q_stride + int64_t(q_head) * args.k;
    k_row[s] = static_cast<const T*>(args.rows.k) + r * args.rows.k_stride + int64_t(q_head) * args.k;
    g_row[s] = static_cast<const T*>(args.g) + (r * args.v_heads + head) * args.k;
    float b = to_float(static_cast<const T*>(args.beta)[r * args.v_heads + head]);
    if (args.beta_sigmoid) b = sigmoid(b);
    rate[s] = present[s] ? b * args.beta_scale : 0.f;
    if (t == 0) reinterpret_cast<float*>(shared + at.beta_offset())[token] = rate[s];
    q_scale[s] = args.scale, k_scale[s] = 1.f;
  }
  float* bias_of = reinterpret_cast<float*>(shared + at.bias_offset());
  for (int c = threadIdx.x; c < args.k; c += 128) {
    bias_of[c] = args.dt_bias ? args.dt_bias[int64_t(head) * args.k + c] : 0.f;
  }
  // Every lane stages its own eight channels of each group of 32 and reads nobody else's.
  unsigned char* own_keys = keys + warp * (args.k / 16) * kTileBytes + lane * 16;
  const int region = at.region();
  if (args.staged) {
    for (int group = 0; group < args.k / 32; ++group) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        unsigned char* slot_of = own_keys + (group * 2 + s) * kTileBytes;
        stage8<N>(slot_of, key_term, k_row[s] + group * 32 + t * 8);
        stage8<N>(slot_of + region, key_term, q_row[s] + group * 32 + t * 8);
      }
    }
    ptx::cp_async_commit();
    for (int group = 0; group < args.k / 32; ++group) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        stage8<N>(own_keys + (group * 2 + s) * kTileBytes + 2 * region, key_term, g_row[s] + group * 32 + t * 8);
      }
    }
    ptx::cp_async_commit();
  }
  const auto load_row = [&](const T* row_of, int group, int s, int which, float (&x)[8]) {  // which: 0 k, 1 q, 2 g
    if (args.staged) {
      unstage8<N>(own_keys + (group * 2 + s) * kTileBytes + which * region, key_term, x);
    } else {
      load8(row_of + group * 32 + t * 8, x);
    }
  };
  // Products q . k of each token with itself, and the norms.
  float diagonal[2] = {};
  ptx::cp_async_wait<1>();
  {
    float q_sum[2] = {}, k_sum[2] = {};
    if constexpr (kTerms == 1) {  // on the tensor cores, straight from the rows' own bits; only the diagonals count
      float qq[2][4] = {}, kk[2][4] = {}, qk[2][4] = {};
      for (int group = 0; group < args.k / 32; ++group) {
        uint4 q[2], k[2];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const unsigned char* slot_of = own_keys + (group * 2 + s) * kTileBytes;
          q[s] = *reinterpret_cast<const uint4*>(
              args.staged ? slot_of + region : reinterpret_cast<const unsigned char*>(q_row[s] + group * 32 + t * 8));
          k[s] = *reinterpret_cast<const uint4*>(
              args.staged ? slot_of : reinterpret_cast<const unsigned char*>(k_row[s] + group * 32 + t * 8));
        }
        const Tile<N> q_low{{make_uint4(q[0].x, q[1].x, q[0].y, q[1].y)}},
            k_low{{make_uint4(k[0].x, k[1].x, k[0].y, k[1].y)}};
        const Tile<N> q_high{{make_uint4(q[0].z, q[1].z, q[0].w, q[1].w)}},
            k_high{{make_uint4(k[0].z, k[1].z, k[0].w, k[1].w)}};
        multiply<N>(qk[0], qk[1], q_low, as_right(k_low));
        multiply<N>(qk[0], qk[1], q_high, as_right(k_high));
        if (args.l2norm != L2Norm::kNone) {
          multiply<N>(qq[0], qq[1], q_low, as_right(q_low));
          multiply<N>(qq[0], qq[1], q_high, as_right(q_high));
          multiply<N>(kk[0], kk[1], k_low, as_right(k_low));
          multiply<N>(kk[0], kk[1], k_high, as_right(k_high));
        }
      }
      const int source = lane / 4 * 4 + row / 2;  // the lane of the row that holds its diagonal
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        diagonal[s] = __shfl_sync(kAll, row & 1 ? qk[s][2 * s + 1] : qk[s][2 * s], source);
        q_sum[s] = __shfl_sync(kAll, row & 1 ? qq[s][2 * s + 1] : qq[s][2 * s], source);
        k_sum[s] = __shfl_sync(kAll, row & 1 ? kk[s][2 * s + 1] : kk[s][2 * s], source);
      }
    } else {
      for (int group = 0; group < args.k / 32; ++group) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          float q[8], k[8];
          load_row(q_row[s], group, s, 1, q);
          load_row(k_row[s], group, s, 0, k);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            q_sum[s] = fmaf(q[i], q[i], q_sum[s]), k_sum[s] = fmaf(k[i], k[i], k_sum[s]);
            diagonal[s] = fmaf(q[i], k[i], diagonal[s]);
          }
        }
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int i = 1; i < 4; i *= 2) {
          q_sum[s] += __shfl_xor_sync(kAll, q_sum[s], i);
          k_sum[s] += __shfl_xor_sync(kAll, k_sum[s], i);
          diagonal[s] += __shfl_xor_sync(kAll, diagonal[s], i);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      q_scale[s] *= norm_factor(q_sum[s], args.l2norm, args.l2norm_eps);
      k_scale[s] = norm_factor(k_sum[s], args.l2norm, args.l2norm_eps);
      if (!present[s]) q_scale[s] = k_scale[s] = 0.f;
      diagonal[s] *= q_scale[s] * k_scale[s];
    }
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // the bias is there
  const float gate_rate = args.gate == GateActivation::kNone ? 1.f : expf(args.A_log[head]);

  // Products of 16 x 16 blocks of this warp's rows: inside its own block by the size of the blocks joined, and with the
  // one, two and three blocks before. Rows of the first kind: 0-7 queries, 8-15 keys.
  float own[3][2][4] = {}, own8[4] = {}, before_q[3][2][4] = {}, before_k[3][2][4] = {};

  for (int group = 0; group < args.k / 32; ++group) {
    const int channel = group * 32 + t * 8;
    float q[2][8], k[2][8], p[2][8], x[2][8];  // p: decay since the block's start, x: decay to the block's end
    float bias[8];
    load8(bias_of + channel, bias);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      load_row(q_row[s], group, s, 1, q[s]);
      load_row(k_row[s], group, s, 0, k[s]);
      load_row(g_row[s], group, s, 2, p[s]);
    }
    if (args.staged && group < args.v / 32) {  // the values are wanted last: they take the queries' place
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const T* v_row = static_cast<const T*>(args.rows.v) +
                         (first + (present[s] ? warp * 16 + s * 8 + row : 0)) * args.rows.v_stride +
                         int64_t(head) * args.v;
        stage8<N>(own_keys + (group * 2 + s) * kTileBytes + region, key_term, v_row + group * 32 + t * 8);
      }
    }
    ptx::cp_async_commit();
    make_decays<kTerms == 2>(p, bias, args.gate, gate_rate, args.lower_bound);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        q[s][i] *= q_scale[s];
        k[s][i] *= k_scale[s];
        p[s][i] = present[s] ? p[s][i] : 1.f;
        x[s][i] = 1.f;
      }
    }
    // Blocks of 1, 2 and 4 tokens, in each half of eight tokens.
#pragma unroll
    for (int level = 0; level < 3; ++level) {
      const bool later = (row >> level) & 1;
      const int base = (row >> (level + 1)) << (level + 1);
      const int source = (later ? base + (1 << level) - 1 : base + (2 << level) - 1) * 4 + t;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        float qf[8], kf[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float f = later ? p[s][i] : x[s][i];
          qf[i] = q[s][i] * f, kf[i] = k[s][i] * f;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Tile<N> a = stacked_tile<N>(qf, kf, half);
          multiply_high<N>(own[level][s], a, as_right(a));
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float total = __shfl_sync(kAll, p[s][i], source);
          if (later) {
            p[s][i] *= total;
          } else {
            x[s][i] *= total;
          }
        }
      }
    }
    {  // the two halves: rows from the second, columns from the first
      float qf[8], kf[8], cf[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) qf[i] = q[1][i] * p[1][i], kf[i] = k[1][i] * p[1][i], cf[i] = k[0][i] * x[0][i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        multiply_low<N>(own8, stacked_tile<N>(qf, kf, half), as_right(stacked_tile<N>(cf, cf, half)));
      }
    }
    float* totals = reinterpret_cast<float*>(shared + at.totals_offset()) + (group & 1) * 4 * 32;
    unsigned char* columns = shared + (group & 1) * at.column_buffer();
    const int64_t column_term = 3 * 2 * kTileBytes;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float first_half = __shfl_sync(kAll, p[0][i], 28 + t), second_half = __shfl_sync(kAll, p[1][i], 28 + t);
      p[1][i] *= first_half;
      x[0][i] *= second_half;
      if (row == 0) totals[warp * 32 + t * 8 + i] = first_half * second_half;
    }
    // From here on p: queries and x: keys since the block's start (rows), k: keys to the block's end (columns).
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float since = p[s][i], until = x[s][i];
        p[s][i] = q[s][i] * since;
        x[s][i] = k[s][i] * since;
        k[s][i] *= until;
      }
    }
    if (warp < 3) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_tile<N>(columns + (warp * 2 + half) * kTileBytes, column_term, lane, as_right(token_tile<N>(k, half)));
      }
    }
    __syncthreads();
#pragma unroll
    for (int distance = 1; distance < 4; ++distance) {
      if (distance <= warp) {
        const int block = warp - distance;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Tile<N> b = load_tile<N>(columns + (block * 2 + half) * kTileBytes, column_term, lane);
          multiply<N>(before_q[distance - 1][0], before_q[distance - 1][1], token_tile<N>(p, half), b);
          multiply<N>(before_k[distance - 1][0], before_k[distance - 1][1], token_tile<N>(x, half), b);
        }
        float total[8];
        load8(totals + block * 32 + t * 8, total);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
#pragma unroll
          for (int i = 0; i < 8; ++i) p[s][i] *= total[i], x[s][i] *= total[i];
        }
      }
    }
    float after[8] = {1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f};
    for (int block = warp + 1; block < 4; ++block) {
      float total[8];
      load8(totals + block * 32 + t * 8, total);
#pragma unroll
      for (int i = 0; i < 8; ++i) after[i] *= total[i];
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[s][i] *= -rate[s], k[s][i] *= after[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile = group * 2 + half;
      store_tile<N>(out + unit.q_offset() + (warp * (args.k / 16) + tile) * kTileBytes, unit.region(), lane,
                    as_right(token_tile<N>(p, half)));
      store_tile<N>(out + unit.e_offset() + (tile * 4 + warp) * kTileBytes, unit.region(), lane,
                    transpose_parts(token_tile<N>(k, half)));
      store_tile<N>(keys + (warp * (args.k / 16) + tile) * kTileBytes, key_term, lane, token_tile<N>(x, half));
    }
    if (warp == 0 && row == 0) {  // exp(G_C), in the order of the tiles' channels
      float total[8];
      load8(totals + t * 8, total);
#pragma unroll
      for (int i = 0; i < 8; ++i) total[i] *= after[i];
      float* decay = reinterpret_cast<float*>(out + unit.decay_offset()) + group * 32;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float2*>(decay + half * 16 + 2 * t) = make_float2(total[half * 4], total[half * 4 + 1]);
        *reinterpret_cast<float2*>(decay + half * 16 + 8 + 2 * t) =
            make_float2(total[half * 4 + 2], total[half * 4 + 3]);
      }
    }
  }

  // M of this warp's rows goes out, -A stays in shared memory.
  unsigned char* m_out = out + unit.m_offset();
  float* square = reinterpret_cast<float*>(shared + at.square_offset()) + warp * 256;  // A of the own block, transposed
  float m_own[2][2];
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 2 * t + e, differ = row ^ column;
      const float m = differ >= 4 ? own[2][s][e] : differ >= 2 ? own[1][s][e] : own[0][s][e];
      const float a = differ >= 4 ? own[2][s][2 + e] : differ >= 2 ? own[1][s][2 + e] : own[0][s][2 + e];
      m_own[s][e] = row > column ? m : row == column ? diagonal[s] : 0.f;
      square[(s * 8 + column) * 16 + s * 8 + row] = row > column ? a * rate[s] : 0.f;
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) square[(2 * t + e) * 16 + 8 + row] = own8[2 + e] * rate[1];
  store_tile<N>(m_out + (warp * (warp + 1) / 2 + warp) * kTileBytes, unit.m_region(), lane,
                as_right(make_tile<N>(m_own[0][0], m_own[0][1], own8[0], own8[1], 0.f, 0.f, m_own[1][0], m_own[1][1])));
  const int64_t a_term = 6 * kTileBytes;
#pragma unroll
  for (int distance = 1; distance < 4; ++distance) {
    if (distance <= warp) {
      const int block = warp - distance;
      const auto& m = before_q[distance - 1];
      const auto& a = before_k[distance - 1];
      store_tile<N>(m_out + (warp * (warp + 1) / 2 + block) * kTileBytes, unit.m_region(), lane,
                    as_right(make_tile<N>(m[0][0], m[0][1], m[0][2], m[0][3], m[1][0], m[1][1], m[1][2], m[1][3])));
      store_tile<N>(shared + at.a_offset() + (warp * (warp - 1) / 2 + block) * kTileBytes, a_term, lane,
                    make_tile<N>(-rate[0] * a[0][0], -rate[0] * a[0][1], -rate[1] * a[0][2], -rate[1] * a[0][3],
                                 -rate[0] * a[1][0], -rate[0] * a[1][1], -rate[1] * a[1][2], -rate[1] * a[1][3]));
    }
  }

  store_tile<N>(shared + at.inverse_offset() + warp * kTileBytes, 4 * kTileBytes, lane, invert_block<N>(square, lane));
  ptx::cp_async_wait<0>();
  __syncthreads();
  solve_chunk<N>(args, shared, first, tokens, head, index);
}

template <typename N>
cudaError_t launch_prepare_as(PrepareArgs args, const DeviceInfo& device, cudaStream_t stream) {
  const PrepareShared shared{N::kTerms, args.k};
  const int64_t blocks = args.seqs.slots() * args.v_heads;
  if (blocks == 0) return cudaSuccess;
  args.staged = shared.bytes(true) <= device.shared_bytes;
  const int bytes = shared.bytes(args.staged);
  const cudaError_t status =
      cudaFuncSetAttribute(prepare_kernel<N>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  prepare_kernel<N><<<static_cast<unsigned>(blocks), 128, bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace deltafuse::kda
