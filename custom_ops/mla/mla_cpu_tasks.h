// The steps of a call, each a set of tasks. Included as cpu_simd.h is, after mla_cpu_attend.h.

// New tokens.
static void RunPrepare(const Call& call, int64_t task, float* scratch) {
  const Params& p = *call.params;
  const int64_t end = Min(p.batch * p.seq_len, (task + 1) * kPrepareTokens);
  for (int64_t at = task * kPrepareTokens; at < end; ++at) {
    PrepareToken(call, at / p.seq_len, at % p.seq_len, scratch + call.plan.left);
  }
}

// Absorbed: queries of one head and up to kTile tokens into the latent's space.
static void RunAbsorb(const Call& call, int64_t task, float* scratch) {
  const Params& p = *call.params;
  const Plan& plan = call.plan;
  const int64_t head = task % p.num_heads, first = task / p.num_heads * kTile;
  const int64_t rows = Min(kTile, p.batch * p.seq_len - first), rank = p.kv_lora_rank;
  const int64_t step = p.num_heads * plan.row_pad;  // from a token to the next
  float* left = scratch + plan.left;
  float* weight = scratch + plan.weight;
  float* result = scratch + plan.result;
  float* to = call.base + plan.queries + (first * p.num_heads + head) * plan.row_pad;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = first + r;
    float* row = to + r * step;
    FillRow(row + rank, plan.row_pad - rank, 0.0f);
    LoadQuery(p, at / p.seq_len, at % p.seq_len, head, left + r * plan.nope_pad, row + rank, scratch + plan.keys);
    FillRow(left + r * plan.nope_pad + p.qk_nope_head_dim, plan.nope_pad - p.qk_nope_head_dim, 0.0f);
  }
  for (int64_t c = 0; c < rank; c += kTile) {
    const int64_t count = Min(kTile, rank - c);
    int64_t ld = plan.nope_pad;
    const float* from = WeightInPlace(p, rows, c, count, head, 0, p.qk_nope_head_dim, &ld);
    if (from == nullptr) {
      LoadWeight(p, weight, ld, c, count, head, 0, p.qk_nope_head_dim);
      from = weight;
    }
    DotRows(rows, count, plan.nope_pad, left, plan.nope_pad, from, ld, result, kTile);
    for (int64_t r = 0; r < rows; ++r) {
      __builtin_memcpy(to + r * step + c, result + r * kTile, static_cast<size_t>(count) * sizeof(float));
    }
  }
}

// Absorbed: a tile of rows and a part of the keys.
static void RunAbsorbed(const Call& call, int64_t task, float* scratch) {
  const Params& p = *call.params;
  const Plan& plan = call.plan;
  Tile tile;
  const int64_t part = task % plan.parts, number = task / plan.parts % plan.tiles;
  tile.batch = task / plan.parts / plan.tiles;
  tile.head = 0;
  tile.first = number * kTile;
  tile.rows = Min(kTile, plan.rows - tile.first);
  tile.there = There(p, tile.batch);
  tile.total = tile.there + p.seq_len;
  const int64_t size = PartKeys(plan, tile.total), start = part * size;
  if (start >= tile.total) return;  // this row has fewer parts
  tile.ld = plan.row_pad;
  tile.queries = call.base + plan.queries + (tile.batch * plan.rows + tile.first) * plan.row_pad;
  tile.states = call.base + plan.states + ((tile.batch * plan.parts + part) * plan.rows + tile.first) * plan.state_row;
  ClearStates(call, tile);
  Attend(call, tile, start, Min(tile.total, start + size), scratch);
}

