// Hopper's warpgroup products D += A B: D 64 x N in float32, A from registers or shared memory, B from shared memory,
// both with columns along k in rows of 128 swizzled bytes. And the barriers and copies that feed them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace deltafuse::moe::sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct Float8 {};  // e4m3, as an element type

// Registers 8 i .. 8 i + 7 of D, in the text and as operands: 16 columns.
#define DF_T0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define DF_T1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define DF_T2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define DF_T3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define DF_T4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define DF_T5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define DF_T6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define DF_T7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define DF_T8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define DF_T9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define DF_T10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define DF_T11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define DF_D(C, i)                                                                                                   \
  C(d[8 * i]), C(d[8 * i + 1]), C(d[8 * i + 2]), C(d[8 * i + 3]), C(d[8 * i + 4]), C(d[8 * i + 5]), C(d[8 * i + 6]), \
      C(d[8 * i + 7])
#define DF_SUM(x) "+f"(x)
#define DF_T_16 DF_T0
#define DF_D_16(C) DF_D(C, 0)
#define DF_T_32 DF_T_16 ", " DF_T1
#define DF_D_32(C) DF_D_16(C), DF_D(C, 1)
#define DF_T_48 DF_T_32 ", " DF_T2
#define DF_D_48(C) DF_D_32(C), DF_D(C, 2)
#define DF_T_64 DF_T_48 ", " DF_T3
#define DF_D_64(C) DF_D_48(C), DF_D(C, 3)
#define DF_T_80 DF_T_64 ", " DF_T4
#define DF_D_80(C) DF_D_64(C), DF_D(C, 4)
#define DF_T_96 DF_T_80 ", " DF_T5
#define DF_D_96(C) DF_D_80(C), DF_D(C, 5)
#define DF_T_112 DF_T_96 ", " DF_T6
#define DF_D_112(C) DF_D_96(C), DF_D(C, 6)
#define DF_T_128 DF_T_112 ", " DF_T7
#define DF_D_128(C) DF_D_112(C), DF_D(C, 7)
#define DF_T_144 DF_T_128 ", " DF_T8
#define DF_D_144(C) DF_D_128(C), DF_D(C, 8)
#define DF_T_160 DF_T_144 ", " DF_T9
#define DF_D_160(C) DF_D_144(C), DF_D(C, 9)
#define DF_T_176 DF_T_160 ", " DF_T10
#define DF_D_176(C) DF_D_160(C), DF_D(C, 10)
#define DF_T_192 DF_T_176 ", " DF_T11
#define DF_D_192(C) DF_D_176(C), DF_D(C, 11)

// D += A B, or D = A B (`fresh`, whose D is in the same registers each time: it must have been set once). Operands
// after D: o0 .. are their numbers.
#define DF_FROM_SHARED(N, C, ADD, TYPES, DEPTH, TAIL, o0, o1)                                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " #ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N DEPTH \
               ".f32" TYPES " {" DF_T_##N "}, %" #o0 ", %" #o1 ", p, 1, 1" TAIL ";\n}\n"                   \
               : DF_D_##N(C)                                                                               \
               : "l"(a), "l"(b))
#define DF_FROM_REGISTERS(N, C, ADD, TYPES, DEPTH, TAIL, o0, o1, o2, o3, o4)                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " #ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N DEPTH      \
               ".f32" TYPES " {" DF_T_##N "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1" TAIL \
                                          ";\n}\n"                                                              \
               : DF_D_##N(C)                                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define DF_TYPES(N, C, ADD, o0, o1)                                   \
  if constexpr (std::is_same_v<T, Float8>) {                          \
    DF_FROM_SHARED(N, C, ADD, ".e4m3.e4m3", "k32", "", o0, o1);       \
  } else if constexpr (std::is_same_v<T, __half>) {                   \
    DF_FROM_SHARED(N, C, ADD, ".f16.f16", "k16", ", 0, 0", o0, o1);   \
  } else {                                                            \
    DF_FROM_SHARED(N, C, ADD, ".bf16.bf16", "k16", ", 0, 0", o0, o1); \
  }
