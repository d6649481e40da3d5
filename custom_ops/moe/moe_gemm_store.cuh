// The experts' products on Hopper: what becomes of a tile's sums. Rows of the result lie as anybody would store them.
#pragma once

#include "moe_gemm_multiply.cuh"

namespace deltafuse::moe {
namespace sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ float lesser(float x, float y) {  // NaN stays
  float z;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float greater(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// The activation and its limits without branches: this code is unrolled over all sums, and code that runs once a tile
// costs its fetching. SiLU, GELU by tanh (which is x sigmoid(..)) and squared ReLU; GELU by erf takes the other kernel.
__device__ __forceinline__ float sigmoid_of(float negative) {  // 1 / (1 + 2^negative)
  float power, share;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(power) : "f"(negative));
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(share) : "f"(1.0f + power));
  return share;
}
struct Smooth {
  float linear, cubic;        // of the sigmoid's argument, times -log2 e
  float before, after, most;  // limits of the gate and of the other
  bool relu2;
  __device__ __forceinline__ explicit Smooth(const Activity& a) {
    constexpr float kLog2 = -1.4426950408889634f, kInfinity = __builtin_huge_valf();
    const bool silu = a.kind == Activation::kSilu;
    linear = kLog2 * (silu ? 1.0f : 1.5957691216057308f);
    cubic = kLog2 * (silu ? 0.0f : 0.07135481282553f);
    before = a.clamp == Clamp::kBefore ? a.gate_limit : kInfinity;
    after = a.clamp == Clamp::kAfter ? a.gate_limit : kInfinity;
    most = a.clamp == Clamp::kNone ? kInfinity : a.up_limit;
    relu2 = a.kind == Activation::kRelu2;
  }
  __device__ __forceinline__ float operator()(float x) const {
    const float share = sigmoid_of(x * fmaf(cubic * x, x, linear)), positive = greater(x, 0.0f);
    return (relu2 ? positive : x) * (relu2 ? positive : share);
  }
  __device__ __forceinline__ float operator()(float gate, float up) const {
    return lesser((*this)(lesser(gate, before)), after) * lesser(greater(up, -most), most);
  }
};

// The lane, read again where it is used: addresses made from it are not kept in registers over the products.
__device__ __forceinline__ int fresh_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;\n" : "=r"(lane));
  return lane;
}

// Four 8 x 8 matrices of 16-bit numbers, a lane's two of each side by side in a row, to shared memory turned over: lane
// 8 i + r says where column r of matrix i goes.
__device__ __forceinline__ void put_turned(uint32_t at, const uint32_t (&w)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(at), "r"(w[0]),
               "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}
__device__ __forceinline__ uint4 take(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}
// In one piece, whatever the compiler knows of the address.
__device__ __forceinline__ void store8(void* to, uint32_t x, uint32_t y) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};\n" ::"l"(to), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void store16(void* to, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Where a warp turns its sums over: two pieces of 512 bytes in the tile's last stage, which are its own rows' weights.
template <Pack P, int U>
struct Corner {
  static constexpr bool kInteger = P == Pack::kInt4 || P == Pack::kInt8;
  uint32_t at;
  __device__ __forceinline__ Corner(uint32_t stage, const Packed& w) {
    const int warp = threadIdx.x / 32;
    at = stage + warp / 4 * U * w.payload + warp % 4 * (kInteger ? 512 : 2048);
  }
  __device__ __forceinline__ uint32_t piece(int i) const { return at + i % 2 * (kInteger ? 2048 : 512); }
};

