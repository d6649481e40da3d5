// Conversions between float32 and the narrower formats, without branches so that loops over them vectorise.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulator {

inline uint32_t float_bits(float x) {
  uint32_t b;
  __builtin_memcpy(&b, &x, 4);
  return b;
}
inline float bits_float(uint32_t b) {
  float x;
  __builtin_memcpy(&x, &b, 4);
  return x;
}

inline float from_bfloat16(uint16_t h) { return bits_float(uint32_t{h} << 16); }
inline uint16_t to_bfloat16(float x) {
  const uint32_t b = float_bits(x);
  const uint32_t rounded = (b + 0x7fff + (b >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((b & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded);
}
inline uint16_t to_bfloat16_zero(float x) {
  const uint32_t b = float_bits(x);
  return static_cast<uint16_t>((b & 0x7fffffff) > 0x7f800000 ? 0x7fff : b >> 16);
}

inline float from_half(uint16_t h) {
  const uint32_t sign = uint32_t{h} << 16 & 0x80000000u, magnitude = h & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + (112u << 23), special = magnitude << 13 | 0x7f800000u;
  const uint32_t small = float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  uint32_t b = magnitude >= 0x7c00 ? special : normal;
  b = magnitude < 0x400 ? small : b;
  return bits_float(b | sign);
}
inline uint16_t to_half(float x) {
  const uint32_t b = float_bits(x), sign = b >> 16 & 0x8000u, magnitude = b & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  const uint32_t small = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t h = magnitude < (113u << 23) ? small : normal;
  h = magnitude >= 0x477ff000u ? 0x7c00u : h;
  h = magnitude > 0x7f800000u ? 0x7fffu : h;
  return static_cast<uint16_t>(magnitude > 0x7f800000u ? h : h | sign);
}

// e4m3: no infinities, 0x7f is NaN, the largest number is 448. e5m2: as float16's upper byte.
inline float from_e4m3(uint8_t v) {
  const uint32_t magnitude = v & 0x7fu, sign = uint32_t{v} << 24 & 0x80000000u;
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t small = float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
  uint32_t b = magnitude < 8 ? small : normal;
  b = magnitude == 0x7f ? 0x7fc00000u : b;
  return bits_float(b | sign);
}
inline float from_e5m2(uint8_t v) { return from_half(static_cast<uint16_t>(v << 8)); }

// Rounds to nearest even; what is too large becomes the largest number.
inline uint8_t to_e4m3(float x) {
  const uint32_t b = float_bits(x), sign = b >> 24 & 0x80u, magnitude = b & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude >= float_bits(448.0f)) return static_cast<uint8_t>(sign | 0x7e);
  if (magnitude < float_bits(0x1p-6f)) {
    return static_cast<uint8_t>(sign | static_cast<uint32_t>(std::nearbyint(bits_float(magnitude) * 512.0f)));
  }
  const uint32_t rounded = (magnitude + 0x7ffff + (magnitude >> 20 & 1) - (120u << 23)) >> 20;
  return static_cast<uint8_t>(sign | (rounded > 0x7e ? 0x7e : rounded));
}
inline uint8_t to_e5m2(float x) {
  const uint32_t b = float_bits(x), sign = b >> 24 & 0x80u, magnitude = b & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude >= float_bits(57344.0f)) return static_cast<uint8_t>(sign | 0x7b);
  if (magnitude < float_bits(0x1p-14f)) {
    return static_cast<uint8_t>(sign | static_cast<uint32_t>(std::nearbyint(bits_float(magnitude) * 65536.0f)));
  }
  return static_cast<uint8_t>(sign | ((magnitude + 0xfffff + (magnitude >> 21 & 1) - (112u << 23)) >> 21));
}

// The tensor cores drop the lower bits.
inline float to_tf32(float x) { return bits_float(float_bits(x) & 0xffffe000u); }

}  // namespace emulator
