// The experts' products on Hopper: what becomes of a tile's sums. Rows of the result lie as anybody would store them.
#pragma once

#include "moe_gemm_parts.cuh"

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
// In one piece whatever the compiler knows of the address.
__device__ __forceinline__ void store16(void* to, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Where a warp turns its sums over: two pieces of 512 bytes in the tile's last stage, which are its own rows' weights.
template <Pack P>
struct Corner {
  static constexpr int kApart = P == Pack::kInt4 || P == Pack::kInt8 ? 2048 : 512;
  uint32_t at;
  __device__ __forceinline__ Corner(uint32_t stage, const Packed& w) {
    const int warp = threadIdx.x / 32;
    at = stage + warp / 4 * 2 * w.payload + warp % 4 * (P == Pack::kInt4 || P == Pack::kInt8 ? 512 : 2048);
  }
  __device__ __forceinline__ uint32_t piece(int i) const { return at + i % 2 * kApart; }
};

// Rows as they are: of the second product, or where there is no gate. A warp has 32 channels: eight tokens at a time.
template <typename T, Pack P, int N>
__device__ __forceinline__ void store_rows(const GemmArgs& a, const Work& work, Corner<P> corner,
                                           float (&d)[2][N / 2]) {
  const int lane = fresh_lane(), t = lane % 4, channel = work.row_tile * 256 + threadIdx.x / 32 * 32 + t * 8;
  const uint32_t put = lane % 8 * 64 + ((lane / 8 ^ lane % 8 / 2) * 16);
  const uint32_t from = lane / 4 * 64 + ((t ^ lane / 8) * 16);
  T* to = static_cast<T*>(a.out) + int64_t(work.start + lane / 4) * a.out_stride + channel;
  const int count = channel < a.out_cols ? work.count - lane / 4 : 0;
#pragma unroll
  for (int b = 0; b < N / 8; ++b) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = pack_pair(d[i / 2][4 * b + i % 2 * 2], d[i / 2][4 * b + i % 2 * 2 + 1], T());
    }
    put_turned(corner.piece(b) + put, words);
    __syncwarp();
    const uint4 all = take(corner.piece(b) + from);
    if (b * 8 < count) store16(to, all);
    to += 8 * a.out_stride;
  }
}

// Gates with their ups: 16 channels of a warp, 16 tokens at a time. A lane gets eight channels of token lane / 2.
template <typename T, Pack P, int N>
__device__ __forceinline__ uint4 turn_joined(Corner<P> corner, int lane, int pair, float (&d)[2][N / 2]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = 4 * (2 * pair + i / 2);
    words[i] = pack_pair(d[i % 2][at], d[i % 2][at + 1], T());
  }
  put_turned(corner.piece(pair) + (lane / 16 * 8 + lane % 8) * 32 + ((lane / 8 ^ lane / 4) & 1) * 16, words);
  __syncwarp();
  return take(corner.piece(pair) + lane / 2 * 32 + ((lane ^ lane / 8) & 1) * 16);
}

template <typename T, Pack P, int N>
__device__ __forceinline__ void store_joined(const GemmArgs& a, const Work& work, Corner<P> corner,
                                             float (&d)[2][N / 2]) {
  const int lane = fresh_lane(), channel = work.row_tile * 128 + threadIdx.x / 32 * 16 + lane % 2 * 8;
  T* to = static_cast<T*>(a.out) + int64_t(work.start + lane / 2) * a.out_stride + channel;
  const int count = channel < a.out_cols ? work.count - lane / 2 : 0;
#pragma unroll
  for (int pair = 0; pair < N / 16; ++pair) {
    const uint4 all = turn_joined<T, P, N>(corner, lane, pair, d);
    if (pair * 16 < count) store16(to, all);
    to += 16 * a.out_stride;
  }
}

