// Rows of stored weights: their dot product with a vector, and their values as float32.
// Included once for each instruction set, after cpu_simd.h.

typedef int8_t BVec __attribute__((vector_size(DELTAFUSE_LANES)));
typedef uint8_t UBVec __attribute__((vector_size(DELTAFUSE_LANES)));
typedef int8_t B2Vec __attribute__((vector_size(2 * DELTAFUSE_LANES)));

// Bytes to floats. GCC takes vectors of bytes apart one by one, so x86 has its own instructions named here.
#if defined(__x86_64__) && DELTAFUSE_LANES == 16
DELTAFUSE_INLINE IVec ToInts(BVec b) { return (IVec)_mm512_cvtepi8_epi32((__m128i)b); }
DELTAFUSE_INLINE IVec ToInts(UBVec b) { return (IVec)_mm512_cvtepu8_epi32((__m128i)b); }
DELTAFUSE_INLINE HVec ToShorts(UBVec b) { return (HVec)_mm256_cvtepu8_epi16((__m128i)b); }
DELTAFUSE_INLINE void Halves(B2Vec v, BVec* low, BVec* high) {
  *low = (BVec)_mm256_castsi256_si128((__m256i)v);
  *high = (BVec)_mm256_extracti128_si256((__m256i)v, 1);
}
#elif defined(__x86_64__) && DELTAFUSE_LANES == 8
DELTAFUSE_INLINE __m128i Widened(int64_t eight) { return _mm_cvtsi64_si128(eight); }
DELTAFUSE_INLINE IVec ToInts(BVec b) { return (IVec)_mm256_cvtepi8_epi32(Widened((int64_t)b)); }
DELTAFUSE_INLINE IVec ToInts(UBVec b) { return (IVec)_mm256_cvtepu8_epi32(Widened((int64_t)b)); }
DELTAFUSE_INLINE HVec ToShorts(UBVec b) { return (HVec)_mm_cvtepu8_epi16(Widened((int64_t)b)); }
DELTAFUSE_INLINE void Halves(B2Vec v, BVec* low, BVec* high) {
  *low = (BVec)_mm_cvtsi128_si64((__m128i)v);
  *high = (BVec)_mm_extract_epi64((__m128i)v, 1);
}
#else
DELTAFUSE_INLINE IVec ToInts(BVec b) { return __builtin_convertvector(b, IVec); }
DELTAFUSE_INLINE IVec ToInts(UBVec b) { return __builtin_convertvector(b, IVec); }
DELTAFUSE_INLINE HVec ToShorts(UBVec b) { return __builtin_convertvector(b, HVec); }
DELTAFUSE_INLINE void Halves(B2Vec v, BVec* low, BVec* high) {
  __builtin_memcpy(low, &v, sizeof(*low));
  __builtin_memcpy(high, reinterpret_cast<const char*>(&v) + sizeof(*low), sizeof(*high));
}
#endif
DELTAFUSE_INLINE Vec ToFloats(IVec v) { return __builtin_convertvector(v, Vec); }

// What a row's numbers are; Format and DType in one.
enum class Kind { kF32, kF16, kBF16, kI4, kU4, kI8, kU8, kF8 };

DELTAFUSE_INLINE Kind KindOf(const Weights& w) {
  switch (w.format) {
    case Format::kInt4:
      return Kind::kI4;
    case Format::kUInt4:
      return Kind::kU4;
    case Format::kInt8:
      return Kind::kI8;
    case Format::kUInt8:
      return Kind::kU8;
    case Format::kFloat8:
      return Kind::kF8;
    default:
      return w.dtype == DType::kFloat32 ? Kind::kF32 : w.dtype == DType::kFloat16 ? Kind::kF16 : Kind::kBF16;
  }
}

// float8e4m3fn: as a float32 it is 2^120 times smaller in the exponent; subnormals are multiples of 2^-9.
DELTAFUSE_INLINE Vec FromFloat8(UBVec b) {
  const UVec x = (UVec)ToInts(b);
  const UVec magnitude = x & SplatU(0x7fu);
  const UVec normal = (magnitude << 20) + SplatU(120u << 23);
  const UVec small = AsBits(__builtin_convertvector((IVec)magnitude, Vec) * Splat(0x1p-9f));
  UVec bits = magnitude < SplatU(8u) ? small : normal;
  bits = magnitude == SplatU(0x7fu) ? SplatU(0x7fc00000u) : bits;
  return AsFloat(bits | ((x & SplatU(0x80u)) << 24));
}

