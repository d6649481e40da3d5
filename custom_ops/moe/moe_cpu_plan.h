// How one call of the CPU kernel is cut into tasks, and where its buffers lie.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe.h"

namespace deltafuse::moe::cpu {

constexpr int64_t kPad = 32;          // rows of floats are padded with zeros to this: a multiple of two vectors
constexpr int64_t kChunk = 1024;      // tokens worked on at once: bounds the buffers
constexpr int64_t kRowBlock = 16;     // weight rows of a task
constexpr int64_t kTileRows = 4;      // weight rows that are dequantized at once
constexpr int64_t kRouterBlock = 32;  // router rows of a task
constexpr int64_t kRouterTokens = 4;  // and tokens
constexpr int64_t kMaxWorkers = 256;  // scratch buffers are made for at most so many

inline int64_t RoundUp(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
inline int64_t Blocks(int64_t x, int64_t size) { return (x + size - 1) / size; }
inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }

// Buffers of the workspace, offsets in bytes.
struct Plan {
  int64_t chunk = 0;    // tokens in one, at most
  int64_t workers = 0;  // calls of the parallel callback; each takes tasks until none is left
  int64_t x_pad = 0, h_pad = 0, shared_pad = 0;
  size_t x = 0;         // float [chunk][x_pad]
  size_t logits = 0;    // float [chunk][E], then the choices
  size_t ids = 0;       // int32 [chunk][k]
  size_t weights = 0;   // float [chunk][k]
  size_t gates = 0;     // float [chunk] of the shared expert
  size_t starts = 0;    // int32 [E + 1] where an expert's pairs start
  size_t pairs = 0;     // int32 [chunk * k] token * k + place, ordered by expert
  size_t active = 0;    // int32 [E] experts that have tokens
  size_t h = 0;         // float [chunk * k][h_pad] in the order of the pairs
  size_t shared_h = 0;  // float [chunk][shared_pad]
  size_t scratch = 0;   // of the first worker
  // Scratch of one worker, offsets in bytes from its start.
  size_t rows = 0;    // float [2 * kTileRows][widest row]
  size_t scales = 0;  // float [2][most blocks in a row]
  size_t sums = 0;    // float [chunk][kRowBlock]
  size_t choice = 0;  // float [E + n_group]
  size_t worker_bytes = 0;
  size_t bytes = 0;
};

inline int64_t BlocksOf(const Matrix& matrix, int64_t cols) {
  return matrix.block_size > 0 ? Blocks(cols, matrix.block_size) : 1;
}

// `threads`: how many the machine has. Depends on the geometry only.
inline Plan MakePlan(const Params& p, int64_t threads) {
  Plan plan;
  plan.chunk = Min(p.num_tokens, kChunk);
  plan.workers = Max(1, Min(threads, kMaxWorkers));
  plan.x_pad = RoundUp(p.hidden_size, kPad);
  plan.h_pad = RoundUp(p.intermediate_size, kPad);
  plan.shared_pad = RoundUp(p.shared_intermediate_size, kPad);
  const int64_t pairs = plan.chunk * p.top_k;
  size_t at = 0;
  const auto take = [&at](int64_t elements) {
    const size_t start = at;
    at += static_cast<size_t>(RoundUp(elements * 4, 64));
    return start;
  };
  plan.x = take(plan.chunk * plan.x_pad);
  plan.logits = take(plan.chunk * p.num_experts);
  plan.ids = take(pairs);
  plan.weights = take(pairs);
  plan.gates = take(plan.chunk);
  plan.starts = take(p.num_experts + 1);
  plan.pairs = take(pairs);
  plan.active = take(p.num_experts);
  plan.h = take(pairs * plan.h_pad);
  plan.shared_h = take(plan.chunk * plan.shared_pad);
  plan.scratch = at;

  at = 0;
  const int64_t widest = Max(plan.x_pad, Max(plan.h_pad, plan.shared_pad));
  int64_t blocks = Max(BlocksOf(p.gate_up, p.hidden_size), BlocksOf(p.down, p.intermediate_size));
  blocks = Max(blocks, Max(BlocksOf(p.shared_gate_up, p.hidden_size),
                           BlocksOf(p.shared_down, Max(1, p.shared_intermediate_size))));
  plan.rows = take(2 * kTileRows * widest);
  plan.scales = take(2 * RoundUp(blocks, kPad));
  plan.sums = take(plan.chunk * kRowBlock);
  plan.choice = take(p.num_experts + p.n_group);
  plan.worker_bytes = at;
  plan.bytes = plan.scratch + static_cast<size_t>(plan.workers) * plan.worker_bytes;
  return plan;
}

// One chunk of tokens: the plan with its addresses.
struct Call {
  const Params* params = nullptr;
  Plan plan;
  char* workspace = nullptr;
  int64_t first = 0;       // token
  int64_t tokens = 0;      // of this chunk
  int64_t num_active = 0;  // experts with weights that have tokens
  int64_t num_zero = 0;    // zero experts that have; they follow in the list
  float (*shared_gate)(const Call&, int64_t token, float* row) = nullptr;

  template <typename T>
  T* At(size_t offset) const {
    return reinterpret_cast<T*>(workspace + offset);
  }
};

// One expert's matrix.
struct Weights {
  const char* data = nullptr;
  const char* scale = nullptr;  // null: not quantized
  const char* zero = nullptr;
  Format format = Format::kFloat;
  DType dtype = DType::kFloat32;        // of plain weights
  DType scale_dtype = DType::kFloat32;  // of scales
  int64_t cols = 0;
  int64_t block = 0, blocks = 0, block_rows = 1;
};

inline int64_t RowBytes(const Weights& w) {
  switch (w.format) {
    case Format::kFloat:
      return w.cols * (w.dtype == DType::kFloat32 ? 4 : 2);
    case Format::kBFloat16:
      return w.cols * 2;
    case Format::kInt4:
    case Format::kUInt4:
      return w.cols / 2;
    default:
      return w.cols;
  }
}

inline int64_t Bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Matrix `index` of a stack of [rows, cols].
inline Weights WeightsOf(const Params& p, const Matrix& matrix, int64_t index, int64_t rows, int64_t cols) {
  Weights w;
  w.format = matrix.format;
  w.dtype = matrix.format == Format::kBFloat16 ? DType::kBFloat16 : p.dtype;
  w.cols = cols;
  w.block = matrix.block_size > 0 ? Min(matrix.block_size, cols) : cols;
  w.blocks = BlocksOf(matrix, cols);
  w.block_rows = matrix.block_rows;
  w.scale_dtype = matrix.scale_float32 ? DType::kFloat32 : p.dtype;
  w.data = static_cast<const char*>(matrix.data) + index * rows * RowBytes(w);
  const int64_t numbers = index * Blocks(rows, w.block_rows) * w.blocks;
  if (matrix.format != Format::kFloat && matrix.format != Format::kBFloat16) {
    w.scale = static_cast<const char*>(matrix.scale) + numbers * Bytes(w.scale_dtype);
    if (matrix.zero_point) w.zero = static_cast<const char*>(matrix.zero_point) + numbers;
  }
  return w;
}

}  // namespace deltafuse::moe::cpu
