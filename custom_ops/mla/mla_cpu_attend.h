// Attention of a tile of queries to a range of keys, with the softmax kept up to date block by block. Included as
// cpu_simd.h is, after mla_cpu_rows.h.

// Rows of queries that share keys. Absorbed: row r is token r / H, head r % H; expanded: token r of one head.
struct Tile {
  int64_t batch, head;   // head: expanded only
  int64_t first, rows;   // rows of the tile
  int64_t there, total;  // tokens of the row's cache before and after the call
  const float* queries;  // [rows][ld]
  int64_t ld;
  float* states;  // [rows][state_row]
};

DELTAFUSE_INLINE int64_t TokenOf(const Call& call, int64_t row) {
  return call.plan.absorbed ? row / call.params->num_heads : row;
}
DELTAFUSE_INLINE int64_t HeadOf(const Call& call, const Tile& tile, int64_t row) {
  return call.plan.absorbed ? row % call.params->num_heads : tile.head;
}

// The keys [*first, *last) that a token sees.
DELTAFUSE_INLINE void Seen(const Params& p, const Tile& tile, int64_t token, int64_t* first, int64_t* last) {
  const int64_t position = tile.there + token;
  *last = p.causal ? position + 1 : tile.total;
  *first = p.window > 0 && position + 1 > p.window ? position + 1 - p.window : 0;
}

// Adds the mask to the scores of the keys [first, first + count).
static void AddMask(const Params& p, const Tile& tile, int64_t token, int64_t head, int64_t first, int64_t count,
                    float* scores, float* line) {
  const int64_t* strides = p.mask_strides;
  const int64_t start = tile.batch * strides[0] + head * strides[1] + token * strides[2], step = strides[3];
  if (p.mask_type == MaskType::kBool) {
    const uint8_t* mask = static_cast<const uint8_t*>(p.attn_mask) + start;
    for (int64_t j = 0; j < count; ++j)
      if (!mask[(first + j) * step]) scores[j] = -__builtin_inff();
    return;
  }
  const DType type = p.mask_type == MaskType::kFloat32 ? DType::kFloat32 : p.dtype;
  if (step == 1) {
    LoadRow(line, p.attn_mask, type, start + first, count, count);
  } else {
    for (int64_t j = 0; j < count; ++j) LoadRow(line + j, p.attn_mask, type, start + (first + j) * step, 1, 1);
  }
  for (int64_t j = 0; j < count; ++j) scores[j] += line[j];
}

// Scores of one row to weights, its state scaled to the new largest score. `count` keys from `first` on.
static void Weigh(const Call& call, const Tile& tile, int64_t row, int64_t first, int64_t count, float* scores,
                  float* line) {
  const Params& p = *call.params;
  float* state = tile.states + row * call.plan.state_row;
  float* largest = state + call.plan.width;
  float* total = largest + 1;
  const int64_t token = TokenOf(call, tile.first + row), padded = (count + kLanes - 1) / kLanes * kLanes;
  int64_t from, to;
  Seen(p, tile, token, &from, &to);
  const float none = -__builtin_inff();
  for (int64_t j = 0; j < Min(count, from - first); ++j) scores[j] = none;
  for (int64_t j = Max(0, Min(count, to - first)); j < padded; ++j) scores[j] = none;
  if (p.mask_type != MaskType::kNone) {
    AddMask(p, tile, token, HeadOf(call, tile, tile.first + row), first, count, scores, line);
  }
  Vec most = Splat(*largest);
  for (int64_t j = 0; j < padded; j += kLanes) most = Larger(Load(scores + j), most);  // a NaN score stays out
  float peak = most[0];
  for (int i = 1; i < kLanes; ++i)
    if (most[i] > peak) peak = most[i];
  if (peak == none) {  // nothing is seen, or nothing but NaN
    for (int64_t j = 0; j < padded; ++j)
      if (scores[j] != scores[j]) *largest = *total = scores[j];
    FillRow(scores, padded, 0.0f);
    return;
  }
  if (peak != *largest) {
    const Vec factor = *largest == none ? Vec{} : Exp(Splat(*largest - peak));
    for (int64_t c = 0; c < call.plan.width; c += kLanes) Store(state + c, Load(state + c) * factor);
    *total *= factor[0];
    *largest = peak;
  }
  Vec sum = {};
  for (int64_t j = 0; j < padded; j += kLanes) {
    const Vec weight = Exp(Load(scores + j) - Splat(peak));
    sum += weight;
    Store(scores + j, weight);
  }
  *total += Sum(sum);
}