// The numbers at i .. i + 2 kLanes - 1 of a row, without their scale; i is even.
template <Kind kKind>
DELTAFUSE_INLINE void Two(const char* row, int64_t i, int32_t zero, Vec* a, Vec* b) {
  if constexpr (kKind == Kind::kF32) {
    *a = Load(reinterpret_cast<const float*>(row) + i);
    *b = Load(reinterpret_cast<const float*>(row) + i + kLanes);
  } else if constexpr (kKind == Kind::kF16 || kKind == Kind::kBF16) {
    const HVec u = LoadH(reinterpret_cast<const uint16_t*>(row) + i);
    const HVec v = LoadH(reinterpret_cast<const uint16_t*>(row) + i + kLanes);
    *a = kKind == Kind::kF16 ? FromHalf(u) : FromBFloat16(u);
    *b = kKind == Kind::kF16 ? FromHalf(v) : FromBFloat16(v);
  } else if constexpr (kKind == Kind::kI4 || kKind == Kind::kU4) {
    UBVec bytes;
    __builtin_memcpy(&bytes, row + i / 2, sizeof(bytes));
    // two numbers of a byte side by side, the low half first
    const HVec wide = ToShorts(bytes);
    const HVec apart = (wide | (wide << 4)) & (HVec{} + static_cast<uint16_t>(0x0f0f));
    B2Vec numbers = (B2Vec)apart;
    // an int4 with its sign bit turned over is the number plus 8
    if (kKind == Kind::kI4) numbers ^= B2Vec{} + static_cast<int8_t>(8);
    numbers -= B2Vec{} + static_cast<int8_t>(kKind == Kind::kI4 ? zero + 8 : zero);
    BVec low, high;
    Halves(numbers, &low, &high);
    *a = ToFloats(ToInts(low));
    *b = ToFloats(ToInts(high));
  } else if constexpr (kKind == Kind::kF8) {
    UBVec u, v;
    __builtin_memcpy(&u, row + i, sizeof(u));
    __builtin_memcpy(&v, row + i + kLanes, sizeof(v));
    *a = FromFloat8(u);
    *b = FromFloat8(v);
  } else if constexpr (kKind == Kind::kI8) {
    BVec u, v;
    __builtin_memcpy(&u, row + i, sizeof(u));
    __builtin_memcpy(&v, row + i + kLanes, sizeof(v));
    const IVec z = IVec{} + zero;
    *a = ToFloats(ToInts(u) - z);
    *b = ToFloats(ToInts(v) - z);
  } else {
    UBVec u, v;
    __builtin_memcpy(&u, row + i, sizeof(u));
    __builtin_memcpy(&v, row + i + kLanes, sizeof(v));
    const IVec z = IVec{} + zero;
    *a = ToFloats(ToInts(u) - z);
    *b = ToFloats(ToInts(v) - z);
  }
}

// The number at i.
template <Kind kKind>
DELTAFUSE_INLINE float One(const char* row, int64_t i, int32_t zero) {
  if constexpr (kKind == Kind::kF32) {
    return reinterpret_cast<const float*>(row)[i];
  } else if constexpr (kKind == Kind::kF16 || kKind == Kind::kBF16) {
    HVec u{};
    u[0] = reinterpret_cast<const uint16_t*>(row)[i];
    return (kKind == Kind::kF16 ? FromHalf(u) : FromBFloat16(u))[0];
  } else if constexpr (kKind == Kind::kI4 || kKind == Kind::kU4) {
    const int32_t byte = static_cast<uint8_t>(row[i / 2]);
    const int32_t number = i % 2 ? byte >> 4 : byte & 15;
    return static_cast<float>(kKind == Kind::kI4 ? (number ^ 8) - 8 - zero : number - zero);
  } else if constexpr (kKind == Kind::kF8) {
    UBVec u{};
    u[0] = static_cast<uint8_t>(row[i]);
    return FromFloat8(u)[0];
  } else if constexpr (kKind == Kind::kI8) {
    return static_cast<float>(static_cast<int8_t>(row[i]) - zero);
  } else {
    return static_cast<float>(static_cast<uint8_t>(row[i]) - zero);
  }
}

DELTAFUSE_INLINE int32_t ZeroPoint(const Weights& w, const char* zeros, int64_t block) {
  if (zeros == nullptr) return 0;
  const bool is_signed = w.format == Format::kInt4 || w.format == Format::kInt8;
  return is_signed ? static_cast<int8_t>(zeros[block]) : static_cast<uint8_t>(zeros[block]);
}