// The same as float8: the tile's 128 channels of a token share a scale. Numbers are bfloat16 on their way.
template <int N>
__device__ __forceinline__ void store_float8(const GemmArgs& a, const Work& work, Corner<Pack::kFloat8> corner,
                                             uint16_t (*largest)[most_tokens(Pack::kFloat8)], float* inverse,
                                             float (&d)[2][N / 2]) {
  const int consumer = threadIdx.x, lane = fresh_lane(), token = lane / 2;
  uint4 turned[N / 16];
#pragma unroll
  for (int pair = 0; pair < N / 16; ++pair) {
    const uint4 v = turned[pair] = turn_joined<__nv_bfloat16, Pack::kFloat8, N>(corner, lane, pair, d);
    constexpr uint32_t kSize = 0x7fff7fffu;  // bfloat16 of one sign are in the order of their bits
    const uint32_t w[4] = {v.x & kSize, v.y & kSize, v.z & kSize, v.w & kSize};
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) most = max(most, max(w[i] >> 16, w[i] & 0xffffu));
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    if (lane % 2 == 0) largest[consumer / 32][pair * 16 + token] = static_cast<uint16_t>(most);
  }
  named_barrier(1, kConsumers);
  if (consumer < N) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) bits = max(bits, static_cast<uint32_t>(largest[i][consumer]));
    const float most = __uint_as_float(bits << 16);
    inverse[consumer] = most > 0.0f ? 448.0f / most : 1.0f;
    if (consumer < work.count) {
      a.out_scale[int64_t(work.start + consumer) * a.out_blocks + work.row_tile] = most > 0.0f ? most / 448.0f : 1.0f;
    }
  }
  named_barrier(1, kConsumers);
  const int channel = work.row_tile * 128 + consumer / 32 * 16 + lane % 2 * 8;
  uint8_t* to = static_cast<uint8_t*>(a.out) + int64_t(work.start + token) * a.out_stride + channel;
  const int count = work.count - token;
#pragma unroll
  for (int pair = 0; pair < N / 16; ++pair) {
    const float by = inverse[pair * 16 + token];
    const uint32_t w[4] = {turned[pair].x, turned[pair].y, turned[pair].z, turned[pair].w};
    uint32_t bytes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = unpack_pair(w[2 * i], __nv_bfloat16()), y = unpack_pair(w[2 * i + 1], __nv_bfloat16());
      uint16_t low, high;
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(low) : "f"(x.y * by), "f"(x.x * by));
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(high) : "f"(y.y * by), "f"(y.x * by));
      bytes[i] = low | static_cast<uint32_t>(high) << 16;
    }
    if (pair * 16 < count) *reinterpret_cast<uint2*>(to) = make_uint2(bytes[0], bytes[1]);
    to += 16 * a.out_stride;
  }
}

template <typename T, Pack P, int N>
__device__ __forceinline__ void store(const GemmArgs& a, const Work& work, Corner<P> corner,
                                      uint16_t (*largest)[most_tokens(Pack::kFloat8)], float* inverse,
                                      float (&d)[2][N / 2]) {
  if (a.weights.multiplier) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[0][i] *= work.factor, d[1][i] *= work.factor;
  }
  if (!(a.activate && a.weights.gated)) {
    if (a.activate) {
      const Smooth smooth(a.activity);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) d[0][i] = smooth(d[0][i]), d[1][i] = smooth(d[1][i]);
      pin(d[0]), pin(d[1]);
    }
    return store_rows<T, P, N>(a, work, corner, d);
  }
  if (a.activity.kind == Activation::kSilu &&
      a.activity.clamp == Clamp::kNone) {  // what most models have, in few steps
    auto join = [](float gate, float up) { return gate * sigmoid_of(-1.4426950408889634f * gate) * up; };
#pragma unroll
    for (int i = 0; i < N / 2; i += i % 4 ? 3 : 1) {
      d[0][i] = join(d[0][i], d[0][i + 2]), d[1][i] = join(d[1][i], d[1][i + 2]);
    }
  } else {
    const Smooth smooth(a.activity);
#pragma unroll
    for (int i = 0; i < N / 2; i += i % 4 ? 3 : 1) {
      d[0][i] = smooth(d[0][i], d[0][i + 2]), d[1][i] = smooth(d[1][i], d[1][i + 2]);
    }
  }
  if constexpr (P == Pack::kFloat8) {
    if (a.out_scale) return store_float8<N>(a, work, corner, largest, inverse, d);
  }
  store_joined<T, P, N>(a, work, corner, d);
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sm90
}  // namespace deltafuse::moe
