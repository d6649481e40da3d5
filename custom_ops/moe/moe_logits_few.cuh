// Router logits of a few tokens: float64 sums, rounded once. A block takes four experts; their weights are read once
// for kTokens tokens.
#pragma once

#include "moe_fragment.cuh"

namespace deltafuse::moe {

constexpr int kLogitsThreads = 256, kLogitsWarps = kLogitsThreads / 32;
constexpr int kLogitsExperts = 4;  // of a block

// The block's weights on their way to the L2: all that may be done before the kernel before is done.
template <typename W>
__device__ __forceinline__ void prefetch_weights(const RouterArgs& r, int first_expert) {
  const int64_t row = int64_t(r.hidden) * sizeof(W);
  to_l2(static_cast<const unsigned char*>(r.weight) + first_expert * row,
        min(kLogitsExperts, r.experts - first_expert) * row, threadIdx.x, kLogitsThreads);
}

// Sums over a warp of kCount (a power of two up to 32) numbers a lane; a lane gets that of number `*which`. Each step
// halves the numbers of a lane, then the lanes of a number.
template <int kCount, int kStep = 16>
__device__ __forceinline__ double sum_over_warp(const double (&values)[kCount], int* which) {
  if constexpr (kCount == 1) {
    double sum = values[0];
#pragma unroll
    for (int step = kStep; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    *which = 0;
    return sum;
  } else {
    const bool upper = threadIdx.x & kStep;
    double half[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const double given = upper ? values[i] : values[i + kCount / 2],
                   kept = upper ? values[i + kCount / 2] : values[i];
      half[i] = kept + __shfl_xor_sync(~0u, given, kStep);
    }
    const double sum = sum_over_warp<kCount / 2, kStep / 2>(half, which);
    if (upper) *which += kCount / 2;
    return sum;
  }
}

// Logits of kLogitsExperts experts: float64 sums, rounded once; store(token, expert, logit). kTokens at a time.
template <typename T, typename W, int kTokens, typename Store>
__device__ __forceinline__ void make_logits(const RouterArgs& r, int first_expert, Store store) {
  __shared__ double partial[kLogitsWarps][kLogitsExperts * kTokens];
  constexpr int kWide = 16 / sizeof(W);  // columns of a load
  constexpr int kAhead = sizeof(W) == 4 ? 3 : 2;
  struct alignas(kWide * sizeof(T)) Columns {
    T v[kWide];
  };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const W* weight = static_cast<const W*>(r.weight);
  const T* x = static_cast<const T*>(r.x);
  const int pieces = r.hidden % kWide == 0 ? r.hidden / kWide : 0;
  const int64_t stride = r.hidden;
  const W* rows[kLogitsExperts];
#pragma unroll
  for (int e = 0; e < kLogitsExperts; ++e) rows[e] = weight + min(first_expert + e, r.experts - 1) * stride;
#pragma unroll 1
  for (int base = 0; base < r.tokens; base += kTokens) {
    double sum[kLogitsExperts * kTokens] = {};
#pragma unroll 1
    for (int first = threadIdx.x; first < pieces; first += kAhead * kLogitsThreads) {
      uint4 w[kAhead][kLogitsExperts];
      Columns c[kAhead][kTokens];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int piece = min(first + i * kLogitsThreads, pieces - 1);
#pragma unroll
        for (int e = 0; e < kLogitsExperts; ++e) w[i][e] = *(reinterpret_cast<const uint4*>(rows[e]) + piece);
#pragma unroll
        for (int n = 0; n < kTokens; ++n) {
          c[i][n] = *reinterpret_cast<const Columns*>(x + min(base + n, r.tokens - 1) * stride + piece * kWide);
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i * kLogitsThreads < pieces) {
#pragma unroll
          for (int j = 0; j < kWide; ++j) {
            double token[kTokens];
#pragma unroll
            for (int n = 0; n < kTokens; ++n) token[n] = static_cast<double>(to_float(c[i][n].v[j]));
#pragma unroll
            for (int e = 0; e < kLogitsExperts; ++e) {
              const double value = static_cast<double>(to_float(reinterpret_cast<const W*>(&w[i][e])[j]));
#pragma unroll
              for (int n = 0; n < kTokens; ++n) sum[e * kTokens + n] = fma(value, token[n], sum[e * kTokens + n]);
            }
          }
        }
      }
    }
    if (pieces == 0) {  // rows that no load of 16 bytes fits
#pragma unroll 1
      for (int k = threadIdx.x; k < r.hidden; k += kLogitsThreads) {
#pragma unroll
        for (int n = 0; n < kTokens; ++n) {
          const double token = static_cast<double>(to_float(x[min(base + n, r.tokens - 1) * stride + k]));
#pragma unroll
          for (int e = 0; e < kLogitsExperts; ++e) {
            sum[e * kTokens + n] = fma(static_cast<double>(to_float(rows[e][k])), token, sum[e * kTokens + n]);
          }
        }
      }
    }
    int which;
    const double total = sum_over_warp(sum, &which);
    if (lane % (32 / (kLogitsExperts * kTokens)) == 0) partial[warp][which] = total;
    __syncthreads();
    if (threadIdx.x < kLogitsExperts * kTokens) {
      const int expert = first_expert + threadIdx.x / kTokens, token = base + threadIdx.x % kTokens;
      if (expert < r.experts && token < r.tokens) {
        double all = partial[0][threadIdx.x];
#pragma unroll
        for (int i = 1; i < kLogitsWarps; ++i) all += partial[i][threadIdx.x];
        if (r.router_bias) all += static_cast<double>(r.router_bias[expert]);
        store(token, expert, static_cast<float>(all));
      }
    }
    __syncthreads();
  }
}

// The same of one token whose rows are not longer than the loads of all threads at once. Weights are here, in float64,
// before wait(), the wait for the kernel before, and all that comes after it runs once before it on zeros: instructions
// that are not in the cache cost more than the work. loading(): the token is on its way.
template <typename T, typename W, typename Wait, typename Loading, typename Store>
__device__ __forceinline__ void make_logits_one(const RouterArgs& r, int first_expert, Wait wait, Loading loading,
                                                Store store) {
  __shared__ double partial[kLogitsExperts][kLogitsWarps];
  constexpr int kWide = 16 / sizeof(W), kAhead = sizeof(W) == 4 ? 3 : 2;
  struct alignas(kWide * sizeof(T)) Columns {
    T v[kWide];
  };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pieces = r.hidden / kWide;
  const int expert = min(first_expert + static_cast<int>(threadIdx.x), r.experts - 1);
  const bool stores = threadIdx.x < kLogitsExperts && first_expert + static_cast<int>(threadIdx.x) < r.experts;
  double w[kAhead][kWide][kLogitsExperts];
  {
    uint4 raw[kAhead][kLogitsExperts];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int piece = static_cast<int>(threadIdx.x) + i * kLogitsThreads;
#pragma unroll
      for (int e = 0; e < kLogitsExperts; ++e) {
        const W* row = static_cast<const W*>(r.weight) + int64_t(min(first_expert + e, r.experts - 1)) * r.hidden;
        raw[i][e] = piece < pieces ? load_weights(reinterpret_cast<const uint4*>(row) + piece) : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) {
#pragma unroll
        for (int e = 0; e < kLogitsExperts; ++e) {
          w[i][j][e] = static_cast<double>(to_float(reinterpret_cast<const W*>(&raw[i][e])[j]));
        }
      }
    }
  }
  const double router_bias = r.router_bias ? static_cast<double>(__ldg(r.router_bias + expert)) : 0.0;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    Columns c[kAhead] = {};
    if (pass) {
      wait();
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int piece = static_cast<int>(threadIdx.x) + i * kLogitsThreads;
        if (piece < pieces) c[i] = *(static_cast<const Columns*>(r.x) + piece);
      }
      loading();
    }
    double sums[kAhead][kLogitsExperts] = {};  // apart: a step takes 30 cycles
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) {
        const double token = static_cast<double>(to_float(c[i].v[j]));
#pragma unroll
        for (int e = 0; e < kLogitsExperts; ++e) sums[i][e] = fma(w[i][j][e], token, sums[i][e]);
      }
    }
    double sum[kLogitsExperts];
