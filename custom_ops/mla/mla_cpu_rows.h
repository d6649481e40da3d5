// Rows of operands and caches as float32, and back. Included as cpu_simd.h is, after it.

DELTAFUSE_INLINE int64_t BytesOf(DType type) { return type == DType::kFloat32 ? 4 : 2; }

// Nearest, ties to even, of |x| below 2^22.
DELTAFUSE_INLINE float Nearest(float x) {
  const float shift = 12582912.0f;
  return x < 0 ? -((-x + shift) - shift) : (x + shift) - shift;
}

// float8 e4m3fn, nearest, ties to even; x within -448 to 448.
DELTAFUSE_INLINE uint8_t ToFloat8(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = bits >> 24 & 0x80u;
  bits &= 0x7fffffffu;
  if (bits < 0x3c800000u) {  // below 2^-6: multiples of 2^-9
    return static_cast<uint8_t>(sign | static_cast<uint32_t>(Nearest(__builtin_fabsf(x) * 512.0f)));
  }
  const uint32_t rounded = (bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20;  // exponent and three bits
  const uint32_t code = rounded - (120u << 3);
  return static_cast<uint8_t>(sign | (code < 0x7eu ? code : 0x7eu));
}

// float8 e4m3fn codes as numbers. No step makes a subnormal float32, so the processor may flush those to zero.
DELTAFUSE_INLINE Vec FromFloat8(UVec codes) {
  const UVec magnitude = codes & SplatU(127u);
  const UVec small = AsBits(__builtin_convertvector((IVec)magnitude, Vec) * Splat(0x1p-9f));  // below 2^-6
  UVec bits = magnitude < SplatU(8u) ? small : (magnitude << 20) + SplatU(120u << 23);
  bits = magnitude == SplatU(127u) ? SplatU(0x7fc00000u) : bits;
  return AsFloat(bits | (codes & SplatU(128u)) << 24);
}

// The new token `token` of row `row`: which row of cos and sin.
DELTAFUSE_INLINE int64_t AngleRow(const Params& p, int64_t row, int64_t token) {
  if (p.position_ids) return p.position_ids[row * p.position_batch_stride + token];
  return row * p.cos_batch_stride + token;
}

// Rotates Dr channels by the angles of a new token. `line` has room for 3 Dr floats.
static void Rotate(const Params& p, float* x, int64_t row, int64_t token, float* line) {
  if (p.rope == Rope::kNone) return;
  const int64_t half = p.qk_rope_head_dim / 2, width = p.cos_width, at = AngleRow(p, row, token) * width;
  const DType type = p.cos_float32 ? DType::kFloat32 : p.dtype;
  float *cos = line, *sin = line + width, *old = line + 2 * width;
  LoadRow(cos, p.cos, type, at, width, width);
  LoadRow(sin, p.sin, type, at, width, width);
  for (int64_t i = 0; i < 2 * half; ++i) old[i] = x[i];
  for (int64_t j = 0; j < half; ++j) {
    const bool pairs = p.rope != Rope::kHalf;
    const float a = old[pairs ? 2 * j : j], b = old[pairs ? 2 * j + 1 : j + half];
    const int64_t first = p.rope == Rope::kInterleaved ? 2 * j : j;
    const int64_t second = p.rope == Rope::kInterleaved ? 2 * j + 1 : j + half;
    const int64_t angle_a = width == half ? j : first, angle_b = width == half ? j : second;
    x[first] = a * cos[angle_a] - b * sin[angle_a];
    x[second] = b * cos[angle_b] + a * sin[angle_b];
  }
}

// One head's query of a new token, rotated and scaled: nope to `to`, rope to `rope`.
static void LoadQuery(const Params& p, int64_t row, int64_t token, int64_t head, float* to, float* rope, float* line) {
  const int64_t nope = p.qk_nope_head_dim, width = p.qk_rope_head_dim;
  const int64_t at = ((row * p.seq_len + token) * p.num_heads + head) * (nope + width);
  LoadRow(to, p.q, p.dtype, at, nope, nope);
  LoadRow(rope, p.q, p.dtype, at + nope, width, width);
  Rotate(p, rope, row, token, line);
  float scale = p.scale;
  if (p.q_scale) scale *= p.q_scale[row * p.q_scale_batch_stride + token];
  for (int64_t i = 0; i < nope; ++i) to[i] *= scale;
  for (int64_t i = 0; i < width; ++i) rope[i] *= scale;
}

// The latent and the rotated key of slot `slot` of a cache, `padded` floats.
static void LoadCached(const Call& call, float* to, int64_t slot, int64_t padded) {
  const Params& p = *call.params;
  const int64_t rank = p.kv_lora_rank, rope = p.qk_rope_head_dim;
  if (p.packed_cache) {
    LoadRow(to, p.past_latent, p.dtype, slot * (rank + rope), rank + rope, padded);
    return;
  }
  if (p.cache_type == CacheType::kSame) {
    LoadRow(to, p.past_latent, p.dtype, slot * rank, rank, rank);
  } else if (p.cache_type == CacheType::kInt8) {
    const int8_t* codes = static_cast<const int8_t*>(p.past_latent) + slot * rank;
    for (int64_t c = 0; c < rank; ++c) to[c] = static_cast<float>(codes[c]) * p.past_latent_scale[c];
  } else {
    const uint8_t* codes = static_cast<const uint8_t*>(p.past_latent) + slot * rank;
    const int64_t groups = (rank + 127) / 128;
    for (int64_t g = 0; g < groups; ++g) {
      const float scale = p.past_latent_scale[slot * groups + g];
      const int64_t end = Min(rank, (g + 1) * 128);
      uint32_t wide[128] = {};
      for (int64_t c = g * 128; c < end; ++c) wide[c - g * 128] = codes[c];
      for (int64_t c = g * 128; c < end; c += kLanes) {
        UVec part;
        __builtin_memcpy(&part, wide + (c - g * 128), sizeof(part));
        Store(to + c, FromFloat8(part) * Splat(scale));
      }
    }
  }
  LoadRow(to + rank, p.past_k_rope, p.dtype, slot * rope, rope, padded - rank);
}

// Latent and rotated key of token `at` of a row, from the cache or of this call.
DELTAFUSE_INLINE void LoadToken(const Call& call, float* to, int64_t row, int64_t at, int64_t there) {
  const Params& p = *call.params;
  const int64_t padded = call.plan.row_pad;
  if (at < there) {
    LoadCached(call, to, Slot(p, row, at, p.past_len), padded);
  } else {
    const float* from = call.base + call.plan.fresh + (row * p.seq_len + at - there) * padded;
    __builtin_memcpy(to, from, static_cast<size_t>(padded) * sizeof(float));
  }
}

// Rounds the latent as an 8-bit cache does, and writes codes and scales where a present cache is asked for.
static void RoundLatent(const Call& call, float* latent, int64_t slot) {
  const Params& p = *call.params;
  const int64_t rank = p.kv_lora_rank;
  if (p.cache_type == CacheType::kInt8) {
    int8_t* codes = p.present_latent ? static_cast<int8_t*>(p.present_latent) + slot * rank : nullptr;
    for (int64_t c = 0; c < rank; ++c) {
      const float scale = p.past_latent_scale[c], x = latent[c] / scale;
      const float code = Nearest(x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x);
      if (codes) codes[c] = static_cast<int8_t>(code);
      latent[c] = code * scale;
    }
  } else if (p.cache_type == CacheType::kFloat8) {
    const int64_t groups = (rank + 127) / 128;
    uint8_t* codes = p.present_latent ? static_cast<uint8_t*>(p.present_latent) + slot * rank : nullptr;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t end = Min(rank, (g + 1) * 128);
      float largest = 0.0f;
      for (int64_t c = g * 128; c < end; ++c) {
        const float size = __builtin_fabsf(latent[c]);
        if (size > largest) largest = size;
      }
      float scale = largest / 448.0f;
      if (!(scale > 0.0f)) scale = 1.0f;
      if (p.present_latent_scale) p.present_latent_scale[slot * groups + g] = scale;
      for (int64_t c = g * 128; c < end; ++c) {
        const float x = latent[c] / scale;
        const uint8_t code = ToFloat8(x > 448.0f ? 448.0f : x < -448.0f ? -448.0f : x);
        if (codes) codes[c] = code;
        latent[c] = call.float8[code] * scale;
      }
    }
  }
}

