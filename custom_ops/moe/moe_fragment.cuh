// Packed weights as a warp's matrix operands: which bytes a lane loads, how it makes them numbers, and the order of
// columns that the right operand must have then.
#pragma once

#include "moe_device.cuh"

namespace deltafuse::moe {

// A warp owns 16 rows of a unit, a lane rows g = lane / 4 and g + 8; a step is 16 columns. Columns of a step in the
// operands' own order: pair b0 of lane t = lane % 4, then pair b1.
//   kInt4, kInt8: b0 = columns 2t, 2t+1 and b1 = 2t+8, 2t+9 of the step, as the tensor core's documentation has it.
//   kPlain: unit of 64 columns in rows of 128 bytes; lane t takes 16-byte chunks t and t + 4 of a row.
//   kFloat8: unit of 128 columns in rows of 128 bytes; the same chunks; of four bytes 0 and 2 are b0, 1 and 3 are b1.
// The chunks of row r lie at chunk ^ (r % 8), as wgmma's 128-byte swizzle wants them.

template <Pack P>
struct Shape {
  static constexpr int kUnitsPerBlock = P == Pack::kPlain ? 2 : 1;  // units for 128 columns
  static constexpr int kSteps = P == Pack::kPlain ? 4 : 8;          // of a unit
  static constexpr int kWords = P == Pack::kInt4 ? 2 : 4;           // 16-byte loads of a lane and unit
};

// Where column k of 128 stands in the right operand's own order: elements of 16 bits in [pair of steps][t][8].
template <Pack P>
__host__ __device__ __forceinline__ int operand_slot(int k) {
  int step, t, b, high;
  if (P == Pack::kInt4 || P == Pack::kInt8) {
    step = k / 16, b = k % 16 / 8, t = k % 8 / 2, high = k & 1;
  } else if (P == Pack::kFloat8) {
    const int chunk = k / 16, within = k % 4;
    t = chunk % 4, step = chunk / 4 * 4 + k % 16 / 4, b = within & 1, high = within >> 1;
  } else {
    const int chunk = k % 64 / 8, within = k % 8;
    t = chunk % 4, step = k / 64 * 4 + chunk / 4 * 2 + within / 4, b = within % 4 / 2, high = within & 1;
  }
  return (step / 2 * 4 + t) * 8 + (step & 1) * 4 + b * 2 + high;
}
__host__ __device__ __forceinline__ int operand_slot(Pack pack, int k) {
  switch (pack) {
    case Pack::kPlain:
      return operand_slot<Pack::kPlain>(k);
    case Pack::kFloat8:
      return operand_slot<Pack::kFloat8>(k);
    default:
      return operand_slot<Pack::kInt4>(k);
  }
}

// And back: the column of 128 that stands there.
__host__ __device__ __forceinline__ int operand_column(Pack pack, int slot) {
  const int step = slot / 32 * 2 + slot / 4 % 2, t = slot / 8 % 4, b = slot / 2 % 2, high = slot % 2;
  switch (pack) {
    case Pack::kPlain:
      return step / 4 * 64 + (step % 4 / 2 * 4 + t) * 8 + step % 2 * 4 + b * 2 + high;
    case Pack::kFloat8:
      return (step / 4 * 4 + t) * 16 + step % 4 * 4 + b + 2 * high;
    default:
      return step * 16 + b * 8 + t * 2 + high;
  }
}

// Weights are read once: past the L1 cache. Volatile, so that what is loaded ahead stays ahead.
__device__ __forceinline__ uint4 load_weights(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

template <Pack P>
__device__ __forceinline__ void load_unit(uint4 (&w)[Shape<P>::kWords], const unsigned char* payload, int warp,
                                          int lane) {
  if constexpr (P == Pack::kInt4 || P == Pack::kInt8) {
#pragma unroll
    for (int i = 0; i < Shape<P>::kWords; ++i) {
      w[i] = load_weights(payload + i * 2048 + (warp * 32 + lane) * 16);
    }
  } else {
    const int g = lane / 4, t = lane % 4;
    const unsigned char* row = payload + (warp * 16 + g) * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = load_weights(row + (i & 1) * 1024 + (((i >> 1) * 4 + t) ^ g) * 16);
    }
  }
}

// (x & mask) | bits in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;\n" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}

// The bits that turn a small number in the low mantissa bits into kBase + number.
template <typename T>
struct Magic;
template <>
struct Magic<__nv_bfloat16> {
  static constexpr uint32_t kBits = 0x43004300u;
  static constexpr float kBase = 128.0f;
};
template <>
struct Magic<__half> {
  static constexpr uint32_t kBits = 0x64006400u;
  static constexpr float kBase = 1024.0f;
};

__device__ __forceinline__ uint32_t sub2(uint32_t x, uint32_t y, __nv_bfloat16) {
  const __nv_bfloat162 r = __hsub2(*reinterpret_cast<__nv_bfloat162*>(&x), *reinterpret_cast<__nv_bfloat162*>(&y));
  return *reinterpret_cast<const uint32_t*>(&r);
}
__device__ __forceinline__ uint32_t sub2(uint32_t x, uint32_t y, __half) {
  const __half2 r = __hsub2(*reinterpret_cast<__half2*>(&x), *reinterpret_cast<__half2*>(&y));
  return *reinterpret_cast<const uint32_t*>(&r);
}
__device__ __forceinline__ uint32_t mul2(uint32_t x, uint32_t y, __nv_bfloat16) {
  const __nv_bfloat162 r = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&x), *reinterpret_cast<__nv_bfloat162*>(&y));
  return *reinterpret_cast<const uint32_t*>(&r);
}
__device__ __forceinline__ uint32_t mul2(uint32_t x, uint32_t y, __half) {
  const __half2 r = __hmul2(*reinterpret_cast<__half2*>(&x), *reinterpret_cast<__half2*>(&y));
  return *reinterpret_cast<const uint32_t*>(&r);
}
__device__ __forceinline__ uint32_t fma2(uint32_t x, uint32_t y, uint32_t z, __nv_bfloat16) {
  const __nv_bfloat162 r = __hfma2(*reinterpret_cast<__nv_bfloat162*>(&x), *reinterpret_cast<__nv_bfloat162*>(&y),
                                   *reinterpret_cast<__nv_bfloat162*>(&z));
  return *reinterpret_cast<const uint32_t*>(&r);
}
template <typename T>
__device__ __forceinline__ uint32_t twice(float x) {
  return pack_pair(x, x, T());
}

