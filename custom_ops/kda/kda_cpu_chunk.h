// The delta rule on one chunk of up to 16 tokens, and on one token. Included as cpu_simd.h is, after it.
//
// With decays e_t = exp(g_t) and everything below in one head (kda-math's chunked form, without a single exponent
// beyond the e_t themselves: decays between tokens are running products, so none is larger than 1 and none is a
// difference of sums):
//   A_ij = beta_i k_i . (k_j decayed from j to i), j < i        M_ij = q_i . (k_j decayed from j to i), j <= i
//   (I + A) D = beta (V - K' S), by forward substitution        O = Q' S + M D        S <- decay S + K''^T D
// K', Q' carry the decay from the chunk's start, K'' that to its end.

// Rows of a matrix tile and vectors in one of its rows: the tile must fit the registers.
constexpr int kRows = DELTAFUSE_ROWS;
constexpr int kBlock = 2 * kLanes;  // value columns in a tile

// A tile of rows r0 .. r0 + kRows: acc[r] += sum_j left[r * stride + j] right[j], j in [0, count).
DELTAFUSE_INLINE void Accumulate(Vec (&acc)[kRows][2], const float* left, int64_t stride, const float* right,
                                 int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    const Vec b0 = Load(right + j * kBlock), b1 = Load(right + j * kBlock + kLanes);
    _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
      const Vec a = Splat(left[r * stride + j]);
      acc[r][0] += a * b0;
      acc[r][1] += a * b1;
    }
  }
}

// A, M and the decayed keys and queries of a chunk. Rows from `tokens` to the next multiple of kRows get zeros.
static void PrepareChunk(const Plan& plan, float* scratch, int64_t tokens, int64_t rows) {
  const int64_t width = plan.key_pad;
  const float* q = scratch + plan.q;
  const float* k = scratch + plan.k;
  const float* decay = scratch + plan.decay;
  const float* beta = scratch + plan.beta;
  float* total = scratch + plan.total;
  float* writes = scratch + plan.writes;
  float* key_reads = scratch + plan.reads;
  float* query_reads = key_reads + kChunk * width;
  for (int64_t c = 0; c < width; c += kLanes) {
    Vec product = Splat(1.0f);
    for (int64_t t = 0; t < tokens; ++t) {
      product *= Load(decay + t * width + c);
      Store(key_reads + t * width + c, product * Load(k + t * width + c));
      Store(query_reads + t * width + c, product * Load(q + t * width + c));
    }
    for (int64_t t = tokens; t < rows; ++t) {
      Store(key_reads + t * width + c, Vec{});
      Store(query_reads + t * width + c, Vec{});
    }
    Store(total + c, product);
  }

  // writes[c][j] holds channel c of key j, decayed up to the current token; lane j of a vector is token j.
  constexpr int kVectors = kChunk / kLanes;
  IVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  for (int64_t i = 0; i < width * kChunk; i += kLanes) Store(writes + i, Vec{});
  for (int64_t t = 0; t < rows; ++t) {
    float* a_row = scratch + plan.a + t * kChunk;
    float* mix_row = scratch + plan.mix + t * kChunk;
    for (int i = 0; i < kVectors; ++i) {
      Store(a_row + i * kLanes, Vec{});
      Store(mix_row + i * kLanes, Vec{});
    }
    if (t >= tokens) continue;
    const float* k_row = k + t * width;
    const float* q_row = q + t * width;
    const float* decay_row = decay + t * width;
    const Vec rate = Splat(beta[t]);
    for (int i = 0; i <= t / kLanes; ++i) {  // vectors past token t are still zero
      const auto own = lane == (IVec{} + static_cast<int32_t>(t - i * kLanes));
      Vec a[4] = {}, mix[4] = {};
      for (int64_t c = 0; c < width; c += 4) {
        _Pragma("GCC unroll 4") for (int u = 0; u < 4; ++u) {
          float* at = writes + (c + u) * kChunk + i * kLanes;
          const Vec key = Splat(k_row[c + u]);
          const Vec decayed = own ? key : Load(at) * Splat(decay_row[c + u]);
          Store(at, decayed);
          a[u] += key * decayed;
          mix[u] += Splat(q_row[c + u]) * decayed;
        }
      }
      // lane t of a is k_t . k_t, which nothing reads
      Store(a_row + i * kLanes, rate * ((a[0] + a[1]) + (a[2] + a[3])));
      Store(mix_row + i * kLanes, (mix[0] + mix[1]) + (mix[2] + mix[3]));
    }
  }
}

