// Where the parts of a call lie in its workspace, and how weights are packed.
#pragma once

#include <cstdio>

#include "moe_launch.h"

namespace deltafuse::moe {

// A text that stays valid until the thread's next one.
inline char* reason_text() {
  thread_local char text[256];
  return text;
}
template <typename... Values>
const char* reason(const char* format, Values... values) {
  char* text = reason_text();
  std::snprintf(text, 256, format, values...);
  return text;
}

constexpr int64_t kChunkTokens = 16384;  // of a prompt, at once
constexpr int64_t kAlignment = 256;

inline int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
inline int rounded(int n, int to) { return (n + to - 1) / to * to; }
inline bool integers(Format f) {
  return f == Format::kInt4 || f == Format::kUInt4 || f == Format::kInt8 || f == Format::kUInt8;
}

// How a matrix of `count` experts is packed. Blocks that no stage fits become numbers of the activations' type.
inline Packed packed_form(const Matrix& m, DType dtype, int count, int rows, int cols, bool gated) {
  Packed p;
  p.count = count, p.rows = rows, p.cols = cols, p.gated = gated;
  const bool one = m.block_size <= 0 || m.block_size >= cols, whole = one || m.block_size % 128 == 0;
  const int element = size_of(dtype);
  if (integers(m.format) && (whole || m.block_size % 32 == 0) && m.block_rows == 1) {
    p.pack = m.format == Format::kInt4 || m.format == Format::kUInt4 ? Pack::kInt4 : Pack::kInt8;
    p.sub = whole ? 1 : 4;
    p.zeros = m.has_zero_point || m.format == Format::kUInt4 || m.format == Format::kUInt8;
    p.payload = p.pack == Pack::kInt4 ? 4096 : 8192;
    p.tail = kUnitRows * p.sub * (1 + p.zeros) * element;
  } else if (m.format == Format::kFloat8 && whole) {
    p.pack = Pack::kFloat8;
    p.payload = 8192, p.tail = kUnitRows * 4;
  } else {
    p.payload = kUnitRows * 64 * element;
  }
  p.tiles = (rows + kTileRows - 1) / kTileRows;
  if (gated) p.tiles = (rows / 2 + kTileRows / 2 - 1) / (kTileRows / 2);
  p.stages = (cols + 127) / 128 * (p.pack == Pack::kPlain ? 2 : 1);
  return p;
}
// float16 has no room for small scales: they are stored relative to the expert's largest.
inline bool has_multiplier(const Matrix& m, DType dtype) {
  return dtype == DType::kFloat16 && m.format != Format::kFloat;
}

// Takes parts of a workspace one after the other.
class Parts {
 public:
  explicit Parts(void* base) : base_(static_cast<unsigned char*>(base)) {}
  template <typename T>
  T* take(int64_t elements) {
    unsigned char* at = base_ ? base_ + used_ : nullptr;
    used_ += aligned(elements * static_cast<int64_t>(sizeof(T)));
    return reinterpret_cast<T*>(at);
  }
  int64_t used() const { return used_; }

 private:
  unsigned char* base_;
  int64_t used_ = 0;
};

}  // namespace deltafuse::moe
