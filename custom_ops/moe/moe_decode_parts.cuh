// What both decode kernels do: a warp streams 16 rows of packed weights through its own part of shared memory and
// multiplies them with 8 tokens. Loops over stages stay rolled: instructions that run a few times cost more to fetch.
#pragma once

#include "moe_decode.h"
#include "moe_fragment.cuh"

namespace deltafuse::moe {

template <Pack P>
constexpr int kStageCols = P == Pack::kPlain ? 64 : 128;  // columns of a stage

// A matrix has 16 slabs of 16 rows a tile; they lie so that neighbours hold neighbouring channels (see model_row in
// moe_pack_sm80.cu): which unit, and which warp's rows of it.
__host__ __device__ __forceinline__ int unit_of(int slab) { return (slab >> 3 & 1) * 2 + (slab & 1); }
__host__ __device__ __forceinline__ int rows_of(int slab) { return slab >> 1 & 3; }
__host__ __device__ __forceinline__ int slabs_of(const Packed& w) { return w.tiles * 16; }

// A slab's stage in shared memory: payload, then scales and zero points.
__host__ __device__ __forceinline__ int slot_bytes_of(const Packed& w) { return (w.payload + w.tail) / 4; }
inline __host__ __device__ int slot_bytes_of(const Packed& w, const Packed& other) {
  const int one = slot_bytes_of(w), two = other.count ? slot_bytes_of(other) : 0;
  return one > two ? one : two;
}

// 16 bytes to shared memory, not waited for.
__device__ __forceinline__ void copy16(uint32_t shared, const unsigned char* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// A number that all lanes of a warp have, said so to the compiler.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// What a lane copies of a slab's stages.
struct Source {
  const unsigned char* payload;  // the lane's
  int tail;                      // from there to the lane's part of scales and zero points; 0: it has none
};
template <Pack P>
__device__ __forceinline__ Source slab_source(const Packed& w, int expert, int slab, int stage) {
  constexpr bool kRows = P == Pack::kPlain || P == Pack::kFloat8;  // else in the order of lanes
  constexpr int kTail = P == Pack::kFloat8 ? 64 : 32;              // bytes of 16 rows' scales
  const int lane = threadIdx.x % 32, unit = unit_of(slab), rows = rows_of(slab);
  const uint32_t stage_bytes = w.stage_bytes(), tile_bytes = w.stages * stage_bytes;  // an expert has less than 4 GB
  const unsigned char* base = w.data + static_cast<uint64_t>(w.tiles * tile_bytes) * static_cast<uint32_t>(expert) +
                              (slab / 16 * tile_bytes + stage * stage_bytes);
  const int payload = unit * w.payload + rows * (kRows ? 2048 : 512) + lane * 16;
  const int part = lane * 16 / kTail, within = lane * 16 % kTail;
  const int tail = 4 * w.payload + unit * w.tail + (part * 4 + rows) * kTail + within;
  return Source{base + payload, lane < w.tail / 64 ? tail - payload : 0};
}
template <Pack P>
__device__ __forceinline__ void copy_stage(const Source& from, uint32_t slot) {
  constexpr int kPieces = Shape<P>::kWords, kStep = P == Pack::kPlain || P == Pack::kFloat8 ? 512 : 2048;
  const uint32_t to = slot + threadIdx.x % 32 * 16;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) copy16(to + i * 512, from.payload + i * kStep);
  if (from.tail) copy16(to + kPieces * 512, from.payload + from.tail);
}

// Where the upper digit of a number stands among a row's, of 128 columns [2 halves][2 digits][t][4 steps][4]; the lower
// one is 64 bytes further.
__device__ __forceinline__ int digit_at(int col) {
  const int step = col % 128 / 16;
  return col / 128 * 256 + step / 4 * 128 + col % 8 / 2 * 16 + step % 4 * 4 + col % 2 * 2 + col % 16 / 8;
}
// Where something of 8 columns stands: a lane's four of 128 columns, t, t + 4, .., lie beside each other.
__device__ __forceinline__ int group_at(int group) { return group / 16 * 16 + group % 4 * 4 + group % 16 / 4; }

// Two int8 digits of numbers, relative to the largest of their 128 columns: |h l| is at most 2^14, so numbers are off
// by 2^-15 of the largest at most; those of eight bits that are not smaller than 2^-7 of it are exact.
struct Digits {
  float scale, by;                                               // of a number in digits; and back
  __device__ explicit Digits(uint32_t most) {                    // the largest magnitude's bits
    const int exponent = max(static_cast<int>(most >> 23), 27);  // biased
    scale = __uint_as_float(static_cast<uint32_t>(exponent - 13) << 23);
    by = __uint_as_float(static_cast<uint32_t>(267 - exponent) << 23);
    if (most >= 0x7f800000u) scale = __uint_as_float(0x7fffffffu), by = 0.0f;  // no number
  }
  __device__ __forceinline__ void split(const float (&x)[4], uint32_t* high, uint32_t* low) const {
    int h[4], n[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) n[i] = __float2int_rn(x[i] * by), h[i] = (n[i] + 128) >> 8;
    // The lower bytes of four: what is above them does not matter.
    *low = __byte_perm(__byte_perm(n[0], n[1], 0x0040), __byte_perm(n[2], n[3], 0x0040), 0x5410);
    *high = __byte_perm(__byte_perm(h[0], h[1], 0x0040), __byte_perm(h[2], h[3], 0x0040), 0x5410);
  }
};

// D += A B in integers, A 16 x 32, B 32 x 8, fours along k.
__device__ __forceinline__ void mma_integers(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// ((x ^ 0x88..) & 0xf0..): the upper four bits of each byte as a signed number 16 times as large.
__device__ __forceinline__ uint32_t upper_fours(uint32_t x) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0x28;\n" : "=r"(y) : "r"(x), "r"(0x88888888u), "r"(0xf0f0f0f0u));
  return y;
}

// Half of a stage of integers, 64 columns, as left operands of 32.
template <Pack P>
struct Integers {
  uint4 x, y;
  __device__ __forceinline__ Integers(const unsigned char* slot, int half) {
    const unsigned char* own = slot + threadIdx.x % 32 * 16;
    if constexpr (P == Pack::kInt4) {
      x = *reinterpret_cast<const uint4*>(own + half * 512);
    } else {
      x = *reinterpret_cast<const uint4*>(own + half * 1024);
      y = *reinterpret_cast<const uint4*>(own + half * 1024 + 512);
    }
  }
  __device__ __forceinline__ void steps(int i, uint32_t (&a)[4]) const {  // 0 or 1
    if constexpr (P == Pack::kInt4) {
      const uint32_t one = word_of(x, 2 * i), two = word_of(x, 2 * i + 1);
      a[0] = upper_fours(one << 4), a[1] = upper_fours(one), a[2] = upper_fours(two << 4), a[3] = upper_fours(two);
    } else {
      const uint4& v = i ? y : x;
      a[0] = __byte_perm(v.x, v.y, 0x6240) ^ 0x80808080u, a[1] = __byte_perm(v.x, v.y, 0x7351) ^ 0x80808080u;
      a[2] = __byte_perm(v.z, v.w, 0x6240) ^ 0x80808080u, a[3] = __byte_perm(v.z, v.w, 0x7351) ^ 0x80808080u;
    }
  }
};

// total += scales * 16 rows of weights times 4 tokens; the lane gets rows g and g + 8 of token t. right: the lane's
// part of the stage's columns of token g / 2. scale: what counts the token t's digits. sum_of(sub): what its 32 columns
// add up to, with zero points. kFine: weights' scales are for 32 columns, else for 128.
template <typename T, Pack P, bool kFine, typename SumOf>
__device__ __forceinline__ void multiply_digits(bool zeros, const unsigned char* slot, const unsigned char* right,
                                                float scale, SumOf sum_of, float (&total)[2]) {
  constexpr int kSub = kFine ? 4 : 1;
  constexpr float kMiddle = P == Pack::kInt4 ? 8.0f : 128.0f, kFactor = P == Pack::kInt4 ? 1.0f / 16.0f : 1.0f;
  const int lane = threadIdx.x % 32, g = lane / 4;
  const T* tail = reinterpret_cast<const T*>(slot + Shape<P>::kWords * 512) + g;
  int sum[4] = {};
  auto flush = [&](int sub) {
    float low = static_cast<float>(sum[0] * 256 + sum[1]) * (scale * kFactor),
          high = static_cast<float>(sum[2] * 256 + sum[3]) * (scale * kFactor);
    if (zeros) {
      const float columns = kFine ? sum_of(sub) : (sum_of(0) + sum_of(1)) + (sum_of(2) + sum_of(3));
      low = fmaf(kMiddle - to_float(tail[(kSub + sub) * 16]), columns, low);
      high = fmaf(kMiddle - to_float(tail[(kSub + sub) * 16 + 8]), columns, high);
    }
    total[0] = fmaf(to_float(tail[sub * 16]), low, total[0]);
    total[1] = fmaf(to_float(tail[sub * 16 + 8]), high, total[1]);
    sum[0] = sum[1] = sum[2] = sum[3] = 0;
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 b = *reinterpret_cast<const uint4*>(right + half * 128);
    const Integers<P> left(slot, half);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t a[4];
      left.steps(i, a);
      mma_integers(sum, a, word_of(b, 2 * i), word_of(b, 2 * i + 1));
      if constexpr (kFine) flush(2 * half + i);
    }
  }
  if constexpr (!kFine) flush(0);
}