template <Kind kKind>
DELTAFUSE_INLINE Vec DotSpan(const char* row, int64_t start, int64_t stop, int32_t zero, const float* x) {
  Vec a{}, b{};
  int64_t i = start;
  for (; i + 2 * kLanes <= stop; i += 2 * kLanes) {
    Vec u, v;
    Two<kKind>(row, i, zero, &u, &v);
    a += u * Load(x + i);
    b += v * Load(x + i + kLanes);
  }
  float rest = 0.0f;
  for (; i < stop; ++i) rest += One<kKind>(row, i, zero) * x[i];
  a += b;
  a[0] += rest;
  return a;
}

template <Kind kKind>
static float DotRow(const Weights& w, int64_t row, const float* x, float* scales) {
  const char* data = w.data + row * RowBytes(w);
  if constexpr (kKind == Kind::kF32 || kKind == Kind::kF16 || kKind == Kind::kBF16) {
    return Sum(DotSpan<kKind>(data, 0, w.cols, 0, x));
  } else {
    const int64_t at = row / w.block_rows * w.blocks;
    LoadRow(scales, w.scale, w.scale_dtype, at, w.blocks, w.blocks);
    const char* zeros = w.zero ? w.zero + at : nullptr;
    Vec total{};
    for (int64_t block = 0; block < w.blocks; ++block) {
      const int64_t start = block * w.block, stop = Min(w.cols, start + w.block);
      total += Splat(scales[block]) * DotSpan<kKind>(data, start, stop, ZeroPoint(w, zeros, block), x);
    }
    return Sum(total);
  }
}

// Writes the row's float32 values, and zeros up to `padded`.
template <Kind kKind>
static void UnpackRow(const Weights& w, int64_t row, float* to, int64_t padded, float* scales) {
  const char* data = w.data + row * RowBytes(w);
  constexpr bool kPlain = kKind == Kind::kF32 || kKind == Kind::kF16 || kKind == Kind::kBF16;
  const int64_t at = row / w.block_rows * w.blocks;
  if (!kPlain) LoadRow(scales, w.scale, w.scale_dtype, at, w.blocks, w.blocks);
  const char* zeros = w.zero ? w.zero + at : nullptr;
  for (int64_t block = 0; block < w.blocks; ++block) {
    const int64_t start = block * w.block, stop = Min(w.cols, start + w.block);
    const int32_t zero = ZeroPoint(w, zeros, block);
    const float scale = kPlain ? 1.0f : scales[block];
    int64_t i = start;
    for (; i + 2 * kLanes <= stop; i += 2 * kLanes) {
      Vec u, v;
      Two<kKind>(data, i, zero, &u, &v);
      Store(to + i, kPlain ? u : u * Splat(scale));
      Store(to + i + kLanes, kPlain ? v : v * Splat(scale));
    }
    for (; i < stop; ++i) to[i] = One<kKind>(data, i, zero) * scale;
  }
  for (int64_t i = w.cols; i < padded; ++i) to[i] = 0.0f;
}

struct RowCode {
  float (*dot)(const Weights&, int64_t, const float*, float*);
  void (*unpack)(const Weights&, int64_t, float*, int64_t, float*);
};

template <Kind kKind>
DELTAFUSE_INLINE RowCode CodeOf() {
  return {DotRow<kKind>, UnpackRow<kKind>};
}

static RowCode CodeFor(const Weights& w) {
  switch (KindOf(w)) {
    case Kind::kF32:
      return CodeOf<Kind::kF32>();
    case Kind::kF16:
      return CodeOf<Kind::kF16>();
    case Kind::kBF16:
      return CodeOf<Kind::kBF16>();
    case Kind::kI4:
      return CodeOf<Kind::kI4>();
    case Kind::kU4:
      return CodeOf<Kind::kU4>();
    case Kind::kI8:
      return CodeOf<Kind::kI8>();
    case Kind::kU8:
      return CodeOf<Kind::kU8>();
    default:
      return CodeOf<Kind::kF8>();
  }
}

constexpr int64_t kTileTokens = DELTAFUSE_LANES == 16 ? 4 : 2;

// out[t * kTileRows + r] = rows[r] . x[t] over `padded` floats.
DELTAFUSE_INLINE void Tile(const float* rows, const float* const* x, int64_t padded, float* out) {
  Vec sums[kTileRows][kTileTokens] = {};
  for (int64_t i = 0; i < padded; i += kLanes) {
    Vec w[kTileRows];
    for (int64_t r = 0; r < kTileRows; ++r) w[r] = Load(rows + r * padded + i);
    for (int64_t t = 0; t < kTileTokens; ++t) {
      const Vec v = Load(x[t] + i);
      for (int64_t r = 0; r < kTileRows; ++r) sums[r][t] += w[r] * v;
    }
  }
  for (int64_t t = 0; t < kTileTokens; ++t)
    for (int64_t r = 0; r < kTileRows; ++r) out[t * kTileRows + r] = Sum(sums[r][t]);
}
