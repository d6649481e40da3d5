// The experts' products for any GPU from 8.0 on and for float32: weights go from global memory into a warp's registers,
// tokens through shared memory. 64 rows by 64 tokens a block.
#include "moe_fragment.cuh"

namespace deltafuse::moe {
namespace {

constexpr int kTokens = 64;
constexpr int kStride = 128 + 8;  // elements of a staged token

// How a kernel computes: E is a matrix operand's element, kTerms how many of them stand for one number.
template <typename T>
struct Numbers {
  using E = T;
  static constexpr int kTerms = 1;
};
template <>
struct Numbers<float> {  // 16 bits of mantissa and float32's range
  using E = __nv_bfloat16;
  static constexpr int kTerms = 2;
};

template <typename T>
__device__ __forceinline__ void split(float x, float y, uint32_t (&out)[Numbers<T>::kTerms]) {
  using E = typename Numbers<T>::E;
  out[0] = pack_pair(x, y, E());
  if constexpr (Numbers<T>::kTerms == 2) {
    const float2 high = unpack_pair(out[0], E());
    // Infinity and NaN have no remainder.
    out[1] = pack_pair(fabsf(high.x) <= 3.4e38f ? x - high.x : 0.0f, fabsf(high.y) <= 3.4e38f ? y - high.y : 0.0f, E());
  }
}

// A lane's part of 16 weight rows by 128 columns, and its steps as left operands.
template <typename T, Pack P>
struct Left {
  static constexpr int kTerms = Numbers<T>::kTerms;
  static constexpr bool kFloat = sizeof(T) == 4;
  static constexpr bool kDirect = kFloat && P == Pack::kPlain;  // float32 weights, in rows of 64
  using E = typename Numbers<T>::E;
  static constexpr int kUnits = Shape<P>::kUnitsPerBlock;
  uint4 words[kDirect ? 1 : kUnits][Shape<P>::kWords];
  const unsigned char* stage;

  __device__ __forceinline__ void load(const Packed& w, const unsigned char* at, int unit, int warp, int lane) {
    stage = at;
    if constexpr (!kDirect) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        load_unit<P>(words[u], at + u * w.stage_bytes() + unit * w.payload, warp, lane);
      }
    }
  }
  __device__ __forceinline__ void step(const Packed& w, int s, int unit, int warp, int lane,
                                       uint32_t (&a)[kTerms][4]) const {
    const int row = warp * 16 + lane / 4;
    float scale[2] = {1.0f, 1.0f}, zero[2] = {Raw<E, P>::kMiddle, Raw<E, P>::kMiddle};
    const unsigned char* tail = stage + 4 * w.payload + unit * w.tail;
    if constexpr (Raw<E, P>::kInteger) {
      const T* values = reinterpret_cast<const T*>(tail) + (w.sub == 1 ? 0 : s / 2 * 64);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scale[i] = to_float(values[row + 8 * i]);
        if (w.zeros) zero[i] = to_float(values[w.sub * 64 + row + 8 * i]);
      }
    } else if constexpr (P == Pack::kFloat8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) scale[i] = reinterpret_cast<const float*>(tail)[row + 8 * i];
    }
    if constexpr (kDirect) {
      const unsigned char* rows =
          stage + s / 4 * w.stage_bytes() + unit * w.payload + row * 256 + (s % 4 * 16 + lane % 4 * 2) * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = *reinterpret_cast<const float2*>(rows + (i & 1) * 8 * 256 + i / 2 * 32);
        uint32_t terms[kTerms];
        split<T>(x.x, x.y, terms);
#pragma unroll
        for (int n = 0; n < kTerms; ++n) a[n][i] = terms[n];
      }
    } else if constexpr (kFloat) {
      uint32_t raw[4], high[4];
      Raw<E, P>::step(words[s / Shape<P>::kSteps], s % Shape<P>::kSteps, raw, high);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 x = unpack_pair(raw[i], E());
        if constexpr (Raw<E, P>::kHalves) {
          const float2 y = unpack_pair(high[i], E());
          x.x = fmaf(16.0f, y.x, x.x), x.y = fmaf(16.0f, y.y, x.y);
        }
        const float off = Raw<E, P>::kInteger ? Raw<E, P>::kBase + zero[i & 1] : 0.0f;
        uint32_t terms[kTerms];
        split<T>((x.x - off) * scale[i & 1], (x.y - off) * scale[i & 1], terms);
#pragma unroll
        for (int n = 0; n < kTerms; ++n) a[n][i] = terms[n];
      }
    } else if constexpr (P == Pack::kPlain) {
      uint32_t high[4];
      Raw<T, P>::step(words[s / 4], s % 4, a[0], high);
    } else {
      const float factor = Raw<T, P>::kFactor;
      Scaled<T, P>::step(words[0], s, twice<T>(scale[0] * factor), twice<T>(scale[1] * factor),
                         twice<T>(Scaled<T, P>::offset(zero[0])), twice<T>(Scaled<T, P>::offset(zero[1])), a[0]);
    }
  }
};

// A lane's right operand of a step, from a token's 128 columns in their own order.
template <Pack P, bool kNatural>
__device__ __forceinline__ uint2 right_operand(const uint16_t* row, int s, int t) {
  if constexpr (kNatural) {
    return make_uint2(*reinterpret_cast<const uint32_t*>(row + 16 * s + 2 * t),
                      *reinterpret_cast<const uint32_t*>(row + 16 * s + 2 * t + 8));
  } else if constexpr (P == Pack::kFloat8) {
    const uint2 w = *reinterpret_cast<const uint2*>(row + (t + s / 4 * 4) * 16 + s % 4 * 4);
    return make_uint2(__byte_perm(w.x, w.y, 0x5410), __byte_perm(w.x, w.y, 0x7632));
  } else {
    return *reinterpret_cast<const uint2*>(row + s / 4 * 64 + (t + s % 4 / 2 * 4) * 8 + (s & 1) * 4);
  }
}