// A warp's sums, turned over: a lane gets eight channels of a token. kJoined: gates and ups have become one. Of
// matrices that are side by side the warp has kSide, of 32 / kSide tokens at a time.
template <typename T, int N, int U, bool kJoined>
struct Turned {
  static constexpr int kSide = kJoined ? U : 2 * U, kTokens = 32 / kSide, kTurns = (N + kTokens - 1) / kTokens;
  int lane, token;  // of the first turn
  uint32_t put, from;
  __device__ __forceinline__ explicit Turned(int lane) : lane(lane), token(lane / kSide) {
    put = place_of(lane / 8 / kSide * 8 + lane % 8, lane / 8 % kSide), from = place_of(token, lane % kSide);
  }
  // Pieces of a row change places so that lanes meet different banks.
  static __device__ __forceinline__ uint32_t place_of(int token, int piece) {
    return token * kSide * 16 + (piece ^ (kSide == 4 ? token / 2 % 4 : kSide == 2 ? token / 4 % 2 : 0)) * 16;
  }
  __device__ __forceinline__ int channel(const Work& work) const {
    const int warp = threadIdx.x / 32;  // one-unit warps: of two neighbouring units, eight warps apart, in turn
    const int row = U == 2 ? warp * 32 : (warp / 8 * 4 + warp % 4) * 32 + warp / 4 % 2 * 16;
    return (work.row_tile * 256 + row) / (kJoined ? 2 : 1) + lane % kSide * 8;
  }
  __device__ __forceinline__ uint4 turn(uint32_t piece, int i, float (&d)[U][N / 2]) const {
    uint32_t words[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int side = n % kSide, half = kJoined ? side : side / 2;
      const int at = 4 * (i * (4 / kSide) + n / kSide) + (kJoined ? 0 : side % 2 * 2);
      words[n] = at < N / 2 ? pack_pair(d[half][at], d[half][at + 1], T()) : 0;
    }
    put_turned(piece + put, words);
    __syncwarp();
    return take(piece + from);
  }
};

template <typename T, Pack P, int N, int U, bool kJoined>
__device__ __forceinline__ void store_rows(const GemmArgs& a, const Work& work, const Corner<P, U>& corner,
                                           float (&d)[U][N / 2]) {
  const Turned<T, N, U, kJoined> turned(fresh_lane());
  const int channel = turned.channel(work), count = channel < a.out_cols ? work.count - turned.token : 0;
  T* to = static_cast<T*>(a.out) + int64_t(work.start + turned.token) * a.out_stride + channel;
#pragma unroll
  for (int i = 0; i < turned.kTurns; ++i) {
    const uint4 all = turned.turn(corner.piece(i), i, d);
    if (i * turned.kTokens < count) store16(to, all);
    to += turned.kTokens * a.out_stride;
  }
}

// row_scales: of the tile's float8 tokens.
template <typename T, Pack P, int N, int U>
__device__ __forceinline__ void store(const GemmArgs& a, const Work& work, const Corner<P, U>& corner,
                                      const float* row_scales, float (&d)[U][N / 2]) {
  if constexpr (P == Pack::kFloat8) {
    const uint32_t scales = address(row_scales) + fresh_lane() % 4 * 8;
#pragma unroll
    for (int b = 0; b < N / 8; ++b) {
      const float2 x = load_two(scales + b * 32);
#pragma unroll
      for (int half = 0; half < U; ++half) {
        d[half][4 * b] *= x.x, d[half][4 * b + 1] *= x.y, d[half][4 * b + 2] *= x.x, d[half][4 * b + 3] *= x.y;
      }
    }
  }
  const bool joined = a.activate && a.weights.gated;
  // What most models have, in few steps.
  const bool silu = a.activity.kind == Activation::kSilu && a.activity.clamp == Clamp::kNone;
  const Smooth smooth(a.activity);
#pragma unroll
  for (int half = 0; half < U; ++half) {
    if (a.weights.multiplier) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) d[half][i] *= work.factor;
    }
    if (!a.activate) continue;
    if (!joined) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) d[half][i] = smooth(d[half][i]);
    } else if (silu) {
#pragma unroll
      for (int i = 0; i < N / 2; i += i % 4 ? 3 : 1) {
        d[half][i] = d[half][i] * sigmoid_of(-1.4426950408889634f * d[half][i]) * d[half][i + 2];
      }
    } else {
#pragma unroll
      for (int i = 0; i < N / 2; i += i % 4 ? 3 : 1) d[half][i] = smooth(d[half][i], d[half][i + 2]);
    }
  }
  if (!joined) return store_rows<T, P, N, U, false>(a, work, corner, d);
  store_rows<T, P, N, U, true>(a, work, corner, d);
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sm90
}  // namespace deltafuse::moe
