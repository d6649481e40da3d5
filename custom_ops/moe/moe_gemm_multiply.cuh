// The experts' products on Hopper: a warpgroup's sums of one tile, U units of 64 rows by N tokens.
#pragma once

#include "moe_gemm_parts.cuh"

namespace deltafuse::moe {
namespace sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Which stage is next, and which has been read but not given back.
struct Reader {
  Pipeline at;
  int before = -1;
  __device__ __forceinline__ void release(Shared& shared, int stage) {
    __syncwarp();
    if (stage >= 0 && threadIdx.x % 32 == 0) barrier_arrive(&shared.empty[stage]);
  }
  __device__ __forceinline__ void release_before(Shared& shared) { release(shared, before), before = -1; }
};

// 16-bit numbers: both operands from shared memory. 64 columns a stage.
template <typename T, int N>
__device__ __forceinline__ void multiply_plain(uint32_t stage, uint32_t right, int unit0, float (&d)[2][N / 2]) {
  const uint32_t a = place(stage + unit0 * 8192), b = place(right);
  fence();
#pragma unroll
  for (int s = 0; s < 4; ++s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Product<N>::template shared<T>(d[half], descriptor(a, half * 8192 + s * 32), descriptor(b, s * 32));
    }
  }
  commit();
}

// Volatile, so that it is not loaded long before.
__device__ __forceinline__ float2 load_two(uint32_t shared) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "r"(shared));
  return x;
}
__device__ __forceinline__ float load_one(uint32_t shared) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(x) : "r"(shared));
  return x;
}

// A float8 product of 128 columns and M tokens, and its way into the sums from token `first` on.
template <int M>
__device__ __forceinline__ void begin_float8(uint32_t left, uint32_t right, float (&part)[M / 2]) {
  fence();
  Product<M>::template fresh<Float8>(part, descriptor(left, 0), descriptor(right, 0));
#pragma unroll
  for (int s = 1; s < 4; ++s) {
    Product<M>::template shared<Float8>(part, descriptor(left, s * 32), descriptor(right, s * 32));
  }
  commit();
}
// The same with the left operand in registers, which several parts share: 128 columns of the warp's 16 rows.
template <int M>
__device__ __forceinline__ void begin_float8(const uint32_t (&left)[4][4], uint32_t right, float (&part)[M / 2]) {
  fence();
  Product<M>::fresh8(part, left[0], descriptor(right, 0));
#pragma unroll
  for (int s = 1; s < 4; ++s) Product<M>::template registers<Float8>(part, left[s], descriptor(right, s * 32));
  commit();
}
__device__ __forceinline__ void load_left(uint32_t unit, uint32_t (&left)[4][4]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const uint32_t at = unit + row * 128 + (((s * 2 + lane / 16) ^ (lane & 7)) * 16);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(left[s][0]), "=r"(left[s][1]), "=r"(left[s][2]), "=r"(left[s][3])
                 : "r"(at)
                 : "memory");
  }
}
template <int M, int N>
__device__ __forceinline__ void end_float8(float s0, float s1, int first, float (&part)[M / 2], float (&d)[N / 2]) {
  pin(part);
#pragma unroll
  for (int i = 0; i < M / 2; ++i) {
    float& to = d[first / 2 + i];
    to = fmaf(part[i], i % 4 < 2 ? s0 : s1, to);
    asm volatile("" : "+f"(to));  // before the next product begins
  }
}

// How the sums of a stage are divided: parts of so many tokens, and of how many parts the sums are there at once. Two,
// so that one is scaled while the tensor cores make the next, where the registers are enough. Parts cost: the left
// operand is read again for each.
template <int N>
struct Float8Parts {
  static constexpr int kTokens = N > 128 ? N / 2 : N;
  static constexpr int kSets = N <= 96 ? 2 : 1;
};

// Integers become T in registers, one step of 16 columns ahead of the tensor cores. 128 columns a stage. Calls `early`
// once the products of the stage before are done.
template <typename T, Pack P, int N, int U, bool kPlainScales, typename Early>
__device__ __forceinline__ void multiply_integers(const Packed& w, const unsigned char* stage, uint32_t right,
                                                  int half_at, int unit0, const Early& early, float (&d)[U][N / 2]) {
  using Numbers = Raw<T, P>;
  constexpr int kPerWord = Numbers::kPerWord;
  const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  const T* tails = reinterpret_cast<const T*>(stage + 4 * w.payload + unit0 * w.tail) + row;
  const int tail = w.tail / static_cast<int>(sizeof(T));
  const uint32_t b0 = place(right), b1 = place(right + half_at);
  constexpr int kLoads = P == Pack::kInt4 ? 2 : 1;  // 16 bytes of a lane and unit, loaded together
  uint32_t scale[U][2], off[U][2], left[2][U][4];
  uint4 words[U][kLoads];
#pragma unroll
  for (int s = 0; s < 8; ++s) {
#pragma unroll
    for (int half = 0; half < U; ++half) {
      if (kPlainScales ? s == 0 : s % 2 == 0) {
        const T* values = tails + half * tail + (w.sub == 1 ? 0 : s / 2 * 64);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          scale[half][i] = twice<T>(to_float(values[8 * i]));
          const float zero = kPlainScales || !w.zeros ? Numbers::kMiddle : to_float(values[w.sub * 64 + 8 * i]);
          off[half][i] = twice<T>(Scaled<T, P>::offset(zero));
        }
      }
      if (s % (kPerWord * kLoads) == 0) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int from = (s / kPerWord + i) * 2048 + thread * 16;
          words[half][i] = *reinterpret_cast<const uint4*>(stage + (unit0 + half) * w.payload + from);
        }
      }
      Scaled<T, P>::integers(words[half][s / kPerWord % kLoads], s % kPerWord, scale[half][0], scale[half][1],
                             off[half][0], off[half][1], left[s & 1][half]);
    }
    const uint64_t b = descriptor(s < 4 ? b0 : b1, s % 4 * 32);
    fence();