// delta <- (I + A)^-1 delta for kRows rows, in registers; earlier rows are already solved.
DELTAFUSE_INLINE void SolveTile(Vec (&acc)[kRows][2], const float* a, int64_t r0) {
  _Pragma("GCC unroll 8") for (int j = 0; j < kRows; ++j) {
    _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
      if (r <= j) continue;
      const Vec factor = Splat(a[(r0 + r) * kChunk + r0 + j]);
      acc[r][0] -= factor * acc[j][0];
      acc[r][1] -= factor * acc[j][1];
    }
  }
}

// One chunk, all columns of the slice: outputs to scratch o, the state moved on.
static void AdvanceChunk(const Plan& plan, float* scratch, int64_t rows, bool move_state) {
  const int64_t width = plan.key_pad, columns = plan.slice_columns;
  const float* beta = scratch + plan.beta;
  const float* key_reads = scratch + plan.reads;
  const float* query_reads = key_reads + kChunk * width;
  const float* a = scratch + plan.a;
  const float* mix = scratch + plan.mix;
  const float* total = scratch + plan.total;
  const float* writes = scratch + plan.writes;
  float* delta = scratch + plan.delta;
  for (int64_t column = 0; column < columns; column += kBlock) {
    float* state = scratch + plan.state + column * width;
    for (int64_t r0 = 0; r0 < rows; r0 += kRows) {
      Vec acc[kRows][2] = {};
      Accumulate(acc, key_reads + r0 * width, width, state, width);
      for (int r = 0; r < kRows; ++r) {
        const float* v = scratch + plan.v + (r0 + r) * columns + column;
        const Vec rate = Splat(beta[r0 + r]);
        acc[r][0] = rate * (Load(v) - acc[r][0]);
        acc[r][1] = rate * (Load(v + kLanes) - acc[r][1]);
      }
      for (int64_t j = 0; j < r0; ++j) {
        const Vec d0 = Load(delta + j * kBlock), d1 = Load(delta + j * kBlock + kLanes);
        _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
          const Vec factor = Splat(a[(r0 + r) * kChunk + j]);
          acc[r][0] -= factor * d0;
          acc[r][1] -= factor * d1;
        }
      }
      SolveTile(acc, a, r0);
      for (int r = 0; r < kRows; ++r) {
        Store(delta + (r0 + r) * kBlock, acc[r][0]);
        Store(delta + (r0 + r) * kBlock + kLanes, acc[r][1]);
      }
    }
    for (int64_t r0 = 0; r0 < rows; r0 += kRows) {
      Vec acc[kRows][2] = {};
      Accumulate(acc, query_reads + r0 * width, width, state, width);
      Accumulate(acc, mix + r0 * kChunk, kChunk, delta, r0 + kRows);
      for (int r = 0; r < kRows; ++r) {
        float* o = scratch + plan.o + (r0 + r) * columns + column;
        Store(o, acc[r][0]);
        Store(o + kLanes, acc[r][1]);
      }
    }
    if (!move_state) continue;
    for (int64_t c0 = 0; c0 < width; c0 += kRows) {
      Vec acc[kRows][2];
      for (int r = 0; r < kRows; ++r) {
        const Vec decay = Splat(total[c0 + r]);
        acc[r][0] = decay * Load(state + (c0 + r) * kBlock);
        acc[r][1] = decay * Load(state + (c0 + r) * kBlock + kLanes);
      }
      Accumulate(acc, writes + c0 * kChunk, kChunk, delta, rows);
      for (int r = 0; r < kRows; ++r) {
        Store(state + (c0 + r) * kBlock, acc[r][0]);
        Store(state + (c0 + r) * kBlock + kLanes, acc[r][1]);
      }
    }
  }
}

