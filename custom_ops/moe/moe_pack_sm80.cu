// Packing: the model's weights into the order in which the kernels load them. Once a layer.
#include <type_traits>

#include "moe_fragment.cuh"

namespace deltafuse::moe {
namespace {

struct Source {
  Matrix m;
  DType dtype;
  int32_t scale_rows, scale_cols;  // of one expert
};

__device__ __forceinline__ int64_t scale_index(const Source& s, int expert, int row, int col) {
  const int block = s.m.block_size > 0 ? col / s.m.block_size : 0;
  return (int64_t(expert) * s.scale_rows + row / s.m.block_rows) * s.scale_cols + block;
}
__device__ __forceinline__ float scale_at(const Source& s, int expert, int row, int col) {
  return load_any(s.m.scale, scale_index(s, expert, row, col), s.m.scale_float32 ? DType::kFloat32 : s.dtype);
}
// Signed formats are moved up, so that stored numbers and zero points start at 0.
__device__ __forceinline__ int stored_at(const Source& s, int expert, int rows, int cols, int row, int col) {
  const int64_t i = (int64_t(expert) * rows + row) * cols + col;
  const auto* bytes = static_cast<const unsigned char*>(s.m.data);
  switch (s.m.format) {
    case Format::kInt4:
      return ((bytes[i >> 1] >> (4 * (i & 1))) & 15) ^ 8;
    case Format::kUInt4:
      return (bytes[i >> 1] >> (4 * (i & 1))) & 15;
    case Format::kInt8:
      return bytes[i] ^ 128;
    default:
      return bytes[i];
  }
}
__device__ __forceinline__ int zero_at(const Source& s, int expert, int row, int col) {
  const int middle = s.m.format == Format::kInt4 ? 8 : s.m.format == Format::kInt8 ? 128 : 0;
  if (!s.m.has_zero_point) return middle;
  const int64_t i = scale_index(s, expert, row, col);
  if (s.m.format == Format::kInt4 || s.m.format == Format::kInt8) {
    return static_cast<const signed char*>(s.m.zero_point)[i] + middle;
  }
  return static_cast<const unsigned char*>(s.m.zero_point)[i];
}
__device__ __forceinline__ float float8_value(int byte) {
  const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
  float x = exponent ? ldexpf(8.0f + mantissa, exponent - 10) : ldexpf(float(mantissa), -9);
  if ((byte & 127) == 127) x = __int_as_float(0x7fffffff);
  return byte & 128 ? -x : x;
}
__device__ float value_at(const Source& s, int expert, int rows, int cols, int row, int col) {
  const int64_t i = (int64_t(expert) * rows + row) * cols + col;
  if (s.m.format == Format::kFloat) return load_any(s.m.data, i, s.dtype);
  if (s.m.format == Format::kBFloat16) return load_any(s.m.data, i, DType::kBFloat16);
  const int stored = stored_at(s, expert, rows, cols, row, col);
  const float scale = scale_at(s, expert, row, col);
  if (s.m.format == Format::kFloat8) return float8_value(stored) * scale;
  return float(stored - zero_at(s, expert, row, col)) * scale;
}

// The model's row that a unit's row r holds, or -1: gates and ups of eight channels alternate, and the two units of a
// warpgroup hold neighbouring eights, so that a warp's 16 channels (32 rows) lie side by side.
__device__ __forceinline__ int model_row(const Packed& p, int tile, int unit, int r) {
  const int warpgroup = unit / 2, half = unit % 2, warp = r / 16, within = r % 16;
  if (p.gated) {
    const int channel = tile * 128 + warpgroup * 64 + warp * 16 + half * 8 + within % 8;
    return channel < p.rows / 2 ? within / 8 * (p.rows / 2) + channel : -1;
  }
  const int row = tile * 256 + warpgroup * 128 + warp * 32 + half * 16 + within;
  return row < p.rows ? row : -1;
}

template <typename T>
__global__ void __launch_bounds__(256) pack_kernel(Source s, Packed p, unsigned char* out, float* multiplier) {
  const int pieces = p.stage_bytes() / 16;
  const int64_t total = int64_t(p.count) * p.tiles * p.stages * pieces;
  for (int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; index < total;
       index += int64_t(gridDim.x) * blockDim.x) {
    int64_t rest = index / pieces;
    int piece = static_cast<int>(index % pieces);
    const int stage = static_cast<int>(rest % p.stages);
    rest /= p.stages;
    const int tile = static_cast<int>(rest % p.tiles), expert = static_cast<int>(rest / p.tiles);
    const float divide = multiplier ? 1.0f / multiplier[expert] : 1.0f;
    const int per_unit = p.payload / 16;
    __align__(16) unsigned char bytes[16];
    if (piece < 4 * per_unit) {
      const int unit = piece / per_unit;
      piece %= per_unit;
      if (p.pack == Pack::kInt4 || p.pack == Pack::kInt8) {
        const int thread = piece % 128, part = piece / 128, warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
        const int row0 = model_row(p, tile, unit, warp * 16 + g), row1 = model_row(p, tile, unit, warp * 16 + g + 8);
        for (int b = 0; b < 16; ++b) {
          int byte = 0;
          for (int n = 0; n < (p.pack == Pack::kInt4 ? 2 : 1); ++n) {
            int col, second;  // of the operand: is it row g + 8?
            if (p.pack == Pack::kInt4) {
              const int nibble = b % 4 * 2 + n, j = nibble % 4;
              second = j & 1;
              col = stage * 128 + (part * 4 + b / 4) * 16 + 2 * t + nibble / 4 + j / 2 * 8;
            } else {
              const int word = b / 4, within = b % 4;
              second = within & 1;
              col = stage * 128 + (part * 2 + word / 2) * 16 + 2 * t + within / 2 + (word & 1) * 8;
            }
            const int row = second ? row1 : row0;
            if (row >= 0 && col < p.cols) byte |= stored_at(s, expert, p.rows, p.cols, row, col) << (4 * n);
          }
          bytes[b] = static_cast<unsigned char>(byte);
        }
      } else if (p.pack == Pack::kFloat8) {
        const int r = piece / 8, chunk = piece % 8 ^ r % 8, row = model_row(p, tile, unit, r);
        for (int b = 0; b < 16; ++b) {
          const int col = stage * 128 + chunk * 16 + b;
          const bool in = row >= 0 && col < p.cols;
          bytes[b] = static_cast<unsigned char>(in ? stored_at(s, expert, p.rows, p.cols, row, col) : 0);
        }
      } else {
        constexpr int kElements = 16 / sizeof(T);
        constexpr int kPieces = 64 / kElements;  // of a row
        const int r = piece / kPieces, row = model_row(p, tile, unit, r);
        const int chunk = sizeof(T) == 2 ? piece % 8 ^ r % 8 : piece % kPieces;
        for (int b = 0; b < kElements; ++b) {
          const int col = stage * 64 + chunk * kElements + b;
          const bool in = row >= 0 && col < p.cols;
          reinterpret_cast<T*>(bytes)[b] =
              from_float<T>(in ? value_at(s, expert, p.rows, p.cols, row, col) * divide : 0.0f);
        }
      }
    } else {
      piece -= 4 * per_unit;
      const int unit = piece / (p.tail / 16), element = p.pack == Pack::kFloat8 ? 4 : static_cast<int>(sizeof(T));
      const int first = piece % (p.tail / 16) * (16 / element);
      for (int b = 0; b < 16 / element; ++b) {
        const int i = first + b, r = i % 64, sub = i / 64 % p.sub, zero = i / 64 / p.sub;
        const int row = model_row(p, tile, unit, r), col = stage * 128 + sub * (128 / p.sub);
        float x = 0.0f;
        if (row >= 0 && col < p.cols) {
          x = zero ? static_cast<float>(zero_at(s, expert, row, col)) : scale_at(s, expert, row, col) * divide;
        }
        if (element == 4) {
          reinterpret_cast<float*>(bytes)[b] = x;
        } else {
          reinterpret_cast<T*>(bytes)[b] = from_float<T>(x);
        }
      }
    }
    reinterpret_cast<uint4*>(out)[index] = *reinterpret_cast<const uint4*>(bytes);
  }
}

// One block an expert: the power of two at or above its largest scale (or weight, where there are no scales).
__global__ void __launch_bounds__(256) multiplier_kernel(Source s, int64_t elements, float* multiplier) {
  __shared__ float largest[256];
  float most = 0.0f;
  for (int64_t i = threadIdx.x; i < elements; i += 256) {
    const int64_t at = blockIdx.x * elements + i;
    const float x = s.m.format == Format::kBFloat16
                        ? load_any(s.m.data, at, DType::kBFloat16)
                        : load_any(s.m.scale, at, s.m.scale_float32 ? DType::kFloat32 : s.dtype);
    if (fabsf(x) <= 3.0e38f) most = fmaxf(most, fabsf(x));
  }
  largest[threadIdx.x] = most;
  __syncthreads();
  for (int step = 128; step > 0; step /= 2) {
    if (threadIdx.x < step) largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + step]);
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    int exponent = 0;
    if (largest[0] > 0.0f) frexpf(largest[0], &exponent);
    multiplier[blockIdx.x] = ldexpf(1.0f, max(-120, min(120, exponent)));
  }
}

