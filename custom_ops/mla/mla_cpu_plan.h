// How one call of the CPU kernel is cut into tasks, where its buffers lie in the workspace, and where tokens lie in the
// caches.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mla.h"

namespace deltafuse::mla::cpu {

constexpr int64_t kTile = 64;     // rows of queries in a task, rows of a weight converted at once
constexpr int64_t kBlock = 64;    // keys worked on at once
constexpr int64_t kPart = 256;    // absorbed: keys in a task, at least
constexpr int64_t kParts = 32;    // absorbed: tasks that the tiles of one row of the batch are cut into, at most
constexpr int64_t kColumns = 32;  // output columns are padded to this: a multiple of every instruction set's block
constexpr int64_t kPad = 16;      // summed channels are padded to this: a multiple of every vector
constexpr int64_t kPrepareTokens = 16;       // new tokens prepared in a task
constexpr int64_t kMaxWorkers = 256;         // scratch buffers are made for at most so many
constexpr int64_t kExpandFloats = 16 << 20;  // about how many floats of expanded keys and values exist at once

inline int64_t RoundUp(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }

inline bool Paged(const Params& p) { return p.block_size > 0; }

// Most keys of a row of the batch.
inline int64_t Keys(const Params& p) {
  if (Paged(p)) return p.max_blocks * p.block_size;
  return p.static_cache ? p.past_len : p.past_len + p.seq_len;
}

// Tokens of a row's cache before the call.
inline int64_t There(const Params& p, int64_t row) {
  if (!p.static_cache) return p.past_len;
  return p.lengths_int64 ? static_cast<const int64_t*>(p.cache_lengths)[row]
                         : static_cast<const int32_t*>(p.cache_lengths)[row];
}

// Slot of token `at` of a row, in rows of a cache with `capacity` slots a row.
inline int64_t Slot(const Params& p, int64_t row, int64_t at, int64_t capacity) {
  if (!Paged(p)) return row * capacity + at;
  return p.block_table[row * p.max_blocks + at / p.block_size] * p.block_size + at % p.block_size;
}

// Two ways to compute the attention.
// Absorbed: the queries of all heads go into the latent's space and share its rows as keys and values.
// Expanded: keys and values of every head are made first, of some heads and some tokens at a time.
struct Plan {
  bool absorbed = false;
  int64_t workers = 1;     // calls of the parallel callback; each takes tasks until none is left
  int64_t rows = 0;        // rows of queries that share keys: S * H absorbed, S expanded
  int64_t tiles = 0;       // of kTile rows
  int64_t most_parts = 1;  // absorbed: of the keys of one row of the batch; each has a state of its own
  int64_t parts = 1;       // room for so many: fewer where the cache is short
  int64_t heads = 1;       // expanded: heads worked on at once
  int64_t chunk = 0;       // expanded: keys worked on at once, a multiple of kBlock
  int64_t fresh_keys = 0;  // expanded: rows of keys and values kept for one head and row of the batch
  int64_t row_pad = 0;     // R + Dr
  int64_t nope_pad = 0;    // Dn
  int64_t key_pad = 0;     // Dn + Dr
  int64_t value_pad = 0;   // Dv
  int64_t both_pad = 0;    // Dn + Dv
  int64_t width = 0;       // columns of a state: R absorbed, Dv expanded, padded
  int64_t state_row = 0;   // width, the largest score, the sum of the weights; padded
  // Workspace, offsets in floats.
  size_t fresh = 0;     // [B * S][row_pad] latents and rotated keys of the new tokens
  size_t queries = 0;   // absorbed: [B][S * H][row_pad], scaled
  size_t states = 0;    // absorbed: [B][parts][S * H][state_row]; expanded: [B][heads][S][state_row]
  size_t expanded = 0;  // expanded: [B][heads][fresh_keys][key_pad + value_pad]
  size_t scratch = 0;   // [workers][scratch_floats]
  size_t floats = 0;    // of all
  // Scratch of one worker.
  size_t left = 0;    // [kTile][max(row_pad, key_pad)] rows of queries or latents
  size_t keys = 0;    // [kBlock][max(row_pad, key_pad)]
  size_t values = 0;  // [kBlock][value_pad]
  size_t scores = 0;  // [kTile][kBlock]
  size_t weight = 0;  // [kTile][max(both_pad, nope_pad)]
  size_t result = 0;  // [kTile][max(both_pad, kTile)]
  size_t line = 0;    // one row of anything
  size_t scratch_floats = 0;
};

// `threads`: how many the machine has; results do not depend on it. Depends on the geometry only.
inline Plan MakePlan(const Params& p, int64_t threads) {
  Plan plan;
  const int64_t rank = p.kv_lora_rank, both = int64_t{p.qk_nope_head_dim} + p.v_head_dim;
  plan.row_pad = RoundUp(rank + p.qk_rope_head_dim, kColumns);
  plan.nope_pad = RoundUp(p.qk_nope_head_dim, kPad);
  plan.key_pad = RoundUp(int64_t{p.qk_nope_head_dim} + p.qk_rope_head_dim, kPad);
  plan.value_pad = RoundUp(p.v_head_dim, kColumns);
  plan.both_pad = RoundUp(both, kColumns);
  // A pair of a query and a key takes 2 R + Dr products absorbed and Dn + Dr + Dv expanded; expanding a key takes
  // R (Dn + Dv) more.
  plan.absorbed = p.cache != Cache::kExpanded && p.seq_len * (2 * rank - both) <= rank * both;
  plan.rows = plan.absorbed ? p.seq_len * p.num_heads : p.seq_len;
  plan.tiles = (plan.rows + kTile - 1) / kTile;
  plan.width = plan.absorbed ? RoundUp(rank, kColumns) : plan.value_pad;
  plan.state_row = plan.width + kPad;
  const int64_t keys = Keys(p);
  if (plan.absorbed) {
    plan.most_parts = Max(1, kParts / Max(1, plan.tiles));
    plan.parts = Max(1, Min(plan.most_parts, (keys + kPart - 1) / kPart));
  }
  const int64_t expanded_row = plan.key_pad + plan.value_pad;
  if (!plan.absorbed) {
    const int64_t needed = p.cache == Cache::kExpanded ? p.seq_len : keys;
    const int64_t most = Max(kBlock, kExpandFloats / Max(1, p.batch * expanded_row) / kBlock * kBlock);
    plan.chunk = needed <= most ? RoundUp(Max(keys, 1), kBlock) : most;
    plan.fresh_keys = Min(needed, plan.chunk);
    plan.heads = needed <= most ? Max(1, Min(most / Max(needed, 1), p.num_heads)) : 1;
  }
  const int64_t tasks = Max(p.batch, 1) * Max(p.num_heads, plan.tiles * plan.parts);
  plan.workers = Max(1, Min(Min(tasks, threads), kMaxWorkers));

  size_t at = 0;
  const auto take = [&at](int64_t floats) {
    const size_t start = at;
    at += static_cast<size_t>(RoundUp(floats, 16));
    return start;
  };
  const int64_t wide = Max(plan.row_pad, plan.key_pad);
  plan.left = take(kTile * wide);
  plan.keys = take(kBlock * wide);
  plan.values = take(kBlock * plan.value_pad);
  plan.scores = take(kTile * kBlock);
  plan.weight = take(kTile * Max(plan.both_pad, plan.nope_pad));
  plan.result = take(kTile * Max(plan.both_pad, kTile));
  plan.line = take(Max(wide, Max(plan.both_pad, kBlock)));
  plan.scratch_floats = at;

  at = 0;
  plan.fresh = take(p.batch * p.seq_len * plan.row_pad);
  if (plan.absorbed) plan.queries = take(p.batch * plan.rows * plan.row_pad);
  plan.states = take(p.batch * (plan.absorbed ? plan.parts : plan.heads) * plan.rows * plan.state_row);
  // the last block is read in whole vectors of rows
  if (!plan.absorbed) plan.expanded = take((p.batch * plan.heads * plan.fresh_keys + kPad) * expanded_row);
  plan.scratch = at;
  plan.floats = at + static_cast<size_t>(plan.workers) * plan.scratch_floats;
  return plan;
}

// Absorbed: keys in a part, where a row of the batch has `total`. Nothing else counts, so that a row's bits depend on
// nothing beside it.
inline int64_t PartKeys(const Plan& plan, int64_t total) {
  return Max(kPart, RoundUp((total + plan.most_parts - 1) / plan.most_parts, kBlock));
}

// What a task needs besides the plan.
struct Call {
  const Params* params = nullptr;
  Plan plan;
  float* base = nullptr;          // the workspace
  const float* float8 = nullptr;  // values of the 256 codes
  int64_t first_head = 0;         // expanded: of those worked on now
  int64_t heads = 0;              //
  int64_t first_key = 0;          // of the chunk worked on now
  bool last_chunk = false;
};

}  // namespace deltafuse::mla::cpu
