// The experts' two halves, as tasks. Included once for each instruction set, after moe_cpu_weights.h.

// The activation of one vector.
DELTAFUSE_INLINE Vec Activate(Activation kind, float alpha, Vec x) {
  if (kind == Activation::kSilu) return alpha == 1.0f ? Silu(x) : x * Sigmoid(Splat(alpha) * x);
  if (kind == Activation::kRelu2) {
    const Vec y = Larger(x, Vec{});  // NaN: x > 0 is false, and the second is taken
    const Vec kept = x != x ? x : y;
    return kept * kept;
  }
  for (int i = 0; i < kLanes; ++i) {
    const float v = x[i];
    const float inner = kind == Activation::kGelu ? __builtin_erff(v * 0.70710678118654752f)
                                                  : __builtin_tanhf(0.79788456080286536f * (v + 0.044715f * v * v * v));
    x[i] = 0.5f * v * (1.0f + inner);
  }
  return x;
}

DELTAFUSE_INLINE Vec AtMost(Vec x, float limit) { return x > Splat(limit) ? Splat(limit) : x; }
DELTAFUSE_INLINE Vec AtLeast(Vec x, float limit) { return x < Splat(limit) ? Splat(limit) : x; }

// What the down projection sees, of kRowBlock outputs of the first half (gate and up, or up alone in `gate`).
DELTAFUSE_INLINE void Hidden(const Params& p, const float* gate, const float* up, float* to) {
  for (int64_t i = 0; i < kRowBlock; i += kLanes) {
    Vec g = Load(gate + i);
    if (p.clamp == Clamp::kBefore) g = AtMost(g, p.gate_limit);
    g = Activate(p.activation, p.activation_alpha, g);
    if (p.clamp == Clamp::kAfter) g = AtMost(g, p.gate_limit);
    if (p.gated) {
      Vec u = Load(up + i);
      if (p.clamp != Clamp::kNone) u = AtLeast(AtMost(u, p.up_limit), -p.up_limit);
      g = g * (u + Splat(p.up_offset));
    }
    Store(to + i, g);
  }
}

// An expert and its tokens, or the shared one with all of the chunk's.
struct Slot {
  bool shared = false, zero = false;
  int64_t expert = 0, first = 0, count = 0;  // of the pairs
};

DELTAFUSE_INLINE Slot SlotAt(const Call& call, int64_t index) {
  if (index == call.num_active + call.num_zero) return {true, false, 0, 0, call.tokens};
  const int32_t* starts = call.At<int32_t>(call.plan.starts);
  const int64_t expert = call.At<int32_t>(call.plan.active)[index];
  return {false, index >= call.num_active, expert, starts[expert], starts[expert + 1] - starts[expert]};
}

DELTAFUSE_INLINE int64_t TokenOf(const Call& call, const Slot& slot, int64_t i) {
  return slot.shared ? i : call.At<int32_t>(call.plan.pairs)[slot.first + i] / call.params->top_k;
}

// A block of kRowBlock rows of one expert's first half, for all of its tokens.
static void RunGateUp(const Call& call, int64_t task, char* scratch) {
  const Params& p = *call.params;
  const Plan& plan = call.plan;
  const int64_t routed = call.num_active * Blocks(p.intermediate_size, kRowBlock);
  const bool shared = task >= routed;
  const int64_t inter = shared ? p.shared_intermediate_size : p.intermediate_size;
  const int64_t per_slot = Blocks(inter, kRowBlock);
  const Slot slot = SlotAt(call, shared ? call.num_active + call.num_zero : task / per_slot);
  const int64_t row = (shared ? task - routed : task % per_slot) * kRowBlock;
  const int64_t count = Min(kRowBlock, inter - row);
  const int64_t joined = p.gated ? 2 * inter : inter;
  const Weights w = WeightsOf(p, shared ? p.shared_gate_up : p.gate_up, slot.expert, joined, p.hidden_size);
  const RowCode code = CodeFor(w);
  float* rows = reinterpret_cast<float*>(scratch + plan.rows);
  float* scales = reinterpret_cast<float*>(scratch + plan.scales);
  const float* x = call.At<float>(plan.x);
  const int64_t pad = shared ? plan.shared_pad : plan.h_pad;
  float* h = call.At<float>(shared ? plan.shared_h : plan.h) + slot.first * pad + row;
  const float* bias = shared ? p.shared_gate_up_bias : p.gate_up_bias;
  if (bias) bias += slot.expert * joined + row;
  float gate[kRowBlock] = {}, up[kRowBlock] = {}, made[kRowBlock];
  const auto finish = [&](int64_t token) {
    if (bias) {
      for (int64_t r = 0; r < count; ++r) gate[r] += bias[r];
      for (int64_t r = 0; r < (p.gated ? count : 0); ++r) up[r] += bias[inter + r];
    }
    Hidden(p, gate, up, made);
    // zeros behind the last row: the down projection reads whole vectors
    const int64_t until = row + kRowBlock >= inter ? pad - row : count;
    for (int64_t r = 0; r < count; ++r) h[token * pad + r] = made[r];
    for (int64_t r = count; r < until; ++r) h[token * pad + r] = 0.0f;
  };
  if (slot.count == 1) {
    const float* one = x + TokenOf(call, slot, 0) * plan.x_pad;
    for (int64_t r = 0; r < count; ++r) {
      gate[r] = code.dot(w, row + r, one, scales);
      if (p.gated) up[r] = code.dot(w, inter + row + r, one, scales);
    }
    finish(0);
    return;
  }
  // The rows of a tile are unpacked once and meet all tokens; gate and up of a token must meet, so a tile's results
  // wait in h, up's in the scratch's sums.
  float* ups = reinterpret_cast<float*>(scratch + plan.sums);
  float out[kTileTokens * kTileRows];
  for (int64_t half = 0; half < (p.gated ? 2 : 1); ++half) {
    for (int64_t r = 0; r < count; r += kTileRows) {
      const int64_t some = Min(kTileRows, count - r);
      for (int64_t k = 0; k < kTileRows; ++k)
        code.unpack(w, half * inter + row + r + Min(k, some - 1), rows + k * plan.x_pad, plan.x_pad, scales);
      for (int64_t t = 0; t < slot.count; t += kTileTokens) {
        const float* tokens[kTileTokens];
        for (int64_t k = 0; k < kTileTokens; ++k)
          tokens[k] = x + TokenOf(call, slot, Min(t + k, slot.count - 1)) * plan.x_pad;
        Tile(rows, tokens, plan.x_pad, out);
        for (int64_t k = 0; k < Min(kTileTokens, slot.count - t); ++k)
          for (int64_t j = 0; j < some; ++j)
            (half ? ups[(t + k) * kRowBlock + r + j] : h[(t + k) * pad + r + j]) = out[k * kTileRows + j];
      }
    }
  }
  for (int64_t t = 0; t < slot.count; ++t) {
    for (int64_t r = 0; r < count; ++r) {
      gate[r] = h[t * pad + r];
      up[r] = ups[t * kRowBlock + r];
    }
    finish(t);
  }
}