// Two float8 numbers, bytes 0 and 2 (high: 1 and 3) of a word, as a pair of T; float16 are 1 / 256 of them.
template <typename T>
__device__ __forceinline__ uint32_t float8_pair(uint32_t w, bool high);
template <>
__device__ __forceinline__ uint32_t float8_pair<__nv_bfloat16>(uint32_t w, bool high) {
  const uint32_t x = high ? w : w << 8;
  const uint32_t y = (x & 0x80008000u) | ((x >> 4) & 0x07f007f0u);
  return mul2(y, 0x7b807b80u, __nv_bfloat16());  // times 2^120
}
template <>
__device__ __forceinline__ uint32_t float8_pair<__half>(uint32_t w, bool high) {
  const uint32_t x = high ? w : w << 8;
  return (x & 0x80008000u) | ((x >> 1) & 0x3f803f80u);
}

// Steps as left operands that are not scaled yet: value = scale (sum_i kFactor_i a_i - (base + zero point) ones).
// kInt8 with bfloat16 comes in two operands, 16 times the high half and the low half.
template <typename T, Pack P>
struct Raw {
  static constexpr bool kInteger = P == Pack::kInt4 || P == Pack::kInt8;
  static constexpr bool kHalves = P == Pack::kInt8 && sizeof(T) == 2 && Magic<T>::kBase < 256.0f;
  static constexpr float kBase = kInteger ? (kHalves ? 17.0f : 1.0f) * Magic<T>::kBase : 0.0f;
  static constexpr float kMiddle = P == Pack::kInt4 ? 8.0f : P == Pack::kInt8 ? 128.0f : 0.0f;
  // float8 in float16 is 1 / 256 of its value
  static constexpr float kFactor = P == Pack::kFloat8 && Magic<T>::kBase > 256.0f ? 256.0f : 1.0f;

  static constexpr int kPerWord = P == Pack::kInt4 ? 4 : 2;  // steps in 16 bytes of integers

