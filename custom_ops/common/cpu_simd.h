// Vectors of DELTAFUSE_LANES floats, elementary functions on them, and conversions of 16-bit floats.
// Included once for each instruction set, inside a namespace of its own: so there is no include guard, and nothing
// from the standard library may be used, whose inline functions the linker would merge across instruction sets.

#define DELTAFUSE_INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(4 * DELTAFUSE_LANES)));
typedef int32_t IVec __attribute__((vector_size(4 * DELTAFUSE_LANES)));
typedef uint32_t UVec __attribute__((vector_size(4 * DELTAFUSE_LANES)));
typedef uint16_t HVec __attribute__((vector_size(2 * DELTAFUSE_LANES)));

constexpr int kLanes = DELTAFUSE_LANES;

DELTAFUSE_INLINE Vec Load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
DELTAFUSE_INLINE void Store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof(v)); }
DELTAFUSE_INLINE Vec Splat(float x) { return Vec{} + x; }
DELTAFUSE_INLINE UVec SplatU(uint32_t x) { return UVec{} + x; }
DELTAFUSE_INLINE Vec AsFloat(UVec v) { return (Vec)v; }
DELTAFUSE_INLINE UVec AsBits(Vec v) { return (UVec)v; }
DELTAFUSE_INLINE Vec Larger(Vec a, Vec b) { return a > b ? a : b; }
DELTAFUSE_INLINE Vec Smaller(Vec a, Vec b) { return a < b ? a : b; }
DELTAFUSE_INLINE Vec Abs(Vec a) { return AsFloat(AsBits(a) & SplatU(0x7fffffffu)); }

// The upper half onto the lower one, until one is left. By way of plain floats: in an array of vectors, GCC 12's
// AddressSanitizer does not keep their alignment.
DELTAFUSE_INLINE float Sum(Vec v) {
  typedef float Four __attribute__((vector_size(16)));
  Four f;
  float lanes[kLanes];
#if DELTAFUSE_LANES == 16
  typedef float Eight __attribute__((vector_size(32)));
  Eight low, high;
  __builtin_memcpy(lanes, &v, sizeof(v));
  __builtin_memcpy(&low, lanes, sizeof(low));
  __builtin_memcpy(&high, lanes + 8, sizeof(high));
  const Eight w = low + high;
#else
  const Vec w = v;
#endif
  __builtin_memcpy(lanes, &w, sizeof(w));
  __builtin_memcpy(&f, lanes, sizeof(f));
#if DELTAFUSE_LANES >= 8
  Four g;
  __builtin_memcpy(&g, lanes + 4, sizeof(g));
  f += g;
#endif
  return (f[0] + f[2]) + (f[1] + f[3]);
}

// exp by 2^n * exp(r), |r| <= ln 2 / 2; relative error about 2e-7. Zero below -87.3, where float32 has no normal value.
DELTAFUSE_INLINE Vec Exp(Vec x) {
  const Vec low = Splat(-87.3f);
  const Vec y = Smaller(Splat(88.0f), Larger(low, x));  // NaN stays: both give their second operand then
  const Vec shifted = y * Splat(1.44269504088896341f) + Splat(12582912.0f);
  const Vec n = shifted - Splat(12582912.0f);
  Vec r = y - n * Splat(0.693359375f);
  r = r + n * Splat(2.12194440054690583e-4f);
  Vec p = Splat(1.9875691500e-4f);
  p = p * r + Splat(1.3981999507e-3f);
  p = p * r + Splat(8.3334519073e-3f);
  p = p * r + Splat(4.1665795894e-2f);
  p = p * r + Splat(1.6666665459e-1f);
  p = p * r + Splat(5.0000001201e-1f);
  p = p * (r * r) + r + Splat(1.0f);
  const Vec result = AsFloat(AsBits(p) + (AsBits(shifted) << 23));
  return x < low ? Vec{} : result;
}

DELTAFUSE_INLINE Vec Sigmoid(Vec x) { return Splat(1.0f) / (Splat(1.0f) + Exp(-x)); }
DELTAFUSE_INLINE Vec Silu(Vec x) { return x * Sigmoid(x); }

// log(1 + exp(x)) = max(x, 0) + log1p(y) with y = exp(-|x|) and log1p(y) = 2 atanh(y / (2 + y)).
DELTAFUSE_INLINE Vec Softplus(Vec x) {
  const Vec y = Exp(-Abs(x));
  const Vec s = y / (y + Splat(2.0f));
  const Vec s2 = s * s;
  Vec p = Splat(2.0f / 15.0f);
  p = p * s2 + Splat(2.0f / 13.0f);
  p = p * s2 + Splat(2.0f / 11.0f);
  p = p * s2 + Splat(2.0f / 9.0f);
  p = p * s2 + Splat(2.0f / 7.0f);
  p = p * s2 + Splat(2.0f / 5.0f);
  p = p * s2 + Splat(2.0f / 3.0f);
  p = p * s2 + Splat(2.0f);
  return Larger(x, Vec{}) + p * s;
}

// 16-bit floats. No step makes or takes a subnormal float32, so the processor may flush those to zero.

