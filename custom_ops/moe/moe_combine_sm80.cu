// Around the experts' products: rows to float8, and the weighted sum of the experts with the shared one.
#include <cuda_fp8.h>

#include "moe_device.cuh"

namespace deltafuse::moe {
namespace {

// A warp takes a row, blocks of 128 columns one after the other: the largest of a block becomes 448.
template <typename T>
__global__ void __launch_bounds__(256) float8_kernel(Float8Args a) {
  const int64_t row = int64_t(blockIdx.x) * 8 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= a.rows) return;
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  uint8_t* out = a.out + row * a.blocks * 128;
#pragma unroll 4
  for (int b = 0; b < a.blocks; ++b) {
    const int col = b * 128 + lane * 4;
    uint2 words = make_uint2(0, 0);
    if (col < a.cols) words = *reinterpret_cast<const uint2*>(x + col);
    const float2 low = unpack_pair(words.x, T()), high = unpack_pair(words.y, T());
    float most = fmaxf(fmaxf(fabsf(low.x), fabsf(low.y)), fmaxf(fabsf(high.x), fabsf(high.y)));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float by = most > 0.0f ? most / 448.0f : 1.0f, times = 1.0f / by;
    const float v[4] = {low.x * times, low.y * times, high.x * times, high.y * times};
    uint32_t packed = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      packed |= static_cast<uint32_t>(__nv_cvt_float_to_fp8(v[i], __NV_SATFINITE, __NV_E4M3)) << (8 * i);
    }
    *reinterpret_cast<uint32_t*>(out + col) = packed;
    if (lane == 0) a.scale[row * a.blocks + b] = by;
  }
}

// Elements of a row that a thread takes: 16 bytes, or one where rows are not made of those. Read once, kept as they
// came.
template <typename T>
struct Wide {
  static constexpr int kElements = 16 / sizeof(T);
  uint4 words;
  __device__ __forceinline__ void load(const T* p) { words = __ldcs(reinterpret_cast<const uint4*>(p)); }
  __device__ __forceinline__ void add_to(float (&sum)[kElements], float weight) const {
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        sum[i] = fmaf(weight, __uint_as_float(w[i]), sum[i]);
      } else {
        const float2 v = unpack_pair(w[i], T());
        sum[2 * i] = fmaf(weight, v.x, sum[2 * i]), sum[2 * i + 1] = fmaf(weight, v.y, sum[2 * i + 1]);
      }
    }
  }
  __device__ __forceinline__ static void store(T* to, const float (&sum)[kElements]) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        w[i] = __float_as_uint(sum[i]);
      } else {
        w[i] = pack_pair(sum[2 * i], sum[2 * i + 1], T());
      }
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
  }
};
template <typename T>
struct Narrow {
  static constexpr int kElements = 1;
  T value;
  __device__ __forceinline__ void load(const T* p) { value = *p; }
  __device__ __forceinline__ void add_to(float (&sum)[1], float weight) const {
    sum[0] = fmaf(weight, to_float(value), sum[0]);
  }
  __device__ __forceinline__ static void store(T* to, const float (&sum)[1]) { *to = from_float<T>(sum[0]); }
};

// A block a token, 16 bytes a thread. Experts are added in the order of the choice; rows of eight are on their way at
// once, in few registers: many blocks have to wait together. kTopK: how many experts a token has, 0 if others than 8.
template <typename T, typename Piece, int kTopK>
__global__ void __launch_bounds__(512, 2) combine_kernel(CombineArgs a) {
  constexpr int kElements = Piece::kElements, kTogether = 8;
  const int top_k = kTopK ? kTopK : a.top_k;
  __shared__ float parts[16];
  __shared__ float gate;
  const int token = blockIdx.x;
  if (a.shared_gate) {
    float sum = 0.0f;
    for (int k = threadIdx.x; k < a.hidden; k += blockDim.x) {
      sum = fmaf(to_float(static_cast<const T*>(a.x)[int64_t(token) * a.hidden + k]),
                 load_any(a.shared_gate, k, a.shared_gate_type), sum);
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      float all = 0.0f;
      for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) all += parts[i];
      gate = 1.0f / (1.0f + expf(-all));
    }
    __syncthreads();
  }
  const float share = a.shared_gate ? gate : 1.0f;
  const T* out = static_cast<const T*>(a.out);
  const int32_t* positions = a.positions + int64_t(token) * top_k;
  const float* weights = a.weights + int64_t(token) * top_k;
  for (int col = threadIdx.x * kElements; col < a.hidden; col += blockDim.x * kElements) {
    float sum[kElements] = {};
    Piece shared{};
    if (a.shared) shared.load(static_cast<const T*>(a.shared) + token * a.shared_stride + col);
    for (int first = 0; first < top_k; first += kTogether) {
      Piece piece[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (first + j < top_k) piece[j].load(out + __ldg(positions + first + j) * a.out_stride + col);
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (first + j < top_k) piece[j].add_to(sum, __ldg(weights + first + j));
      }
    }
    if (a.shared) shared.add_to(sum, share);
    Piece::store(static_cast<T*>(a.y) + int64_t(token) * a.hidden + col, sum);
  }
}

// The threads that leave fewest idle, so that each has a piece in every round.
int combine_threads(int pieces) {
  const int rounds = (pieces + 511) / 512, each = (pieces + rounds - 1) / rounds;
  return (each + 31) / 32 * 32;
}

template <typename T>
cudaError_t combine(const CombineArgs& a, cudaStream_t stream) {
  const int elements = 16 / static_cast<int>(sizeof(T));
  const unsigned blocks = static_cast<unsigned>(a.tokens);
  if (a.hidden % elements != 0 || a.out_stride % elements != 0) {
    combine_kernel<T, Narrow<T>, 0><<<blocks, combine_threads(a.hidden), 0, stream>>>(a);
  } else if (a.top_k == 8) {
    combine_kernel<T, Wide<T>, 8><<<blocks, combine_threads(a.hidden / elements), 0, stream>>>(a);
  } else {
    combine_kernel<T, Wide<T>, 0><<<blocks, combine_threads(a.hidden / elements), 0, stream>>>(a);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_float8(const Float8Args& args, DType dtype, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>((args.rows + 7) / 8);
  if (dtype == DType::kFloat16) {
    float8_kernel<__half><<<blocks, 256, 0, stream>>>(args);
  } else {
    float8_kernel<__nv_bfloat16><<<blocks, 256, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

cudaError_t launch_combine(const CombineArgs& args, DType dtype, cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat32:
      return combine<float>(args, stream);
    case DType::kFloat16:
      return combine<__half>(args, stream);
    case DType::kBFloat16:
      return combine<__nv_bfloat16>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace deltafuse::moe