// Operands of one token: keys and queries times this token's decay go to `reads`. Returns q . k.
static float PrepareToken(const Plan& plan, float* scratch) {
  const int64_t width = plan.key_pad;
  float* reads = scratch + plan.reads;
  Vec dot = {};
  for (int64_t c = 0; c < width; c += kLanes) {
    const Vec decay = Load(scratch + plan.decay + c), q = Load(scratch + plan.q + c), k = Load(scratch + plan.k + c);
    Store(reads + c, decay * k);
    Store(reads + width + c, decay * q);
    dot += q * k;
  }
  return Sum(dot);
}

// One token, kBlock columns, state rows of keys: state[c * stride], c < head_dim. `after` may be `state` or null.
static void AdvanceTokenByKey(const Plan& plan, float* scratch, int64_t head_dim, int64_t column, const float* state,
                              float* after, int64_t stride, float q_dot_k) {
  const float* decay = scratch + plan.decay;
  const float* k = scratch + plan.k;
  const float* key_reads = scratch + plan.reads;
  const float* query_reads = key_reads + plan.key_pad;
  Vec by_key[2] = {}, by_query[2] = {};
  for (int64_t c = 0; state != nullptr && c < head_dim; ++c) {
    const Vec s0 = Load(state + c * stride), s1 = Load(state + c * stride + kLanes);
    const Vec key = Splat(key_reads[c]), query = Splat(query_reads[c]);
    by_key[0] += key * s0;
    by_key[1] += key * s1;
    by_query[0] += query * s0;
    by_query[1] += query * s1;
  }
  const Vec rate = Splat(scratch[plan.beta]);
  Vec delta[2];
  for (int i = 0; i < 2; ++i) {
    delta[i] = rate * (Load(scratch + plan.v + column + i * kLanes) - by_key[i]);
    Store(scratch + plan.o + column + i * kLanes, by_query[i] + Splat(q_dot_k) * delta[i]);
  }
  if (after == nullptr) return;
  for (int64_t c = 0; c < head_dim; ++c) {
    const Vec key = Splat(k[c]), factor = Splat(decay[c]);
    for (int i = 0; i < 2; ++i) {
      const Vec old = state == nullptr ? Vec{} : factor * Load(state + c * stride + i * kLanes);
      Store(after + c * stride + i * kLanes, old + key * delta[i]);
    }
  }
}

// One token, one value column, its state a row of head_dim keys (a multiple of kLanes).
static void AdvanceTokenByValue(const Plan& plan, float* scratch, int64_t head_dim, int64_t column, const float* state,
                                float* after, float q_dot_k) {
  const float* decay = scratch + plan.decay;
  const float* k = scratch + plan.k;
  const float* key_reads = scratch + plan.reads;
  const float* query_reads = key_reads + plan.key_pad;
  Vec by_key = {}, by_query = {};
  for (int64_t c = 0; state != nullptr && c < head_dim; c += kLanes) {
    const Vec s = Load(state + c);
    by_key += s * Load(key_reads + c);
    by_query += s * Load(query_reads + c);
  }
  const float delta = scratch[plan.beta] * (scratch[plan.v + column] - Sum(by_key));
  scratch[plan.o + column] = Sum(by_query) + q_dot_k * delta;
  if (after == nullptr) return;
  for (int64_t c = 0; c < head_dim; c += kLanes) {
    const Vec old = state == nullptr ? Vec{} : Load(decay + c) * Load(state + c);
    Store(after + c, old + Load(k + c) * Splat(delta));
  }
}