template <typename T>
__global__ void __launch_bounds__(256) pad_kernel(const T* x, T* out, int64_t rows, int cols, int padded) {
  const int64_t total = rows * padded;
  for (int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x; i < total; i += int64_t(gridDim.x) * 256) {
    const int col = static_cast<int>(i % padded);
    out[i] = col < cols ? x[i / padded * cols + col] : T(0);
  }
}

__global__ void any_kernel() {}

unsigned blocks_for(int64_t threads) {
  const int64_t blocks = (threads + 255) / 256;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > 65536 ? 65536 : blocks);
}

}  // namespace

cudaError_t compiled_capability(int* capability) {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, any_kernel);
  if (status == cudaSuccess) *capability = attributes.ptxVersion;
  return status;
}

cudaError_t launch_pack(const Matrix& from, const Packed& to, float* multiplier, DType dtype, cudaStream_t stream) {
  Source s{from, dtype, (to.rows + from.block_rows - 1) / from.block_rows,
           from.block_size > 0 ? (to.cols + from.block_size - 1) / from.block_size : 1};
  if (multiplier) {
    const int64_t elements =
        from.format == Format::kBFloat16 ? int64_t(to.rows) * to.cols : int64_t(s.scale_rows) * s.scale_cols;
    multiplier_kernel<<<to.count, 256, 0, stream>>>(s, elements, multiplier);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) return status;
  }
  auto* out = const_cast<unsigned char*>(to.data);
  const unsigned blocks = blocks_for(static_cast<int64_t>(to.bytes() / 16));
  switch (dtype) {
    case DType::kFloat32:
      pack_kernel<float><<<blocks, 256, 0, stream>>>(s, to, out, multiplier);
      break;
    case DType::kFloat16:
      pack_kernel<__half><<<blocks, 256, 0, stream>>>(s, to, out, multiplier);
      break;
    case DType::kBFloat16:
      pack_kernel<__nv_bfloat16><<<blocks, 256, 0, stream>>>(s, to, out, multiplier);
      break;
  }
  return cudaGetLastError();
}

cudaError_t launch_pad(const void* x, void* out, int64_t rows, int cols, int padded, int element, cudaStream_t stream) {
  const unsigned blocks = blocks_for(rows * padded);
  if (element == 4) {
    pad_kernel<<<blocks, 256, 0, stream>>>(static_cast<const uint32_t*>(x), static_cast<uint32_t*>(out), rows, cols,
                                           padded);
  } else {
    pad_kernel<<<blocks, 256, 0, stream>>>(static_cast<const uint16_t*>(x), static_cast<uint16_t*>(out), rows, cols,
                                           padded);
  }
  return cudaGetLastError();
}

}  // namespace deltafuse::moe