// A block of kRowBlock output channels, for all tokens of the chunk: the experts in order, then the shared one.
static void RunDown(const Call& call, int64_t task, char* scratch) {
  const Params& p = *call.params;
  const Plan& plan = call.plan;
  const int64_t row = task * kRowBlock, count = Min(kRowBlock, p.hidden_size - row);
  float* rows = reinterpret_cast<float*>(scratch + plan.rows);
  float* scales = reinterpret_cast<float*>(scratch + plan.scales);
  float* sums = reinterpret_cast<float*>(scratch + plan.sums);
  for (int64_t i = 0; i < call.tokens * kRowBlock; ++i) sums[i] = 0.0f;
  const int64_t slots = call.num_active + call.num_zero + (p.shared_intermediate_size > 0 ? 1 : 0);
  for (int64_t s = 0; s < slots; ++s) {
    const Slot slot = SlotAt(call, s);
    const auto weight = [&](int64_t i) {
      if (slot.shared) return call.At<float>(plan.gates)[i];
      return call.At<float>(plan.weights)[call.At<int32_t>(plan.pairs)[slot.first + i]];
    };
    if (slot.zero) {
      for (int64_t t = 0; t < slot.count; ++t) {
        const int64_t token = TokenOf(call, slot, t);
        const float* x = call.At<float>(plan.x) + token * plan.x_pad + row;
        for (int64_t r = 0; r < count; ++r) sums[token * kRowBlock + r] += weight(t) * x[r];
      }
      continue;
    }
    const int64_t inter = slot.shared ? p.shared_intermediate_size : p.intermediate_size;
    const int64_t pad = slot.shared ? plan.shared_pad : plan.h_pad;
    const Weights w = WeightsOf(p, slot.shared ? p.shared_down : p.down, slot.expert, p.hidden_size, inter);
    const RowCode code = CodeFor(w);
    const float* h = call.At<float>(slot.shared ? plan.shared_h : plan.h) + slot.first * pad;
    const float* biases = slot.shared ? p.shared_down_bias : p.down_bias;
    float bias[kRowBlock] = {};
    for (int64_t r = 0; r < (biases ? count : 0); ++r) bias[r] = biases[slot.expert * p.hidden_size + row + r];
    if (slot.count == 1) {
      float* to = sums + TokenOf(call, slot, 0) * kRowBlock;
      const float factor = weight(0);
      for (int64_t r = 0; r < count; ++r) to[r] += factor * (code.dot(w, row + r, h, scales) + bias[r]);
      continue;
    }
    float out[kTileTokens * kTileRows];
    for (int64_t r = 0; r < count; r += kTileRows) {
      const int64_t some = Min(kTileRows, count - r);
      for (int64_t k = 0; k < kTileRows; ++k) code.unpack(w, row + r + Min(k, some - 1), rows + k * pad, pad, scales);
      for (int64_t t = 0; t < slot.count; t += kTileTokens) {
        const float* tokens[kTileTokens];
        for (int64_t k = 0; k < kTileTokens; ++k) tokens[k] = h + Min(t + k, slot.count - 1) * pad;
        Tile(rows, tokens, pad, out);
        for (int64_t k = 0; k < Min(kTileTokens, slot.count - t); ++k) {
          float* to = sums + TokenOf(call, slot, t + k) * kRowBlock + r;
          const float factor = weight(t + k);
          for (int64_t j = 0; j < some; ++j) to[j] += factor * (out[k * kTileRows + j] + bias[r + j]);
        }
      }
    }
  }
  for (int64_t t = 0; t < call.tokens; ++t)
    StoreRow(p.y, p.dtype, (call.first + t) * p.hidden_size + row, sums + t * kRowBlock, count);
}