#pragma unroll
    for (int half = 0; half < U; ++half) Product<N>::template registers<T>(d[half], left[s & 1][half], b);
    commit();
    wait<1>();  // the step before: its operands are free
    if (s == 0) early();
  }
}

// d[half]: sums of the warpgroup's units. The last stage is not given back. Sums of float8 lack the tokens'
// scales.
template <typename T, Pack P, int N, int U, bool kPlainScales>
__device__ __forceinline__ void multiply(const Packed& w, const StageLayout& layout, unsigned char* memory,
                                         Shared& shared, Reader& reader, int stages, float (&d)[U][N / 2]) {
  // The same in a warp's lanes, and known to be.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), unit0 = warpgroup * U;
  // Not by the first product: what it overwrites would be live from tile to tile.
#pragma unroll
  for (int half = 0; half < U; ++half) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[half][i] = 0.0f;
    pin(d[half]);
  }
  constexpr int kPart = P == Pack::kFloat8 ? Float8Parts<N>::kTokens : 2;
  constexpr int kSets = Float8Parts<N>::kSets;
  float part[kSets][kPart / 2] = {};
  if constexpr (P == Pack::kFloat8) {
#pragma unroll
    for (int i = 0; i < kSets; ++i) pin(part[i]);
  }
  float last[2] = {};  // scales of the sums that are not scaled yet
  for (int k = 0; k < stages; ++k) {
    const int at = reader.at.stage;
    barrier_wait(&shared.full[at], reader.at.phase);
    tensor_fence();
    const unsigned char* stage = memory + at * layout.bytes;
    const uint32_t right = address(stage) + layout.right;
    if constexpr (P == Pack::kPlain) {
      multiply_plain<T, N>(address(stage), right, unit0, d);
      wait<0>();
    } else if constexpr (P == Pack::kFloat8) {
      const int thread = threadIdx.x % 128;
      const uint32_t tails = address(stage) + 4 * w.payload + (thread / 32 * 16 + thread % 32 / 4) * 4;
      constexpr int kEach = N / kPart, kTurns = 2 * kEach;
      const uint32_t a8 = place(address(stage) + unit0 * 8192), b8 = place(right);
      auto begin = [&](int i) {
        begin_float8<kPart>(a8 + i / kEach * 512, b8 + i % kEach * kPart * 8, part[i % kSets]);
      };
      float scales[2][2];  // of the thread's rows
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scales[half][0] = load_one(tails + (unit0 + half) * 256);
        scales[half][1] = load_one(tails + (unit0 + half) * 256 + 32);
      }
      auto end = [&](int i) {
        end_float8<kPart, N>(scales[i / kEach][0], scales[i / kEach][1], i % kEach * kPart, part[i % kSets],
                             d[i / kEach]);
      };
      if constexpr (kEach > 1) {
        uint32_t left[4][4];
        auto begin_part = [&](int i) { begin_float8<kPart>(left, b8 + i % kEach * kPart * 8, part[0]); };
        load_left(address(stage) + unit0 * 8192, left);
        begin_part(0);
#pragma unroll
        for (int i = 0; i < kTurns; ++i) {
          wait<0>();
          if (i + 1 == kEach) load_left(address(stage) + (unit0 + 1) * 8192, left);
          end(i);
          if (i + 1 < kTurns) begin_part(i + 1);
        }
      } else if constexpr (kSets == 2) {
        begin(0);
        // The last sums of the stage before (zeros, before the first one).
        end_float8<kPart, N>(last[0], last[1], (kEach - 1) * kPart, part[1], d[1]);
#pragma unroll
        for (int i = 1; i < kTurns; ++i) {
          begin(i);
          wait<1>();
          end(i - 1);
        }
        wait<0>();
        pin(part[1]);
        last[0] = scales[1][0], last[1] = scales[1][1];
      } else {
        begin(0);
#pragma unroll
        for (int i = 0; i < kTurns; ++i) {
          wait<0>();
          end(i);
          if (i + 1 < kTurns) begin(i + 1);
        }
      }
    } else {
      multiply_integers<T, P, N, U, kPlainScales>(
          w, stage, right, layout.half, unit0, [&] { reader.release_before(shared); }, d);
    }
    if (k + 1 == stages || P == Pack::kInt4 || P == Pack::kInt8) {  // integers' last products are under way
      reader.before = at;
    } else {
      reader.release(shared, at);
    }
    reader.at.next(layout.stages);
  }
  if constexpr (P == Pack::kInt4 || P == Pack::kInt8) wait<0>();
  if constexpr (P == Pack::kFloat8 && kSets == 2) {
    constexpr int kEach = N / kPart;
    end_float8<kPart, N>(last[0], last[1], (kEach - 1) * kPart, part[1], d[1]);
  }
#pragma unroll
  for (int half = 0; half < U; ++half) pin(d[half]);
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sm90
}  // namespace deltafuse::moe
