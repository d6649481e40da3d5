// Tensor maps for the copy engine. The driver's encoder is looked up at run time: a library with these kernels loads on
// a machine that has no driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "mla_launch.h"

namespace deltafuse::mla {

// A tensor of 16-bit elements of `rank` sizes, the innermost dense; `strides` in bytes for the others; fetched as boxes
// whose innermost 64 elements are swizzled in 128 bytes. What lies outside reads as zeros.
cudaError_t make_map(CUtensorMap* map, DType dtype, int rank, const void* data, const uint64_t* sizes,
                     const uint64_t* strides, const uint32_t* box);
// The same for 8-bit codes and for float32, with any innermost size and not swizzled.
enum class MapType { kCodes, kFloat32 };
cudaError_t make_map(CUtensorMap* map, MapType type, int rank, const void* data, const uint64_t* sizes,
                     const uint64_t* strides, const uint32_t* box);
// (channel, head, token, batch) in boxes of 64 channels and `tokens` tokens.
cudaError_t make_map(CUtensorMap* map, DType dtype, const Heads& heads, uint32_t tokens);

}  // namespace deltafuse::mla