// For floating-point weights; total: rows g and g + 8 of columns 2 t and 2 t + 1. have: else zeros.
template <typename T, Pack P>
__device__ __forceinline__ void multiply_floats(const unsigned char* slot, const unsigned char* right, bool have,
                                                float factor, float (&total)[4]) {
  using Left = Raw<T, P>;
  constexpr int kPerPiece = P == Pack::kFloat8 ? 4 : 2;  // steps of a lane's 16 bytes
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float sum[2][4] = {};
#pragma unroll
  for (int piece = 0; piece < Shape<P>::kSteps / kPerPiece; ++piece) {
    const unsigned char* row = slot + g * 128 + ((piece * 4 + t) ^ g) * 16;
    const uint4 x = *reinterpret_cast<const uint4*>(row), y = *reinterpret_cast<const uint4*>(row + 1024);
#pragma unroll
    for (int i = 0; i < kPerPiece; i += 2) {
      const uint4 b =
          have ? *reinterpret_cast<const uint4*>(right + (piece * kPerPiece + i) * 32) : make_uint4(0, 0, 0, 0);
      uint32_t one[4], two[4];
      Left::floats(x, y, i, one), Left::floats(x, y, i + 1, two);
      mma(sum[0], one, b.x, b.y, T());
      mma(sum[1], two, b.z, b.w, T());
    }
  }
  float s0 = factor, s1 = factor;
  if constexpr (P == Pack::kFloat8) {
    const float* scale = reinterpret_cast<const float*>(slot + Shape<P>::kWords * 512) + g;
    s0 *= scale[0] * Left::kFactor, s1 *= scale[8] * Left::kFactor;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) total[i] = fmaf(i < 2 ? s0 : s1, sum[0][i] + sum[1][i], total[i]);
}