// A new token: norm, rotation, rounding to the cache's codes; written to the present cache and kept as float32.
static void PrepareToken(const Call& call, int64_t row, int64_t token, float* line) {
  const Params& p = *call.params;
  const int64_t rank = p.kv_lora_rank, rope = p.qk_rope_head_dim, at = row * p.seq_len + token;
  float* to = call.base + call.plan.fresh + at * call.plan.row_pad;
  LoadRow(to, p.latent, p.dtype, at * p.latent_row_stride, rank, rank);
  LoadRow(to + rank, p.k_rope, p.dtype, at * p.k_rope_row_stride, rope, call.plan.row_pad - rank);
  if (p.kv_norm_weight) {
    float sum = 0.0f;
    for (int64_t start = 0; start < rank; start += 64) {  // short sums keep their digits
      float part = 0.0f;
      for (int64_t c = start; c < Min(rank, start + 64); ++c) part += to[c] * to[c];
      sum += part;
    }
    const float factor = 1.0f / __builtin_sqrtf(sum / static_cast<float>(rank) + p.kv_norm_eps);
    for (int64_t c = 0; c < rank; ++c) to[c] *= factor * p.kv_norm_weight[c];
  }
  Rotate(p, to + rank, row, token, line);
  if (p.cache != Cache::kLatent) return;
  const int64_t slot = Slot(p, row, There(p, row) + token, Keys(p));
  if (p.packed_cache) {
    if (p.present_latent) StoreRow(p.present_latent, p.dtype, slot * (rank + rope), to, rank + rope);
    return;
  }
  if (p.cache_type != CacheType::kSame) {
    RoundLatent(call, to, slot);
  } else if (p.present_latent) {
    StoreRow(p.present_latent, p.dtype, slot * rank, to, rank);
  }
  if (p.present_k_rope) StoreRow(p.present_k_rope, p.dtype, slot * rope, to + rank, rope);
}

