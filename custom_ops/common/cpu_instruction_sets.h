// Includes the header named by DELTAFUSE_CPU_CODE once for each instruction set, in namespaces avx512, avx2 and
// baseline, with DELTAFUSE_LANES floats a vector and DELTAFUSE_ROWS rows that a block of registers holds. No include
// guard: the caller includes this inside its own namespace, after <immintrin.h> and "cpu_support.h".

// The vector types stay inside each instruction set's own functions, so how they would be passed does not matter.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#endif
namespace avx512 {
#define DELTAFUSE_LANES 16
#define DELTAFUSE_ROWS 8
#include DELTAFUSE_CPU_CODE
#undef DELTAFUSE_LANES
#undef DELTAFUSE_ROWS
#undef DELTAFUSE_INLINE
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#define DELTAFUSE_LANES 8
#define DELTAFUSE_ROWS 4
#include DELTAFUSE_CPU_CODE
#undef DELTAFUSE_LANES
#undef DELTAFUSE_ROWS
#undef DELTAFUSE_INLINE
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

namespace baseline {
#define DELTAFUSE_LANES 4
#define DELTAFUSE_ROWS 4
#include DELTAFUSE_CPU_CODE
#undef DELTAFUSE_LANES
#undef DELTAFUSE_ROWS
#undef DELTAFUSE_INLINE
}  // namespace baseline

#undef DELTAFUSE_CPU_CODE
