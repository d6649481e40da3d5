// One task of the CPU kernel: operands of a chunk from the inputs, the recurrence, outputs. Included after
// kda_cpu_chunk.h, once for each instruction set.

// A task's place in the call.
struct Place {
  const Params* params;
  const Plan* plan;
  int64_t sequence, head, key_head;  // head: of values; key_head: of queries and keys
  int64_t first, columns;            // value columns of this slice
  int64_t row, tokens;               // token rows of the sequence
  int64_t state;                     // element of the sequence's and head's state
  bool in_place;                     // one token, float32: the state is used where it lies
};

// The three parts of the convolution's channels: where a part lies in a scratch row, and in the inputs.
struct Part {
  const void* input;
  int64_t stride, column, channel, width, offset, padded;
};

static void Parts(const Place& at, Part (&parts)[3]) {
  const Params& p = *at.params;
  const int64_t pad = at.plan->key_pad, key = at.key_head * p.head_dim, value = at.head * p.head_v_dim + at.first;
  const int64_t keys = static_cast<int64_t>(p.num_heads) * p.head_dim;
  parts[0] = {p.q, p.q_row_stride, key, key, p.head_dim, 0, pad};
  parts[1] = {p.k, p.k_row_stride, key, keys + key, p.head_dim, pad, pad};
  parts[2] = {p.v, p.v_row_stride, value, 2 * keys + value, at.columns, 2 * pad, at.plan->slice_columns};
}

// Weights by tap, and the inputs before the first token.
static void StartConvolution(const Place& at, float* scratch) {
  const Params& p = *at.params;
  const int64_t row = 2 * at.plan->key_pad + at.plan->slice_columns, width = p.conv_width;
  float* taps = scratch + at.plan->taps;
  float* raw = scratch + at.plan->raw;
  Part parts[3];
  Parts(at, parts);
  for (int64_t i = 0; i < (width + 1) * row; ++i) taps[i] = 0.0f;
  for (int64_t i = 0; i < (width - 1) * row; ++i) raw[i] = 0.0f;
  const int64_t channels =
      2 * static_cast<int64_t>(p.num_heads) * p.head_dim + static_cast<int64_t>(p.num_v_heads) * p.head_v_dim;
  const int64_t columns = p.conv_state_width, old = columns - (width - 1);
  for (int i = 0; i < 3; ++i) {
    const Part& part = parts[i];
    const float* weight = p.conv_weight + part.channel * width;
    float* tap = taps + part.offset;
    for (int64_t c = 0; c < part.width; ++c) {
      for (int64_t w = 0; w < width; ++w) tap[w * row + c] = weight[c * width + w];
    }
    if (p.conv_bias) LoadRow(tap + width * row, p.conv_bias, DType::kFloat32, part.channel, part.width, 0);
    if (p.conv_state == nullptr || width < 2) continue;
    // by channel in memory, by token in scratch; both buffers have room for kChunk rows and are not in use yet
    float* past = scratch + (i == 2 ? at.plan->o : at.plan->reads);
    LoadRow(past, p.conv_state, p.dtype, (at.sequence * channels + part.channel) * columns, part.width * columns, 0);
    for (int64_t c = 0; c < part.width; ++c) {
      for (int64_t w = 0; w < width - 1; ++w) raw[w * row + part.offset + c] = past[c * columns + old + w];
    }
  }
}

DELTAFUSE_INLINE float* PartRows(const Plan& plan, float* scratch, int part, int64_t* stride) {
  *stride = part == 2 ? plan.slice_columns : plan.key_pad;
  return scratch + (part == 0 ? plan.q : part == 1 ? plan.k : plan.v);
}