// Rows [from, from + count) of one head's part of kv_b_weight, channels [channel, channel + width), `ld` floats apart.
static void LoadWeight(const Params& p, float* to, int64_t ld, int64_t from, int64_t count, int64_t head,
                       int64_t channel, int64_t width) {
  const int64_t both = int64_t{p.qk_nope_head_dim} + p.v_head_dim, row = both * p.num_heads;
  for (int64_t i = 0; i < count; ++i) {
    if (i + 8 < count) PrefetchRow(p.kv_b_weight, p.dtype, (from + i + 8) * row + head * both + channel, width);
    LoadRow(to + i * ld, p.kv_b_weight, p.dtype, (from + i) * row + head * both + channel, width, ld);
  }
}

// The same where it lies, for few rows of queries, which would not make up for a copy: null where it cannot be read so.
// The products read whole vectors of rows and of channels.
DELTAFUSE_INLINE const float* WeightInPlace(const Params& p, int64_t rows, int64_t from, int64_t count, int64_t head,
                                            int64_t channel, int64_t width, int64_t* ld) {
  const int64_t both = int64_t{p.qk_nope_head_dim} + p.v_head_dim;
  if (p.dtype != DType::kFloat32 || rows > 8 || count % kPad != 0 || width % kColumns != 0) return nullptr;
  *ld = both * p.num_heads;
  return static_cast<const float*>(p.kv_b_weight) + from * *ld + head * both + channel;
}

DELTAFUSE_INLINE float GateOf(const Params& p, int64_t row, int64_t token, int64_t head) {
  if (!p.gate_sigmoid) return 1.0f;
  float x;
  LoadRow(&x, p.gate, p.dtype, (row * p.seq_len + token) * p.num_heads + head, 1, 1);
  return Sigmoid(Splat(x))[0];
}
