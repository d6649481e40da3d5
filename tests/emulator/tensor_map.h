// What the 128 bytes of a CUtensorMap hold here: the arguments of cuTensorMapEncodeTiled.
#pragma once

#include <cstdint>

namespace emulator {

struct TensorMap {
  static constexpr uint32_t kMagic = 0x54454e53;
  uint32_t magic;
  uint8_t rank, element_bytes, swizzle, pad;  // swizzle: 0 none, 1 32, 2 64, 3 128 bytes
  uint64_t address;
  uint64_t strides[4];  // bytes, from the second dimension on
  uint32_t dims[5];
  uint16_t box[5];
  uint8_t nan_fill, more[5];
};
static_assert(sizeof(TensorMap) <= 128, "a CUtensorMap has 128 bytes");

}  // namespace emulator
