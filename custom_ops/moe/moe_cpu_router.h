// Float32 roundings of float64 logits, and the tokens as float32. Included once for each instruction set, after
// cpu_simd.h. Runs with subnormal numbers kept.

typedef double DVec __attribute__((vector_size(8 * DELTAFUSE_LANES / 2)));
typedef float FHalf __attribute__((vector_size(4 * DELTAFUSE_LANES / 2)));

// The halves of a vector in float64.
DELTAFUSE_INLINE void Widen(Vec v, DVec* low, DVec* high) {
  FHalf halves[2];
  __builtin_memcpy(halves, &v, sizeof(v));
  *low = __builtin_convertvector(halves[0], DVec);
  *high = __builtin_convertvector(halves[1], DVec);
}

DELTAFUSE_INLINE double SumD(DVec v) {
  double total = 0.0;
  for (int i = 0; i < kLanes / 2; ++i) total += v[i];
  return total;
}

// Token `task` of the chunk: its float32 row, padded with zeros.
static void RunTokens(const Call& call, int64_t task, char*) {
  const Params& p = *call.params;
  LoadRow(call.At<float>(call.plan.x) + task * call.plan.x_pad, p.x, p.dtype, (call.first + task) * p.hidden_size,
          p.hidden_size, call.plan.x_pad);
}

// kRouterBlock experts' logits of kRouterTokens tokens.
static void RunLogits(const Call& call, int64_t task, char* scratch) {
  const Params& p = *call.params;
  const Plan& plan = call.plan;
  const int64_t blocks = Blocks(p.num_experts, kRouterBlock);
  const int64_t token = task / blocks * kRouterTokens, some = Min(kRouterTokens, call.tokens - token);
  const int64_t first = task % blocks * kRouterBlock, last = Min(p.num_experts, first + kRouterBlock);
  const DType dtype = p.router_weight_float32 ? DType::kFloat32 : p.dtype;
  float* row = reinterpret_cast<float*>(scratch + plan.rows);
  for (int64_t e = first; e < last; ++e) {
    LoadRow(row, p.router_weight, dtype, e * p.hidden_size, p.hidden_size, plan.x_pad);
    DVec low[kRouterTokens] = {}, high[kRouterTokens] = {};
    for (int64_t i = 0; i < plan.x_pad; i += kLanes) {
      DVec a, b;
      Widen(Load(row + i), &a, &b);
      for (int64_t t = 0; t < kRouterTokens; ++t) {
        if (t >= some) continue;
        DVec u, v;
        Widen(Load(call.At<float>(plan.x) + (token + t) * plan.x_pad + i), &u, &v);
        low[t] += a * u;
        high[t] += b * v;
      }
    }
    for (int64_t t = 0; t < some; ++t) {
      double logit = SumD(low[t] + high[t]);
      if (p.router_bias) logit += static_cast<double>(p.router_bias[e]);
      call.At<float>(plan.logits)[(token + t) * p.num_experts + e] = static_cast<float>(logit);
    }
  }
}

// Given logits of one token, in T or float32, with the bias.
static void RunGivenLogits(const Call& call, int64_t task, char*) {
  const Params& p = *call.params;
  float* to = call.At<float>(call.plan.logits) + task * p.num_experts;
  LoadRow(to, p.router_logits, p.router_logits_float32 ? DType::kFloat32 : p.dtype, (call.first + task) * p.num_experts,
          p.num_experts, p.num_experts);
  if (p.router_bias)
    for (int64_t e = 0; e < p.num_experts; ++e) to[e] += p.router_bias[e];
}

// The factor of the shared expert for one token.
static float SharedGate(const Call& call, int64_t token, float* row) {
  const Params& p = *call.params;
  if (p.shared_gate_weight == nullptr) return 1.0f;
  LoadRow(row, p.shared_gate_weight, p.shared_gate_float32 ? DType::kFloat32 : p.dtype, 0, p.hidden_size,
          call.plan.x_pad);
  const float* x = call.At<float>(call.plan.x) + token * call.plan.x_pad;
  Vec sum{};
  for (int64_t i = 0; i < call.plan.x_pad; i += kLanes) sum += Load(row + i) * Load(x + i);
  return Sigmoid(Splat(Sum(sum)))[0];
}