// total += weights' scales * 16 rows of weights times one row of h: the columns of the product are its digits, apart
// for the four 8-channel groups of 32 channels, each with a scale of its own; the lane gets group t's part of rows g
// and g + 8. right: the lane's digits; scales, sums (with zero points): of the lane's groups in this stage.
struct GroupMasks {
  uint32_t even, odd;  // what the lane's column takes of a step's four channels
  __device__ GroupMasks() {
    const int group = threadIdx.x % 32 / 8;
    const uint32_t mask = group & 1 ? 0xff00ff00u : 0x00ff00ffu;
    even = group < 2 ? mask : 0, odd = group < 2 ? 0 : mask;
  }
};
template <typename T, Pack P, bool kFine>
__device__ __forceinline__ void multiply_groups(bool zeros, const unsigned char* slot, const uint4 (&right)[2],
                                                const GroupMasks& masks, const float4& scales, const float4& sums,
                                                float factor, float (&total)[2]) {
  constexpr int kSub = kFine ? 4 : 1;
  constexpr float kMiddle = P == Pack::kInt4 ? 8.0f : 128.0f, kFactor = P == Pack::kInt4 ? 1.0f / 16.0f : 1.0f;
  const int lane = threadIdx.x % 32, g = lane / 4;
  const T* tail = reinterpret_cast<const T*>(slot + Shape<P>::kWords * 512) + g;
  float low = 0.0f, high = 0.0f;
  auto flush = [&](int sub, float sum) {
    low *= kFactor, high *= kFactor;
    if (zeros) {
      low = fmaf(kMiddle - to_float(tail[(kSub + sub) * 16]), sum, low);
      high = fmaf(kMiddle - to_float(tail[(kSub + sub) * 16 + 8]), sum, high);
    }
    total[0] = fmaf(to_float(tail[sub * 16]) * factor, low, total[0]);
    total[1] = fmaf(to_float(tail[sub * 16 + 8]) * factor, high, total[1]);
    low = high = 0.0f;
  };
  auto part = [](const float4& four, int i) { return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w; };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Integers<P> left(slot, half);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t a[4];
      left.steps(i, a);
      int sum[4] = {};
      mma_integers(sum, a, word_of(right[half], 2 * i) & masks.even, word_of(right[half], 2 * i + 1) & masks.odd);
      const float scale = part(scales, 2 * half + i);
      low = fmaf(static_cast<float>(sum[0] * 256 + sum[1]), scale, low);
      high = fmaf(static_cast<float>(sum[2] * 256 + sum[3]), scale, high);
      if constexpr (kFine) flush(2 * half + i, part(sums, 2 * half + i));
    }
  }
  if constexpr (!kFine) flush(0, (sums.x + sums.y) + (sums.z + sums.w));
}

template <Pack P>
struct PackOf {
  static constexpr Pack kPack = P;
};
// Calls run with the experts' format and the shared expert's, as types: the same, or the activations' own.
template <typename Run>
cudaError_t dispatch_packs(Pack pack, Pack shared, Run run) {
  auto with = [&](auto own) {
    if constexpr (decltype(own)::kPack != Pack::kPlain) {
      if (shared != pack) return run(own, PackOf<Pack::kPlain>());
    }
    return run(own, own);
  };
  switch (pack) {
    case Pack::kPlain:
      return with(PackOf<Pack::kPlain>());
    case Pack::kInt4:
      return with(PackOf<Pack::kInt4>());
    case Pack::kInt8:
      return with(PackOf<Pack::kInt8>());
    case Pack::kFloat8:
      return with(PackOf<Pack::kFloat8>());
  }
  return cudaErrorInvalidValue;
}

}  // namespace deltafuse::moe