// Rows of q, k and v of tokens [start, start + tokens) of the sequence, convolved.
static void LoadRows(const Place& at, float* scratch, int64_t start, int64_t tokens) {
  const Params& p = *at.params;
  const Plan& plan = *at.plan;
  const int64_t row = 2 * plan.key_pad + plan.slice_columns, width = p.conv_width;
  Part parts[3];
  Parts(at, parts);
  for (int i = 0; i < 3; ++i) {
    const Part& part = parts[i];
    int64_t stride;
    float* rows = PartRows(plan, scratch, i, &stride);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t from = (at.row + start + t) * part.stride + part.column;
      float* to = width ? scratch + plan.raw + (width - 1 + t) * row + part.offset : rows + t * stride;
      LoadRow(to, part.input, p.dtype, from, part.width, part.padded);
      if (start + t + kChunk < at.tokens) {
        PrefetchRow(part.input, p.dtype, from + kChunk * part.stride, part.width);
      }
    }
    if (width == 0) continue;
    float* raw = scratch + plan.raw + part.offset;
    const float* taps = scratch + plan.taps + part.offset;
    for (int64_t c = 0; c < part.padded; c += kLanes) {
      const Vec bias = Load(taps + width * row + c);
      for (int64_t t = 0; t < tokens; ++t) {
        Vec y = bias;
        for (int64_t w = 0; w < width; ++w) y += Load(taps + w * row + c) * Load(raw + (t + w) * row + c);
        Store(rows + t * stride + c, p.conv_silu ? Silu(y) : y);
      }
      for (int64_t w = 0; w < width - 1; ++w) Store(raw + w * row + c, Load(raw + (tokens + w) * row + c));
    }
  }
}

DELTAFUSE_INLINE void ScaleRow(float* x, int64_t width, float factor) {
  for (int64_t c = 0; c < width; c += kLanes) Store(x + c, Load(x + c) * Splat(factor));
}

DELTAFUSE_INLINE float NormFactor(const Params& p, const float* x, int64_t width) {
  if (p.qk_l2norm == L2Norm::kNone) return 1.0f;
  Vec sum = {};
  for (int64_t c = 0; c < width; c += kLanes) sum += Load(x + c) * Load(x + c);
  const float total = Sum(sum);
  if (p.qk_l2norm == L2Norm::kSum) return 1.0f / __builtin_sqrtf(total + p.l2norm_eps);
  const float norm = __builtin_sqrtf(total);
  return 1.0f / (norm > p.l2norm_eps ? norm : p.l2norm_eps);
}

// exp of the log decay.
static void LoadDecays(const Place& at, float* scratch, int64_t start, int64_t tokens, float rate) {
  const Params& p = *at.params;
  const int64_t width = at.plan->key_pad;
  const float* bias = scratch + at.plan->bias;
  for (int64_t t = 0; t < tokens; ++t) {
    float* x = scratch + at.plan->decay + t * width;
    const int64_t stride = static_cast<int64_t>(p.num_v_heads) * p.head_dim;
    const int64_t from = (at.row + start + t) * stride + at.head * p.head_dim;
    LoadRow(x, p.g, p.dtype, from, p.head_dim, width);
    if (start + t + kChunk < at.tokens) PrefetchRow(p.g, p.dtype, from + kChunk * stride, p.head_dim);
    for (int64_t c = 0; c < width; c += kLanes) {
      Vec g = Load(x + c) + Load(bias + c);
      if (p.gate_activation == GateActivation::kSoftplus) g = Splat(-rate) * Softplus(g);
      if (p.gate_activation == GateActivation::kSigmoid) g = Splat(p.lower_bound) * Sigmoid(Splat(rate) * g);
      Store(x + c, Exp(g));
    }
  }
}

// All operands of `tokens` tokens in scratch; token rows up to `rows` are zero there.
static void LoadChunk(const Place& at, float* scratch, int64_t start, int64_t tokens, int64_t rows, float rate) {
  const Params& p = *at.params;
  const Plan& plan = *at.plan;
  LoadRows(at, scratch, start, tokens);
  for (int64_t t = 0; t < tokens; ++t) {
    float* q = scratch + plan.q + t * plan.key_pad;
    float* k = scratch + plan.k + t * plan.key_pad;
    ScaleRow(q, plan.key_pad, p.scale * NormFactor(p, q, plan.key_pad));
    if (p.qk_l2norm != L2Norm::kNone) ScaleRow(k, plan.key_pad, NormFactor(p, k, plan.key_pad));
  }
  LoadDecays(at, scratch, start, tokens, rate);
  float* beta = scratch + plan.beta;
  for (int64_t t = 0; t < tokens; ++t) {
    float one[kLanes];
    LoadRow(one, p.beta, p.dtype, (at.row + start + t) * p.num_v_heads + at.head, 1, kLanes);
    const Vec x = Load(one);
    beta[t] = p.beta_scale * (p.beta_sigmoid ? Sigmoid(x) : x)[0];
  }
  for (int64_t t = tokens; t < rows; ++t) {
    beta[t] = 0.0f;
    for (int64_t c = 0; c < plan.slice_columns; ++c) scratch[plan.v + t * plan.slice_columns + c] = 0.0f;
  }
}