#pragma unroll
    for (int e = 0; e < kLogitsExperts; ++e) {
      sum[e] = sums[0][e] + sums[1][e];
      if (kAhead > 2) sum[e] += sums[kAhead - 1][e];
    }
    int which;
    const double total = sum_over_warp(sum, &which);
    if (lane % (32 / kLogitsExperts) == 0) partial[which][warp] = total;
    __syncthreads();
    if (stores) {
      double parts[kLogitsWarps];
#pragma unroll
      for (int i = 0; i < kLogitsWarps; ++i) parts[i] = partial[threadIdx.x][i];
#pragma unroll
      for (int step = 1; step < kLogitsWarps; step *= 2) {
#pragma unroll
        for (int i = 0; i < kLogitsWarps; i += 2 * step) parts[i] += parts[i + step];
      }
      store(expert, static_cast<float>(r.router_bias ? parts[0] + router_bias : parts[0]), pass != 0);
    }
    __syncthreads();
  }
}
// Logits of eight experts, of eight tokens at a time: the float64 tensor cores, 16 columns after another of each warp.
// Rows are whole pieces of four columns. Weights are here before wait(), as far as there is room.
constexpr int kMmaThreads = 512, kMmaWarps = kMmaThreads / 32, kMmaExperts = 8, kMmaTokens = 8;