template <typename T, Pack P>
__global__ void __launch_bounds__(128) gemm_kernel(GemmArgs a) {
  constexpr int kTerms = Numbers<T>::kTerms;
  using E = typename Numbers<T>::E;
  extern __shared__ __align__(16) uint16_t tokens[];  // [kTerms][kTokens][kStride]
  if (static_cast<int>(blockIdx.y) >= *a.num_tiles) return;
  const TokenTile tokens_of = a.tiles[blockIdx.y];
  const Packed& w = a.weights;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x / 4, unit = blockIdx.x % 4;
  const unsigned char* weights = w.data + tokens_of.expert * w.expert_bytes() + tile * w.tile_bytes();
  const int64_t block_bytes = int64_t(Shape<P>::kUnitsPerBlock) * w.stage_bytes();
  // Two threads a token, 64 columns each.
  const int own = threadIdx.x / 2, col0 = threadIdx.x % 2 * 64;
  const T* from = nullptr;
  if (own < tokens_of.count) {
    const int64_t row = a.rows ? a.rows[tokens_of.start + own] : tokens_of.start + own;
    from = reinterpret_cast<const T*>(static_cast<const unsigned char*>(a.x) + row * a.x_stride);
  }
  float sum[kTokens / 8][4] = {};
  constexpr bool kNatural = P == Pack::kInt4 || P == Pack::kInt8 || Left<T, P>::kDirect;
  for (int k = 0; k < w.blocks(); ++k) {
    Left<T, P> left;
    left.load(w, weights + k * block_bytes, unit, warp, lane);
    __syncthreads();
    constexpr int kWide = 16 / sizeof(T);
#pragma unroll 4
    for (int i = 0; i < 64; i += kWide) {
      const int col = k * 128 + col0 + i;
      uint4 words = make_uint4(0, 0, 0, 0);
      if (from && col < a.x_cols) words = *reinterpret_cast<const uint4*>(from + col);
      uint16_t* to = tokens + own * kStride + col0 + i;
      if constexpr (kTerms == 1) {
        *reinterpret_cast<uint4*>(to) = words;
      } else {
        const float* values = reinterpret_cast<const float*>(&words);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          uint32_t terms[kTerms];
          split<T>(values[j], values[j + 1], terms);
#pragma unroll
          for (int n = 0; n < kTerms; ++n) *reinterpret_cast<uint32_t*>(to + n * kTokens * kStride + j) = terms[n];
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      uint32_t x[kTerms][4];
      left.step(w, s, unit, warp, lane, x);
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
        if (n * 8 >= tokens_of.count) break;
        const uint16_t* row = tokens + (n * 8 + g) * kStride;
        const uint2 b = right_operand<P, kNatural>(row, s, t);
        mma(sum[n], x[0], b.x, b.y, E());
        if constexpr (kTerms == 2) {
          const uint2 low = right_operand<P, kNatural>(row + kTokens * kStride, s, t);
          mma(sum[n], x[0], low.x, low.y, E());
          mma(sum[n], x[1], b.x, b.y, E());
        }
      }
    }
  }
  const float factor = w.multiplier ? w.multiplier[tokens_of.expert] : 1.0f;
  T* out = static_cast<T*>(a.out);
#pragma unroll
  for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = n * 8 + 2 * t + i;
      if (token >= tokens_of.count) continue;
      T* row = out + int64_t(tokens_of.start + token) * a.out_stride;
      const float low = sum[n][i] * factor, high = sum[n][2 + i] * factor;
      if (a.activate && w.gated) {
        const int channel = tile * 128 + unit / 2 * 64 + warp * 16 + unit % 2 * 8 + g;
        if (channel < a.out_cols) row[channel] = from_float<T>(join(a.activity, low, high));
      } else {
        const int channel = tile * 256 + unit / 2 * 128 + warp * 32 + unit % 2 * 16 + g;
        const bool act = a.activate;
        if (channel < a.out_cols) row[channel] = from_float<T>(act ? activate(a.activity.kind, low) : low);
        if (channel + 8 < a.out_cols) row[channel + 8] = from_float<T>(act ? activate(a.activity.kind, high) : high);
      }
    }
  }
}

template <typename T, Pack P>
cudaError_t launch(const GemmArgs& a, int64_t max_tiles, cudaStream_t stream) {
  const int shared = Numbers<T>::kTerms * kTokens * kStride * 2;
  const dim3 grid(static_cast<unsigned>(a.weights.tiles * 4), static_cast<unsigned>(max_tiles));
  gemm_kernel<T, P><<<grid, 128, shared, stream>>>(a);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_type(const GemmArgs& a, int64_t max_tiles, cudaStream_t stream) {
  switch (a.weights.pack) {
    case Pack::kPlain:
      return launch<T, Pack::kPlain>(a, max_tiles, stream);
    case Pack::kInt4:
      return launch<T, Pack::kInt4>(a, max_tiles, stream);
    case Pack::kInt8:
      return launch<T, Pack::kInt8>(a, max_tiles, stream);
    case Pack::kFloat8:
      return launch<T, Pack::kFloat8>(a, max_tiles, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_gemm_sm80(const GemmArgs& args, DType dtype, int64_t max_tiles, cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat32:
      return launch_type<float>(args, max_tiles, stream);
    case DType::kFloat16:
      return launch_type<__half>(args, max_tiles, stream);
    case DType::kBFloat16:
      return launch_type<__nv_bfloat16>(args, max_tiles, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace deltafuse::moe
