// How sums of parts are joined: the same few operations, in the same order, where a block makes many tiles
// (mla_decode.cuh) and where the second kernel joins what blocks have made (mla_combine.cuh).
#pragma once

#include "mla_device.cuh"

namespace deltafuse::mla {

// total = total * keep + next * add.
struct Factors {
  float keep, add;
};

// The largest score and the sum of the weights of one query row. The first part is joined to nothing: keep is 0.
struct Total {
  float top = -INFINITY, sum = 0.0f;
  bool any = false;

  __device__ __forceinline__ Factors raise(float next_top) {
    const float both = fmaxf(top, next_top);
    const Factors f{any ? ratio(top, both) : 0.0f, ratio(next_top, both)};
    top = both;
    any = true;
    return f;
  }
  __device__ __forceinline__ void join(float next_sum, Factors f) {
    sum = __fmaf_rn(next_sum, f.add, __fmul_rn(sum, f.keep));
  }
};

__device__ __forceinline__ float joined(float total, float next, float keep, float add) {
  return __fmaf_rn(next, add, __fmul_rn(total, keep));
}

// Four sums of a lane as they travel through memory: channels c and c + 8 of two neighbouring query rows, in the order
// (c, row), (c, row + 1), (c + 8, row), (c + 8, row + 1). bfloat16 where the op computes in it, else float32.
template <typename T>
struct Travel {
  using Four = float4;
  __device__ static __forceinline__ Four pack(float a, float b, float c, float d) { return make_float4(a, b, c, d); }
  __device__ static __forceinline__ float4 unpack(Four x) { return x; }
  // One of the four, and a sum rounded likewise.
  __device__ static __forceinline__ float one(const Four& x, int i) { return reinterpret_cast<const float*>(&x)[i]; }
  __device__ static __forceinline__ float rounded(float x) { return x; }
};
template <>
struct Travel<__nv_bfloat16> {
  using Four = uint2;
  __device__ static __forceinline__ Four pack(float a, float b, float c, float d) {
    return make_uint2(mla::pack(a, b, __nv_bfloat16{}), mla::pack(c, d, __nv_bfloat16{}));
  }
  __device__ static __forceinline__ float4 unpack(Four x) {
    return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xFFFF0000u), __uint_as_float(x.y << 16),
                       __uint_as_float(x.y & 0xFFFF0000u));
  }
  __device__ static __forceinline__ float one(const Four& x, int i) {
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(&x)[i]);
  }
  __device__ static __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
};

// Rounded to what travels.
template <typename T>
__device__ __forceinline__ float4 travelled(float a, float b, float c, float d) {
  return Travel<T>::unpack(Travel<T>::pack(a, b, c, d));
}

}  // namespace deltafuse::mla
