#include "mla_maps.h"

namespace deltafuse::mla {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

cudaError_t find_encoder(Encode* encode) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  if (status != cudaSuccess) return status;
  if (result != cudaDriverEntryPointSuccess || !found) return cudaErrorNotSupported;
  *encode = reinterpret_cast<Encode>(found);
  return cudaSuccess;
}

cudaError_t encode(CUtensorMap* map, CUtensorMapDataType type, CUtensorMapSwizzle swizzle, int rank, const void* data,
                   const uint64_t* sizes, const uint64_t* strides, const uint32_t* box) {
  static Encode encoder = nullptr;
  if (!encoder) {
    Encode found = nullptr;
    const cudaError_t status = find_encoder(&found);
    if (status != cudaSuccess) return status;
    encoder = found;
  }
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result = encoder(
      map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(data), reinterpret_cast<const cuuint64_t*>(sizes),
      reinterpret_cast<const cuuint64_t*>(strides), box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t make_map(CUtensorMap* map, DType dtype, int rank, const void* data, const uint64_t* sizes,
                     const uint64_t* strides, const uint32_t* box) {
  const auto type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(map, type, CU_TENSOR_MAP_SWIZZLE_128B, rank, data, sizes, strides, box);
}

cudaError_t make_map(CUtensorMap* map, MapType type, int rank, const void* data, const uint64_t* sizes,
                     const uint64_t* strides, const uint32_t* box) {
  return encode(map, type == MapType::kCodes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                CU_TENSOR_MAP_SWIZZLE_NONE, rank, data, sizes, strides, box);
}

cudaError_t make_map(CUtensorMap* map, DType dtype, const Heads& h, uint32_t tokens) {
  const uint64_t size = static_cast<uint64_t>(size_of(dtype));
  const uint64_t sizes[4] = {uint64_t(h.width), uint64_t(h.heads), uint64_t(h.tokens), uint64_t(h.batch)};
  const uint64_t strides[3] = {h.head_stride * size, h.token_stride * size, h.batch_stride * size};
  const uint32_t box[4] = {64, 1, tokens, 1};
  return make_map(map, dtype, 4, h.data, sizes, strides, box);
}

}  // namespace deltafuse::mla
