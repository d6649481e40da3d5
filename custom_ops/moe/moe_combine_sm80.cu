// Around the experts' products: rows to float8, and the weighted sum of the experts with the shared one.
#include "moe_dependent.h"
#include "moe_float8_rows.cuh"

namespace deltafuse::moe {
namespace {

constexpr int kFloat8Rows = 4;  // of a warp
template <typename T>
__global__ void __launch_bounds__(256) float8_kernel(Float8Args a) {
  const int64_t row = (int64_t(blockIdx.x) * 8 + threadIdx.x / 32) * kFloat8Rows;
  wait_previous();
  release_next();
  if (row >= a.rows) return;
  const int count = static_cast<int>(min(a.rows - row, int64_t{kFloat8Rows}));
  if (a.cols <= 1024) return float8_rows<T, kFloat8Rows, 4>(a, row, 1, count);
  for (int i = 0; i < count; ++i) float8_rows<T, 1, 10>(a, row + i, 1, 1);
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
  wait_previous();
  release_next();
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
cudaError_t combine(const CombineArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const int elements = 16 / static_cast<int>(sizeof(T));
  const unsigned blocks = static_cast<unsigned>(a.tokens);
  if (a.hidden % elements != 0 || a.out_stride % elements != 0) {
    return launch_dependent(combine_kernel<T, Narrow<T>, 0>, {blocks, combine_threads(a.hidden)}, device, stream, a);
  }
  const auto kernel = a.top_k == 8 ? combine_kernel<T, Wide<T>, 8> : combine_kernel<T, Wide<T>, 0>;
  return launch_dependent(kernel, {blocks, combine_threads(a.hidden / elements)}, device, stream, a);
}

}  // namespace

cudaError_t launch_float8(const Float8Args& args, DType dtype, const DeviceInfo& device, cudaStream_t stream) {
  const auto kernel = dtype == DType::kFloat16 ? float8_kernel<__half> : float8_kernel<__nv_bfloat16>;
  const unsigned blocks = static_cast<unsigned>((args.rows + 8 * kFloat8Rows - 1) / (8 * kFloat8Rows));
  return launch_dependent(kernel, {blocks, 256}, device, stream, args);
}

cudaError_t launch_combine(const CombineArgs& args, DType dtype, const DeviceInfo& device, cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat32:
      return combine<float>(args, device, stream);
    case DType::kFloat16:
      return combine<__half>(args, device, stream);
    case DType::kBFloat16:
      return combine<__nv_bfloat16>(args, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace deltafuse::moe