template <typename W>
__host__ __device__ __forceinline__ bool suits_mma(const RouterArgs& r) {
  return r.tokens > 1 && r.hidden % 4 == 0;
}
__device__ __forceinline__ void mma_double(double (&d)[2], double a, double b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};\n"
               : "+d"(d[0]), "+d"(d[1])
               : "d"(a), "d"(b));
}
// store(token, expert, logit).
template <typename T, typename W, typename Wait, typename Store>
__device__ __forceinline__ void make_logits_mma(const RouterArgs& r, int first_expert, Wait wait, Store store) {
  constexpr int kAhead = 10;  // chunks of 16 columns
  __shared__ double partial[kMmaWarps][kMmaExperts * kMmaTokens];
  struct alignas(4 * sizeof(W)) Weights {
    W v[4];
  };
  struct alignas(4 * sizeof(T)) Columns {
    T v[4];
  };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const W* row = static_cast<const W*>(r.weight) + int64_t(min(first_expert + g, r.experts - 1)) * r.hidden;
  auto column = [&](int i) { return (warp + i * kMmaWarps) * 16 + t * 4; };
  double w[kAhead][4];
  auto load = [&](int first) {
    Weights raw[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int col = column(first + i);
      raw[i] = col < r.hidden ? *reinterpret_cast<const Weights*>(row + col) : Weights{};
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) w[i][j] = static_cast<double>(to_float(raw[i].v[j]));
    }
  };
  load(0);
  wait();
#pragma unroll 1
  for (int base = 0; base < r.tokens; base += kMmaTokens) {
    const T* x = static_cast<const T*>(r.x) + int64_t(min(base + g, r.tokens - 1)) * r.hidden;
    double sum[4][2] = {};
#pragma unroll 1
    for (int first = 0; column(first) - t * 4 < r.hidden; first += kAhead) {
      Columns c[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int col = column(first + i);
        c[i] = col < r.hidden ? *reinterpret_cast<const Columns*>(x + col) : Columns{};
      }
      if (first > 0 || (base > 0 && column(kAhead) - t * 4 < r.hidden)) load(first);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) mma_double(sum[j], w[i][j], static_cast<double>(to_float(c[i].v[j])));
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // expert g, tokens 2 t and 2 t + 1
      partial[warp][g * kMmaTokens + 2 * t + i] = (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]);
    }
    __syncthreads();
    if (threadIdx.x < kMmaExperts * kMmaTokens) {
      const int expert = first_expert + threadIdx.x / kMmaTokens, token = base + threadIdx.x % kMmaTokens;
      if (expert < r.experts && token < r.tokens) {
        double parts[kMmaWarps];
#pragma unroll
        for (int i = 0; i < kMmaWarps; ++i) parts[i] = partial[i][threadIdx.x];
#pragma unroll
        for (int step = 1; step < kMmaWarps; step *= 2) {
#pragma unroll
          for (int i = 0; i < kMmaWarps; i += 2 * step) parts[i] += parts[i + step];
        }
        if (r.router_bias) parts[0] += static_cast<double>(r.router_bias[expert]);
        store(token, expert, static_cast<float>(parts[0]));
      }
    }
    __syncthreads();
  }
}

template <typename W>
__host__ __device__ __forceinline__ bool one_at_once(const RouterArgs& r) {
  constexpr int kWide = 16 / sizeof(W), kAhead = sizeof(W) == 4 ? 3 : 2;
  return r.tokens == 1 && r.hidden % kWide == 0 && r.hidden / kWide <= kAhead * kLogitsThreads;
}

}  // namespace deltafuse::moe