DELTAFUSE_INLINE Vec FromHalf(HVec h) {
  const UVec x = __builtin_convertvector(h, UVec);
  const UVec sign = (x & SplatU(0x8000u)) << 16;
  const UVec magnitude = x & SplatU(0x7fffu);
  const UVec normal = (magnitude << 13) + SplatU(112u << 23);
  const UVec special = (magnitude << 13) | SplatU(0x7f800000u);
  const UVec small = AsBits(__builtin_convertvector((IVec)magnitude, Vec) * Splat(0x1p-24f));
  UVec bits = magnitude >= SplatU(0x7c00u) ? special : normal;
  bits = magnitude < SplatU(0x0400u) ? small : bits;
  return AsFloat(bits | sign);
}

DELTAFUSE_INLINE HVec ToHalf(Vec v) {
  const UVec x = AsBits(v);
  const UVec sign = (x >> 16) & SplatU(0x8000u);
  const UVec magnitude = x & SplatU(0x7fffffffu);
  // rounds to nearest even; the carry moves into the exponent, and past the largest finite number to infinity
  const UVec odd = (magnitude >> 13) & SplatU(1u);
  const UVec normal = (magnitude + SplatU(0xfffu) + odd - SplatU(112u << 23)) >> 13;
  // below 2^-14 the sum with 0.5 has the half's spacing: the addition rounds
  const UVec small = AsBits(AsFloat(magnitude) + Splat(0.5f)) - SplatU(0x3f000000u);
  UVec bits = magnitude < SplatU(113u << 23) ? small : normal;
  bits = magnitude >= SplatU(0x477ff000u) ? SplatU(0x7c00u) : bits;
  bits = magnitude > SplatU(0x7f800000u) ? SplatU(0x7e00u) : bits;
  return __builtin_convertvector(bits | sign, HVec);
}

DELTAFUSE_INLINE Vec FromBFloat16(HVec h) { return AsFloat(__builtin_convertvector(h, UVec) << 16); }

DELTAFUSE_INLINE HVec ToBFloat16(Vec v) {
  const UVec x = AsBits(v);
  const UVec rounded = (x + SplatU(0x7fffu) + ((x >> 16) & SplatU(1u))) >> 16;
  const UVec quiet = (x >> 16) | SplatU(0x40u);
  return __builtin_convertvector((x & SplatU(0x7fffffffu)) > SplatU(0x7f800000u) ? quiet : rounded, HVec);
}

DELTAFUSE_INLINE HVec LoadH(const uint16_t* p) {
  HVec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
DELTAFUSE_INLINE void StoreH(uint16_t* p, HVec v) { __builtin_memcpy(p, &v, sizeof(v)); }

// Reads `count` elements from element `at` of `source` as float32, and zeros up to `padded`, a multiple of kLanes.
static void LoadRow(float* to, const void* source, DType dtype, int64_t at, int64_t count, int64_t padded) {
  const int64_t whole = count / kLanes * kLanes;
  if (dtype == DType::kFloat32) {
    const float* from = static_cast<const float*>(source) + at;
    for (int64_t i = 0; i < whole; i += kLanes) Store(to + i, Load(from + i));
    for (int64_t i = whole; i < count; ++i) to[i] = from[i];
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(source) + at;
    const bool half = dtype == DType::kFloat16;
    for (int64_t i = 0; i < whole; i += kLanes)
      Store(to + i, half ? FromHalf(LoadH(from + i)) : FromBFloat16(LoadH(from + i)));
    if (whole < count) {
      uint16_t rest[kLanes] = {};
      for (int64_t i = whole; i < count; ++i) rest[i - whole] = from[i];
      const Vec v = half ? FromHalf(LoadH(rest)) : FromBFloat16(LoadH(rest));
      for (int64_t i = whole; i < count; ++i) to[i] = v[i - whole];
    }
  }
  for (int64_t i = count; i < padded; ++i) to[i] = 0.0f;
}

// Asks for a row that will be read soon; one head's rows lie too far apart for the processor to foresee it.
DELTAFUSE_INLINE void PrefetchRow(const void* source, DType dtype, int64_t at, int64_t count) {
  const int64_t bytes = dtype == DType::kFloat32 ? 4 : 2;
  const char* row = static_cast<const char*>(source) + at * bytes;
  for (int64_t i = 0; i < count * bytes; i += 64) __builtin_prefetch(row + i);
}

// Writes `count` float32 values as elements of `target` from element `at` on.
static void StoreRow(void* target, DType dtype, int64_t at, const float* from, int64_t count) {
  const int64_t whole = count / kLanes * kLanes;
  if (dtype == DType::kFloat32) {
    float* to = static_cast<float*>(target) + at;
    for (int64_t i = 0; i < whole; i += kLanes) Store(to + i, Load(from + i));
    for (int64_t i = whole; i < count; ++i) to[i] = from[i];
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(target) + at;
  const bool half = dtype == DType::kFloat16;
  for (int64_t i = 0; i < whole; i += kLanes)
    StoreH(to + i, half ? ToHalf(Load(from + i)) : ToBFloat16(Load(from + i)));
  if (whole < count) {
    float values[kLanes] = {};
    for (int64_t i = whole; i < count; ++i) values[i - whole] = from[i];
    uint16_t rest[kLanes];
    StoreH(rest, half ? ToHalf(Load(values)) : ToBFloat16(Load(values)));
    for (int64_t i = whole; i < count; ++i) to[i] = rest[i - whole];
  }
}