// The outputs of one row, from the states of all parts: `to` has `width` floats.
static void Combine(const Call& call, int64_t batch, int64_t row, float* to) {
  const Plan& plan = call.plan;
  const int64_t total_keys = There(*call.params, batch) + call.params->seq_len, size = PartKeys(plan, total_keys);
  const int64_t parts = (total_keys + size - 1) / size, step = plan.rows * plan.state_row;
  const float* states = call.base + plan.states + (batch * plan.parts * plan.rows + row) * plan.state_row;
  float peak = -__builtin_inff(), total = 0.0f;
  for (int64_t s = 0; s < parts; ++s) {
    const float largest = states[s * step + plan.width];
    if (largest > peak) peak = largest;
  }
  FillRow(to, plan.width, 0.0f);
  for (int64_t s = 0; s < parts; ++s) {
    const float* state = states + s * step;
    if (state[plan.width] == -__builtin_inff()) continue;
    const Vec factor = Exp(Splat(state[plan.width] - peak));
    total += state[plan.width + 1] * factor[0];
    for (int64_t c = 0; c < plan.width; c += kLanes) Store(to + c, Load(to + c) + Load(state + c) * factor);
  }
  const Vec factor = Splat(total != 0.0f ? 1.0f / total : 0.0f);
  for (int64_t c = 0; c < plan.width; c += kLanes) Store(to + c, Load(to + c) * factor);
}

// Absorbed: outputs of one head and up to kTile tokens, from latents to values.
static void RunProject(const Call& call, int64_t task, float* scratch) {
  const Params& p = *call.params;
  const Plan& plan = call.plan;
  const int64_t head = task % p.num_heads, first = task / p.num_heads * kTile;
  const int64_t rows = Min(kTile, p.batch * p.seq_len - first), rank = p.kv_lora_rank;
  float* left = scratch + plan.left;
  float* weight = scratch + plan.weight;
  float* result = scratch + plan.result;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t batch = (first + r) / p.seq_len, token = (first + r) % p.seq_len;
    Combine(call, batch, token * p.num_heads + head, left + r * plan.row_pad);
    FillRow(result + r * plan.value_pad, plan.value_pad, 0.0f);
  }
  for (int64_t c = 0; c < rank; c += kTile) {
    const int64_t count = Min(kTile, rank - c);
    int64_t ld = plan.value_pad;
    const float* from = WeightInPlace(p, rows, c, count, head, p.qk_nope_head_dim, p.v_head_dim, &ld);
    if (from == nullptr) {
      LoadWeight(p, weight, ld, c, count, head, p.qk_nope_head_dim, p.v_head_dim);
      from = weight;
    }
    AddRows(rows, plan.value_pad, count, left + c, plan.row_pad, from, ld, result, plan.value_pad);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = first + r;
    float* row = result + r * plan.value_pad;
    const float gate = GateOf(p, at / p.seq_len, at % p.seq_len, head);
    for (int64_t c = 0; c < p.v_head_dim; ++c) row[c] *= gate;
    StoreRow(p.o, p.dtype, (at * p.num_heads + head) * p.v_head_dim, row, p.v_head_dim);
  }
}