  // Step i of 16 bytes of integers.
  static __device__ __forceinline__ void integers(const uint4& w, int i, uint32_t (&a)[4], uint32_t (&high)[4]) {
    constexpr uint32_t kBits = Magic<T>::kBits;
    if constexpr (P == Pack::kInt4) {
      const uint32_t x = word_of(w, i);
#pragma unroll
      for (int n = 0; n < 4; ++n) a[n] = and_or(x >> (4 * n), 0x000f000fu, kBits);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t x = word_of(w, i * 2 + half);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if constexpr (kHalves) {
            a[2 * half + n] = and_or(x >> (8 * n), 0x000f000fu, kBits);
            high[2 * half + n] = and_or(x >> (8 * n + 4), 0x000f000fu, kBits);
          } else {
            a[2 * half + n] = and_or(x >> (8 * n), 0x00ff00ffu, kBits);
          }
        }
      }
    }
  }

  // Two 16-byte pieces of float8 or plain numbers (rows g and g + 8): four steps, or two.
  static __device__ __forceinline__ void floats(const uint4& x, const uint4& y, int i, uint32_t (&a)[4]) {
    if constexpr (P == Pack::kFloat8) {
      const uint32_t v = word_of(x, i), w = word_of(y, i);
      a[0] = float8_pair<T>(v, false), a[1] = float8_pair<T>(w, false);
      a[2] = float8_pair<T>(v, true), a[3] = float8_pair<T>(w, true);
    } else {
      a[0] = word_of(x, 2 * i), a[1] = word_of(y, 2 * i);
      a[2] = word_of(x, 2 * i + 1), a[3] = word_of(y, 2 * i + 1);
    }
  }

  static __device__ __forceinline__ void step(const uint4 (&w)[Shape<P>::kWords], int s, uint32_t (&a)[4],
                                              uint32_t (&high)[4]) {
    if constexpr (kInteger) {
      integers(w[s / kPerWord], s % kPerWord, a, high);
    } else if constexpr (P == Pack::kFloat8) {
      floats(w[s / 4 * 2], w[s / 4 * 2 + 1], s % 4, a);
    } else {
      floats(w[s / 2 * 2], w[s / 2 * 2 + 1], s & 1, a);
    }
  }
};

// Steps as left operands in T, scaled: what the model's own DequantizeLinear would give. Rows g and g + 8 have scales
// s0, s1 and what to take off, z0, z1, all as pairs (see `offset`).
template <typename T, Pack P>
struct Scaled {
  // The number to take off before the scale, for a zero point.
  static __device__ __forceinline__ float offset(float zero) {
    return P == Pack::kInt8 && Raw<T, P>::kHalves ? zero : Magic<T>::kBase + zero;
  }
  static __device__ __forceinline__ void integers(const uint4& w, int i, uint32_t s0, uint32_t s1, uint32_t z0,
                                                  uint32_t z1, uint32_t (&a)[4]) {
    uint32_t high[4];
    Raw<T, P>::integers(w, i, a, high);
    if constexpr (Raw<T, P>::kHalves) {
      const uint32_t base = twice<T>(Magic<T>::kBase), sixteen = twice<T>(16.0f);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t low = sub2(sub2(a[n], base, T()), n & 1 ? z1 : z0, T());
        a[n] = mul2(fma2(sub2(high[n], base, T()), sixteen, low, T()), n & 1 ? s1 : s0, T());
      }
    } else {
#pragma unroll
      for (int n = 0; n < 4; ++n) a[n] = mul2(sub2(a[n], n & 1 ? z1 : z0, T()), n & 1 ? s1 : s0, T());
    }
  }
  static __device__ __forceinline__ void step(const uint4 (&w)[Shape<P>::kWords], int s, uint32_t s0, uint32_t s1,
                                              uint32_t z0, uint32_t z1, uint32_t (&a)[4]) {
    if constexpr (Raw<T, P>::kInteger) {
      constexpr int kPerWord = Raw<T, P>::kPerWord;
      integers(w[s / kPerWord], s % kPerWord, s0, s1, z0, z1, a);
    } else {
      uint32_t high[4];
      Raw<T, P>::step(w, s, a, high);
#pragma unroll
      for (int n = 0; n < 4; ++n) a[n] = mul2(a[n], n & 1 ? s1 : s0, T());
    }
  }
};

}  // namespace deltafuse::moe
