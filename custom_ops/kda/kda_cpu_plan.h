// How one call of the CPU kernel is cut into tasks, and where each worker's scratch buffers lie.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kda.h"

namespace deltafuse::kda::cpu {

constexpr int kChunk = 16;         // tokens worked on at once
constexpr int kColumns = 32;       // value columns are padded to this: a multiple of every instruction set's block
constexpr int kKeyPad = 16;        // key channels are padded to this: a multiple of every vector
constexpr int kMaxConvWidth = 8;   // spec.py MAX_CONV_WIDTH
constexpr int kMaxWorkers = 256;   // scratch buffers are made for at most so many
constexpr int64_t kNormRows = 64;  // token rows in a task of the late norm

// One task computes the outputs and the state of some value columns of one head of one sequence.
struct Plan {
  int64_t tasks = 0;
  int64_t workers = 0;        // calls of the parallel callback; each takes tasks until none is left
  int64_t slices = 1;         // slices of the V axis
  int64_t slice_columns = 0;  // a multiple of kColumns
  int64_t key_pad = 0;        // head_dim rounded up to kKeyPad
  // Scratch of one worker, offsets in floats.
  size_t raw = 0;          // [W - 1 + C][2 key_pad + slice_columns] inputs of the convolution: q | k | v
  size_t taps = 0;         // [W + 1][2 key_pad + slice_columns] its weights by tap, then its bias
  size_t q = 0;            // [C][key_pad]
  size_t k = 0;            // [C][key_pad]
  size_t v = 0;            // [C][slice_columns]
  size_t decay = 0;        // [C][key_pad] exp of the log decay
  size_t beta = 0;         // [C]
  size_t bias = 0;         // [key_pad] dt_bias
  size_t reads = 0;        // [2 C][key_pad] keys, then queries, times their decay since the chunk's start
  size_t total = 0;        // [key_pad] decay of the whole chunk
  size_t writes = 0;       // [key_pad][C] keys times their decay to the chunk's end, by channel
  size_t a = 0;            // [C][C]
  size_t mix = 0;          // [C][C]
  size_t delta = 0;        // [C][kColumns]
  size_t o = 0;            // [C][slice_columns]
  size_t gate = 0;         // [slice_columns] also a row of any other kind
  size_t state = 0;        // [slice_columns / block][key_pad][block]
  size_t floats = 0;       // of one worker, a multiple of 64 bytes
  bool late_norm = false;  // slices share a head's norm: it is done after all of them
};

inline int64_t RoundUp(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }

// `threads`: how many the machine has. Depends on the geometry only.
inline Plan MakePlan(const Params& p, int64_t threads) {
  Plan plan;
  const int64_t heads = p.num_seqs * p.num_v_heads;
  const int64_t columns = RoundUp(p.head_v_dim, kColumns);
  plan.key_pad = RoundUp(p.head_dim, kKeyPad);
  const int64_t wanted = heads > 0 ? Min((threads + heads - 1) / heads, columns / kColumns) : 1;
  plan.slice_columns = RoundUp((columns + wanted - 1) / wanted, kColumns);
  plan.slices = (columns + plan.slice_columns - 1) / plan.slice_columns;
  plan.tasks = heads * plan.slices;
  plan.workers = Min(plan.tasks, Max(1, Min(threads, kMaxWorkers)));
  plan.late_norm = plan.slices > 1 && p.norm_weight != nullptr;

  const int64_t channels = 2 * plan.key_pad + plan.slice_columns;
  size_t at = 0;
  const auto take = [&at](int64_t floats) {
    const size_t start = at;
    at += static_cast<size_t>(RoundUp(floats, 16));
    return start;
  };
  plan.raw = take((kMaxConvWidth - 1 + kChunk) * channels);
  plan.taps = take((kMaxConvWidth + 1) * channels);
  plan.q = take(kChunk * plan.key_pad);
  plan.k = take(kChunk * plan.key_pad);
  plan.v = take(kChunk * plan.slice_columns);
  plan.decay = take(kChunk * plan.key_pad);
  plan.beta = take(kChunk);
  plan.bias = take(plan.key_pad);
  plan.reads = take(2 * kChunk * plan.key_pad);
  plan.total = take(plan.key_pad);
  plan.writes = take(kChunk * plan.key_pad);
  plan.a = take(kChunk * kChunk);
  plan.mix = take(kChunk * kChunk);
  plan.delta = take(kChunk * kColumns);
  plan.o = take(kChunk * plan.slice_columns);
  plan.gate = take(Max(plan.slice_columns, plan.key_pad));
  plan.state = take(plan.slice_columns * plan.key_pad);
  plan.floats = static_cast<size_t>(Max(static_cast<int64_t>(at), 2 * columns));
  return plan;
}

// What a task needs besides the plan. `late` holds float32 outputs before the norm, [tokens, HV, V], with late_norm.
struct Call {
  const Params* params = nullptr;
  Plan plan;
  float* late = nullptr;
};

// Where sequence n lies: its first token row of all B * S rows, and how many.
inline void Sequence(const Params& p, int64_t n, int64_t* start, int64_t* length) {
  if (p.cu_seqlens == nullptr) {
    *start = n * p.seq_len;
    *length = p.seq_len;
    return;
  }
  const auto bound = [&p](int64_t i) {
    return p.cu_seqlens_int64 ? static_cast<const int64_t*>(p.cu_seqlens)[i]
                              : static_cast<int64_t>(static_cast<const int32_t*>(p.cu_seqlens)[i]);
  };
  *start = bound(n);
  *length = bound(n + 1) - *start;
}

}  // namespace deltafuse::kda::cpu