// Expanded: keys and values of one head and up to kBlock tokens of the chunk.
static void RunExpand(const Call& call, int64_t task, float* scratch) {
  const Params& p = *call.params;
  const Plan& plan = call.plan;
  const int64_t blocks = (plan.fresh_keys + kBlock - 1) / kBlock;
  const int64_t batch = task / blocks / call.heads, group = task / blocks % call.heads;
  const int64_t head = call.first_head + group, there = There(p, batch);
  const bool past = p.cache == Cache::kExpanded;
  const int64_t origin = past ? Max(call.first_key, there) : call.first_key;
  const int64_t from = origin + task % blocks * kBlock;
  const int64_t end = Min(Min(there + p.seq_len, call.first_key + plan.chunk), from + kBlock);
  if (from >= end) return;
  const int64_t rows = end - from, rank = p.kv_lora_rank, nope = p.qk_nope_head_dim, rope = p.qk_rope_head_dim;
  const int64_t value = p.v_head_dim, row = plan.key_pad + plan.value_pad;
  float* left = scratch + plan.left;
  float* weight = scratch + plan.weight;
  float* result = scratch + plan.result;
  for (int64_t r = 0; r < rows; ++r) {
    LoadToken(call, left + r * plan.row_pad, batch, from + r, there);
    FillRow(result + r * plan.both_pad, plan.both_pad, 0.0f);
  }
  for (int64_t c = 0; c < rank; c += kTile) {
    const int64_t count = Min(kTile, rank - c);
    LoadWeight(p, weight, plan.both_pad, c, count, head, 0, nope + value);
    AddRows(rows, plan.both_pad, count, left + c, plan.row_pad, weight, plan.both_pad, result, plan.both_pad);
  }
  float* to = call.base + plan.expanded + ((batch * plan.heads + group) * plan.fresh_keys + from - origin) * row;
  for (int64_t r = 0; r < rows; ++r, to += row) {
    const float* both = result + r * plan.both_pad;
    for (int64_t c = 0; c < nope; ++c) to[c] = both[c];
    for (int64_t c = 0; c < rope; ++c) to[nope + c] = left[r * plan.row_pad + rank + c];
    for (int64_t c = nope + rope; c < plan.key_pad; ++c) to[c] = 0.0f;
    float* values = to + plan.key_pad;
    for (int64_t c = 0; c < value; ++c) values[c] = both[nope + c];
    for (int64_t c = value; c < plan.value_pad; ++c) values[c] = 0.0f;
    if (!past) continue;
    const int64_t slot = (batch * p.num_heads + head) * Keys(p) + from + r;
    if (p.present_key) StoreRow(p.present_key, p.dtype, slot * (nope + rope), to, nope + rope);
    if (p.present_value) StoreRow(p.present_value, p.dtype, slot * value, values, value);
  }
}

static Tile ExpandedTile(const Call& call, int64_t task) {
  const Params& p = *call.params;
  const Plan& plan = call.plan;
  Tile tile;
  const int64_t number = task % plan.tiles, group = task / plan.tiles % call.heads;
  tile.batch = task / plan.tiles / call.heads;
  tile.head = call.first_head + group;
  tile.first = number * kTile;
  tile.rows = Min(kTile, plan.rows - tile.first);
  tile.there = There(p, tile.batch);
  tile.total = tile.there + p.seq_len;
  tile.ld = plan.key_pad;
  tile.queries = nullptr;
  tile.states = call.base + plan.states + ((tile.batch * plan.heads + group) * plan.rows + tile.first) * plan.state_row;
  return tile;
}

// Expanded: a tile of one head's queries and a chunk of the keys; after the last chunk the outputs.
static void RunExpanded(const Call& call, int64_t task, float* scratch) {
  const Params& p = *call.params;
  const Plan& plan = call.plan;
  Tile tile = ExpandedTile(call, task);
  float* left = scratch + plan.left;
  const int64_t width = int64_t{p.qk_nope_head_dim} + p.qk_rope_head_dim;
  if (call.first_key == 0) ClearStates(call, tile);
  if (call.first_key < tile.total) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      float* row = left + r * plan.key_pad;
      LoadQuery(p, tile.batch, tile.first + r, tile.head, row, row + p.qk_nope_head_dim, scratch + plan.keys);
      FillRow(row + width, plan.key_pad - width, 0.0f);
    }
    tile.queries = left;
    Attend(call, tile, call.first_key, Min(tile.total, call.first_key + plan.chunk), scratch);
  }
  if (!call.last_chunk) return;
  for (int64_t r = 0; r < tile.rows; ++r) {
    float* state = tile.states + r * plan.state_row;
    const int64_t token = tile.first + r;
    const float total = state[plan.width + 1];
    const float factor = total != 0.0f ? GateOf(p, tile.batch, token, tile.head) / total : 0.0f;
    for (int64_t c = 0; c < plan.width; c += kLanes) Store(state + c, Load(state + c) * Splat(factor));
    const int64_t at = ((tile.batch * p.seq_len + token) * p.num_heads + tile.head) * p.v_head_dim;
    StoreRow(p.o, p.dtype, at, state, p.v_head_dim);
  }
}