#define DF_SHAPE(N, o0, o1, o2, o3, o4)                                                                       \
  template <>                                                                                                 \
  struct Product<N> {                                                                                         \
    template <typename T>                                                                                     \
    static __device__ __forceinline__ void shared(float (&d)[N / 2], uint64_t a, uint64_t b) {                \
      DF_TYPES(N, DF_SUM, 1, o0, o1)                                                                          \
    }                                                                                                         \
    template <typename T>                                                                                     \
    static __device__ __forceinline__ void fresh(float (&d)[N / 2], uint64_t a, uint64_t b) {                 \
      DF_TYPES(N, DF_SUM, 0, o0, o1)                                                                          \
    }                                                                                                         \
    template <typename T>                                                                                     \
    static __device__ __forceinline__ void registers(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) { \
      if constexpr (std::is_same_v<T, Float8>) {                                                              \
        DF_FROM_REGISTERS(N, DF_SUM, 1, ".e4m3.e4m3", "k32", "", o0, o1, o2, o3, o4);                         \
      } else if constexpr (std::is_same_v<T, __half>) {                                                       \
        DF_FROM_REGISTERS(N, DF_SUM, 1, ".f16.f16", "k16", ", 0", o0, o1, o2, o3, o4);                        \
      } else {                                                                                                \
        DF_FROM_REGISTERS(N, DF_SUM, 1, ".bf16.bf16", "k16", ", 0", o0, o1, o2, o3, o4);                      \
      }                                                                                                       \
    }                                                                                                         \
    /* Float8, D = A B. */                                                                                    \
    static __device__ __forceinline__ void fresh8(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {    \
      DF_FROM_REGISTERS(N, DF_SUM, 0, ".e4m3.e4m3", "k32", "", o0, o1, o2, o3, o4);                           \
    }                                                                                                         \
  };

template <int N>
struct Product;
DF_SHAPE(32, 16, 17, 18, 19, 20)
DF_SHAPE(64, 32, 33, 34, 35, 36)
DF_SHAPE(80, 40, 41, 42, 43, 44)
DF_SHAPE(96, 48, 49, 50, 51, 52)
DF_SHAPE(112, 56, 57, 58, 59, 60)
DF_SHAPE(128, 64, 65, 66, 67, 68)
DF_SHAPE(144, 72, 73, 74, 75, 76)
DF_SHAPE(160, 80, 81, 82, 83, 84)
DF_SHAPE(176, 88, 89, 90, 91, 92)
DF_SHAPE(192, 96, 97, 98, 99, 100)
#undef DF_T0
#undef DF_T1
#undef DF_T2
#undef DF_T3
#undef DF_T4
#undef DF_T5
#undef DF_T6
#undef DF_T7
#undef DF_T8
#undef DF_T9
#undef DF_T10
#undef DF_T11
#undef DF_T_16
#undef DF_D_16
#undef DF_T_32
#undef DF_D_32
#undef DF_T_48
#undef DF_D_48
#undef DF_T_64
#undef DF_D_64
#undef DF_T_80
#undef DF_D_80
#undef DF_T_96
#undef DF_D_96
#undef DF_T_112
#undef DF_D_112
#undef DF_T_128
#undef DF_D_128
#undef DF_T_144
#undef DF_D_144
#undef DF_T_160
#undef DF_D_160
#undef DF_T_176
#undef DF_D_176
#undef DF_T_192
#undef DF_D_192
#undef DF_D
#undef DF_SUM
#undef DF_FROM_SHARED
#undef DF_FROM_REGISTERS
#undef DF_TYPES
#undef DF_SHAPE

__device__ __forceinline__ uint32_t address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A matrix of rows of 128 swizzled bytes, eight rows a kilobyte, as the low half of its descriptor; from there `bytes`
// further on is one addition.
__device__ __forceinline__ uint32_t place(uint32_t shared) { return 1u << 16 | (shared & 0x3ffff) >> 4; }
__device__ __forceinline__ uint64_t descriptor(uint32_t place, int bytes) {
  return static_cast<uint64_t>(0x40000040u) << 32 | (place + bytes / 16);
}

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}
// Keeps the compiler from moving accumulators across.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int N>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(N));
}
__device__ __forceinline__ void barrier_init(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(address(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(address(bar)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra "
      "WAIT;\nDONE:\n}\n" ::"r"(address(bar)),
      "r"(parity)
      : "memory");
}
// One thread copies `bytes` (a multiple of 16) by the bulk copy engine; they count towards the barrier's transactions.
// policy: how the L2 should keep them.
__device__ __forceinline__ void bulk_copy(uint32_t shared, const void* global, uint32_t bytes, uint64_t* bar,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
      "%4;\n" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(address(bar)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}
// A thread's own copies of 16 bytes (`bytes` 0: zeros instead) or 4.
__device__ __forceinline__ void copy16(uint32_t shared, const void* global, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(shared), "l"(global) : "memory");
}
// Arrives once the thread's copies until now are there; the barrier's count has this arrival.
__device__ __forceinline__ void barrier_arrive_copied(uint64_t* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(address(bar)) : "memory");
}
// What threads wrote to shared memory is what the tensor cores read from here on.
__device__ __forceinline__ void tensor_fence() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace deltafuse::moe::sm90
