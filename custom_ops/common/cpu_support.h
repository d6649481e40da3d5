// What the CPU kernels share outside of their vector code.
#pragma once

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace deltafuse::cpu {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

// The best instruction set of this processor. `limit`: 0 for any, 1 for no more than the compiler's default, 2 for no
// more than AVX2.
inline InstructionSet BestInstructionSet(int limit) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && limit == 0) return InstructionSet::kAvx512;
  if (avx2 && limit != 1) return InstructionSet::kAvx2;
#endif
  return InstructionSet::kBaseline;
}

// Subnormal numbers cost a hundred cycles each on some processors.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  FlushSubnormals() {}  // as the processor is set
#endif
};

// How many threads the machine has.
inline int64_t Threads() {
  static const int64_t threads = std::thread::hardware_concurrency();
  return threads > 0 ? threads : 1;
}

// A text that is valid until the thread's next call.
inline const char* Reason(const char* format, ...) __attribute__((format(printf, 1, 2)));
inline const char* Reason(const char* format, ...) {
  thread_local char text[256];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof(text), format, values);
  va_end(values);
  return text;
}

}  // namespace deltafuse::cpu