static void ClearStates(const Call& call, const Tile& tile) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    float* state = tile.states + r * call.plan.state_row;
    FillRow(state, call.plan.state_row, 0.0f);
    state[call.plan.width] = -__builtin_inff();
  }
}

// Keys and values of the tokens [first, first + count), rows of *key_ld and *value_ld floats.
static void LoadBlock(const Call& call, const Tile& tile, int64_t first, int64_t count, float* scratch,
                      const float** keys, int64_t* key_ld, const float** values, int64_t* value_ld) {
  const Params& p = *call.params;
  const Plan& plan = call.plan;
  float* key = scratch + plan.keys;
  float* value = scratch + plan.values;
  if (plan.absorbed) {
    for (int64_t j = 0; j < count; ++j) LoadToken(call, key + j * plan.row_pad, tile.batch, first + j, tile.there);
    *keys = *values = key;
    *key_ld = *value_ld = plan.row_pad;
    return;
  }
  const int64_t row = plan.key_pad + plan.value_pad, group = tile.batch * plan.heads + tile.head - call.first_head;
  const float* expanded = call.base + plan.expanded + group * plan.fresh_keys * row;
  const bool past = p.cache == Cache::kExpanded;
  const int64_t origin = past ? Max(call.first_key, tile.there) : call.first_key;  // of the expanded rows
  if (first >= origin) {
    *keys = expanded + (first - origin) * row;
    *values = *keys + plan.key_pad;
    *key_ld = *value_ld = row;
    return;
  }
  const int64_t width = int64_t{p.qk_nope_head_dim} + p.qk_rope_head_dim;
  for (int64_t j = 0; j < count; ++j) {
    if (first + j < origin) {
      const int64_t slot = (tile.batch * p.num_heads + tile.head) * p.past_len + first + j;
      LoadRow(key + j * plan.key_pad, p.past_key, p.dtype, slot * width, width, plan.key_pad);
      LoadRow(value + j * plan.value_pad, p.past_value, p.dtype, slot * p.v_head_dim, p.v_head_dim, plan.value_pad);
    } else {
      const float* from = expanded + (first + j - origin) * row;
      __builtin_memcpy(key + j * plan.key_pad, from, static_cast<size_t>(plan.key_pad) * sizeof(float));
      __builtin_memcpy(value + j * plan.value_pad, from + plan.key_pad,
                       static_cast<size_t>(plan.value_pad) * sizeof(float));
    }
  }
  *keys = key;
  *values = value;
  *key_ld = plan.key_pad;
  *value_ld = plan.value_pad;
}

// Adds the keys [first, last) to the tile's states.
static void Attend(const Call& call, const Tile& tile, int64_t first, int64_t last, float* scratch) {
  const Params& p = *call.params;
  const Plan& plan = call.plan;
  int64_t from, to, unused;
  Seen(p, tile, TokenOf(call, tile.first), &from, &unused);
  Seen(p, tile, TokenOf(call, tile.first + tile.rows - 1), &unused, &to);
  // blocks start at multiples of kBlock, whatever the first token sees
  first = Max(first, from / kBlock * kBlock);
  last = Min(last, to);
  float* scores = scratch + plan.scores;
  const int64_t width = plan.absorbed ? plan.row_pad : plan.key_pad;
  for (int64_t at = first; at < last; at += kBlock) {
    const int64_t count = Min(kBlock, last - at);
    const float *keys, *values;
    int64_t key_ld, value_ld;
    LoadBlock(call, tile, at, count, scratch, &keys, &key_ld, &values, &value_ld);
    DotRows(tile.rows, count, width, tile.queries, tile.ld, keys, key_ld, scores, kBlock);
    for (int64_t r = 0; r < tile.rows; ++r) {
      Weigh(call, tile, r, at, count, scores + r * kBlock, scratch + plan.line);
    }
    AddRows(tile.rows, plan.width, count, scores, kBlock, values, value_ld, tile.states, plan.state_row);
  }
}
