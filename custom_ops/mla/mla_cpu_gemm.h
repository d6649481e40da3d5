// Matrix products on float32 rows. Included as cpu_simd.h is, after it.

// The sums of kLanes vectors' lanes, in order.
template <int... l>
struct Order {};
#if DELTAFUSE_LANES == 16
typedef Order<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15> Lanes;
#elif DELTAFUSE_LANES == 8
typedef Order<0, 1, 2, 3, 4, 5, 6, 7> Lanes;
#else
typedef Order<0, 1, 2, 3> Lanes;
#endif

// In every group of 2 * half lanes: the sums of a's two halves, then those of b's.
template <int half, int... l>
DELTAFUSE_INLINE Vec Fold(Vec a, Vec b, Order<l...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, ((l & half) ? kLanes + l - half : l)...) +
         __builtin_shufflevector(a, b, ((l & half) ? kLanes + l : l + half)...);
#else
  return __builtin_shuffle(a, b, IVec{((l & half) ? kLanes + l - half : l)...}) +
         __builtin_shuffle(a, b, IVec{((l & half) ? kLanes + l : l + half)...});
#endif
}

template <int half>
DELTAFUSE_INLINE void FoldAll(Vec (&v)[kLanes]) {
  _Pragma("GCC unroll 8") for (int i = 0; i < half; ++i) v[i] = Fold<half>(v[i], v[i + half], Lanes());
  if constexpr (half > 1) FoldAll<half / 2>(v);
}

// c[m][n] = sum over width channels of a[m] . b[n], for rows m and kLanes / rows columns n.
template <int rows>
DELTAFUSE_INLINE void DotTile(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                              int64_t width) {
  constexpr int columns = kLanes / rows;
  Vec acc[kLanes] = {};
  for (int64_t k = 0; k < width; k += kLanes) {
    Vec right[columns];
    _Pragma("GCC unroll 16") for (int n = 0; n < columns; ++n) right[n] = Load(b + n * ldb + k);
    _Pragma("GCC unroll 4") for (int m = 0; m < rows; ++m) {
      const Vec left = Load(a + m * lda + k);
      _Pragma("GCC unroll 16") for (int n = 0; n < columns; ++n) acc[m * columns + n] += left * right[n];
    }
  }
  FoldAll<kLanes / 2>(acc);
  float sums[kLanes];
  Store(sums, acc[0]);
  for (int m = 0; m < rows; ++m) __builtin_memcpy(c + m * ldc, sums + m * columns, columns * sizeof(float));
}

// c [rows][ldc] = a [rows][lda] b^T, for b [columns][ldb] and `width` channels, a multiple of kLanes. `columns` is
// rounded up to a multiple of kLanes: there must be rows of b and room in c for that.
static void DotRows(int64_t rows, int64_t columns, int64_t width, const float* a, int64_t lda, const float* b,
                    int64_t ldb, float* c, int64_t ldc) {
  constexpr int kMost = kLanes == 16 ? 4 : kLanes == 8 ? 2 : 1;
  const int64_t padded = (columns + kLanes - 1) / kLanes * kLanes;
  int64_t m = 0;
  for (; m + kMost <= rows; m += kMost) {
    for (int64_t n = 0; n < padded; n += kLanes / kMost) {
      DotTile<kMost>(a + m * lda, lda, b + n * ldb, ldb, c + m * ldc + n, ldc, width);
    }
  }
  for (; m < rows; ++m) {
    for (int64_t n = 0; n < padded; n += kLanes)
      DotTile<1>(a + m * lda, lda, b + n * ldb, ldb, c + m * ldc + n, ldc, width);
  }
}

template <int rows>
DELTAFUSE_INLINE void SumTile(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                              int64_t count) {
  Vec acc[rows][2];
  _Pragma("GCC unroll 8") for (int m = 0; m < rows; ++m) {
    acc[m][0] = Load(c + m * ldc);
    acc[m][1] = Load(c + m * ldc + kLanes);
  }
  for (int64_t k = 0; k < count; ++k) {
    const Vec b0 = Load(b + k * ldb), b1 = Load(b + k * ldb + kLanes);
    _Pragma("GCC unroll 8") for (int m = 0; m < rows; ++m) {
      const Vec left = Splat(a[m * lda + k]);
      acc[m][0] += left * b0;
      acc[m][1] += left * b1;
    }
  }
  _Pragma("GCC unroll 8") for (int m = 0; m < rows; ++m) {
    Store(c + m * ldc, acc[m][0]);
    Store(c + m * ldc + kLanes, acc[m][1]);
  }
}

// c [rows][ldc] += a [rows][lda] b, for b [count][ldb] and `columns`, a multiple of kColumns.
static void AddRows(int64_t rows, int64_t columns, int64_t count, const float* a, int64_t lda, const float* b,
                    int64_t ldb, float* c, int64_t ldc) {
  for (int64_t n = 0; n < columns; n += 2 * kLanes) {
    int64_t m = 0;
    for (; m + DELTAFUSE_ROWS <= rows; m += DELTAFUSE_ROWS) {
      SumTile<DELTAFUSE_ROWS>(a + m * lda, lda, b + n, ldb, c + m * ldc + n, ldc, count);
    }
    for (; m + 2 <= rows; m += 2) SumTile<2>(a + m * lda, lda, b + n, ldb, c + m * ldc + n, ldc, count);
    for (; m < rows; ++m) SumTile<1>(a + m * lda, lda, b + n, ldb, c + m * ldc + n, ldc, count);
  }
}

DELTAFUSE_INLINE void FillRow(float* to, int64_t width, float value) {
  for (int64_t i = 0; i < width; ++i) to[i] = value;
}