// One row of outputs: norm, gate, and out. `o` is padded with zeros to whole vectors; `row` and `head` say whose it is.
static void FinishRow(const Params& p, float* o, float* work, int64_t row, int64_t head, int64_t first, int64_t columns,
                      bool norm) {
  const int64_t padded = RoundUp(columns, kLanes);
  const int64_t element = (row * p.num_v_heads + head) * p.head_v_dim + first;
  if (norm) {
    Vec sum = {};
    for (int64_t c = 0; c < padded; c += kLanes) sum += Load(o + c) * Load(o + c);
    const float mean = Sum(sum) / static_cast<float>(columns);
    LoadRow(work, p.norm_weight, DType::kFloat32, first, columns, padded);
    const Vec factor = Splat(1.0f / __builtin_sqrtf(mean + p.norm_eps));
    for (int64_t c = 0; c < padded; c += kLanes) Store(o + c, Load(o + c) * factor * Load(work + c));
  }
  if (p.output_gate != OutputGate::kNone) {
    LoadRow(work, p.gate, p.dtype, element, columns, padded);
    const bool silu = p.output_gate == OutputGate::kSilu;
    for (int64_t c = 0; c < padded; c += kLanes) {
      const Vec x = Load(work + c), y = Sigmoid(x);
      Store(o + c, Load(o + c) * (silu ? x * y : y));
    }
  }
  StoreRow(p.o, p.dtype, element, o, columns);
}

static void StoreOutputs(const Call& call, const Place& at, float* scratch, int64_t start, int64_t tokens) {
  const Params& p = *at.params;
  const Plan& plan = *at.plan;
  for (int64_t t = 0; t < tokens; ++t) {
    float* o = scratch + plan.o + t * plan.slice_columns;
    const int64_t row = at.row + start + t;
    if (plan.late_norm) {
      StoreRow(call.late, DType::kFloat32, (row * p.num_v_heads + at.head) * p.head_v_dim + at.first, o, at.columns);
    } else {
      FinishRow(p, o, scratch + plan.gate, row, at.head, at.first, at.columns, p.norm_weight != nullptr);
    }
  }
}

// The state between memory and scratch, where it lies in blocks [columns / kBlock][key_pad][kBlock].
static void LoadState(const Place& at, float* scratch) {
  const Params& p = *at.params;
  const int64_t width = at.plan->key_pad, columns = at.plan->slice_columns;
  float* state = scratch + at.plan->state;
  float* row = scratch + at.plan->gate;
  for (int64_t i = 0; i < width * columns; i += kLanes) Store(state + i, Vec{});
  if (p.initial_state == nullptr) return;
  if (!p.state_v_first) {
    for (int64_t c = 0; c < p.head_dim; ++c) {
      LoadRow(row, p.initial_state, p.state_dtype, at.state + c * p.head_v_dim + at.first, at.columns, columns);
      for (int64_t j = 0; j < columns; j += kLanes) {
        Store(state + (j / kBlock * width + c) * kBlock + j % kBlock, Load(row + j));
      }
    }
    return;
  }
  for (int64_t j = 0; j < at.columns; ++j) {
    LoadRow(row, p.initial_state, p.state_dtype, at.state + (at.first + j) * p.head_dim, p.head_dim, 0);
    float* to = state + j / kBlock * width * kBlock + j % kBlock;
    for (int64_t c = 0; c < p.head_dim; ++c) to[c * kBlock] = row[c];
  }
}

static void StoreState(const Place& at, float* scratch) {
  const Params& p = *at.params;
  if (p.final_state == nullptr) return;
  const int64_t width = at.plan->key_pad, columns = at.plan->slice_columns;
  const float* state = scratch + at.plan->state;
  float* row = scratch + at.plan->gate;
  if (!p.state_v_first) {
    for (int64_t c = 0; c < p.head_dim; ++c) {
      for (int64_t j = 0; j < columns; j += kLanes) {
        Store(row + j, Load(state + (j / kBlock * width + c) * kBlock + j % kBlock));
      }
      StoreRow(p.final_state, p.state_dtype, at.state + c * p.head_v_dim + at.first, row, at.columns);
    }
    return;
  }
  for (int64_t j = 0; j < at.columns; ++j) {
    const float* from = state + j / kBlock * width * kBlock + j % kBlock;
    for (int64_t c = 0; c < p.head_dim; ++c) row[c] = from[c * kBlock];
    StoreRow(p.final_state, p.state_dtype, at.state + (at.first + j) * p.head_dim, row, p.head_dim);
  }
}

static void OneToken(const Place& at, float* scratch) {
  const Params& p = *at.params;
  const Plan& plan = *at.plan;
  const float dot = PrepareToken(plan, scratch);
  if (!at.in_place) {
    for (int64_t j = 0; j < plan.slice_columns; j += kBlock) {
      float* state = scratch + plan.state + j * plan.key_pad;
      AdvanceTokenByKey(plan, scratch, p.head_dim, j, state, state, kBlock, dot);
    }
    return;
  }
  const float* before = static_cast<const float*>(p.initial_state);
  float* after = static_cast<float*>(p.final_state);
  const int64_t step = p.state_v_first ? p.head_dim : 1;
  if (before) before += at.state + at.first * step;
  if (after) after += at.state + at.first * step;
  for (int64_t j = 0; j < at.columns; j += p.state_v_first ? 1 : kBlock) {
    const float* from = before ? before + j * step : nullptr;
    float* to = after ? after + j * step : nullptr;
    if (p.state_v_first) {
      AdvanceTokenByValue(plan, scratch, p.head_dim, j, from, to, dot);
    } else {
      AdvanceTokenByKey(plan, scratch, p.head_dim, j, from, to, p.head_v_dim, dot);
    }
  }
}

static void RunTask(const Call& call, int64_t task, float* scratch) {
  const Params& p = *call.params;
  const Plan& plan = call.plan;
  Place at;
  at.params = &p;
  at.plan = &plan;
  at.head = task / plan.slices % p.num_v_heads;
  at.sequence = task / plan.slices / p.num_v_heads;
  at.key_head = at.head / (p.num_v_heads / p.num_heads);
  at.first = task % plan.slices * plan.slice_columns;
  at.columns = Min(plan.slice_columns, p.head_v_dim - at.first);
  at.state = (at.sequence * p.num_v_heads + at.head) * p.head_dim * p.head_v_dim;
  Sequence(p, at.sequence, &at.row, &at.tokens);
  at.in_place = at.tokens == 1 && p.state_dtype == DType::kFloat32 &&
                (p.state_v_first ? p.head_dim % kLanes == 0 : at.columns % kBlock == 0);

  const float rate = p.A_log ? Exp(Splat(p.A_log[at.head]))[0] : 0.0f;
  float* bias = scratch + plan.bias;
  for (int64_t c = 0; c < plan.key_pad; ++c) {
    bias[c] = p.dt_bias && c < p.head_dim ? p.dt_bias[at.head * p.head_dim + c] : 0.0f;
  }
  if (p.conv_width) StartConvolution(at, scratch);
  if (!at.in_place) LoadState(at, scratch);
  if (at.in_place || at.tokens == 1) {
    LoadChunk(at, scratch, 0, 1, 1, rate);
    // columns past the head's are not written by the row-wise form, but read in whole vectors
    for (int64_t c = at.columns; c < plan.slice_columns; ++c) scratch[plan.o + c] = 0.0f;
    OneToken(at, scratch);
    StoreOutputs(call, at, scratch, 0, 1);
  } else {
    for (int64_t start = 0; start < at.tokens; start += kChunk) {
      const int64_t tokens = Min(kChunk, at.tokens - start), rows = RoundUp(tokens, kRows);
      LoadChunk(at, scratch, start, tokens, rows, rate);
      PrepareChunk(plan, scratch, tokens, rows);
      AdvanceChunk(plan, scratch, rows, p.final_state != nullptr || start + kChunk < at.tokens);
      StoreOutputs(call, at, scratch, start, tokens);
    }
  }
  if (!at.in_place) StoreState(at, scratch);
}

// Norm and gate of all heads of some token rows, after slices of the heads wrote `late`.
static void RunLateNorm(const Call& call, int64_t block, float* scratch) {
  const Params& p = *call.params;
  const int64_t rows = p.batch * p.seq_len, start = block * kNormRows;
  const int64_t width = p.head_v_dim, padded = RoundUp(width, kLanes);
  for (int64_t row = start; row < Min(rows, start + kNormRows); ++row) {
    for (int64_t head = 0; head < p.num_v_heads; ++head) {
      LoadRow(scratch, call.late, DType::kFloat32, (row * p.num_v_heads + head) * width, width, padded);
      FinishRow(p, scratch, scratch + padded, row, head, 0, width, true);
    }
  }
}
