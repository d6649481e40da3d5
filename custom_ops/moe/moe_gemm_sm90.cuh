// The experts' products on Hopper's tensor cores. A block's tile is 256 weight rows by up to most_tokens of one expert:
// one thread fetches weights and tokens by bulk copies, two consumer warpgroups multiply 128 rows each. Integers become
// T in registers; float8 sums are scaled into float32 every 128 columns. Blocks stay and take tiles from the list that
// the router left on the device.
#pragma once

#include "moe_fragment.cuh"
#include "moe_wgmma.cuh"

namespace deltafuse::moe {
namespace sm90 {

constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 128;  // the registers of whole warpgroups can be dealt out anew
constexpr int kMostStages = 6;

// Tokens of a tile, at most: accumulators and operands must fit the registers.
__host__ __device__ constexpr int most_tokens(Pack p) {
  return p == Pack::kPlain ? 192 : p == Pack::kFloat8 ? 128 : 160;
}

struct StageLayout {
  int right, scales, bytes, stages;  // offsets in a stage; its size; how many
};
inline StageLayout stage_layout(const Packed& w, int shared_bytes) {
  const int most = most_tokens(w.pack);
  const bool integers = w.pack == Pack::kInt4 || w.pack == Pack::kInt8;
  StageLayout s;
  s.right = (w.stage_bytes() + 1023) / 1024 * 1024;
  s.scales = s.right + most * (integers ? 256 : 128);
  s.bytes = s.scales + (w.pack == Pack::kFloat8 ? 1024 : 0);
  const int room = shared_bytes - 12 * 1024;  // static shared memory, alignment
  s.stages = room / s.bytes < kMostStages ? room / s.bytes : kMostStages;
  return s;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct Shared {
  uint64_t full[kMostStages], empty[kMostStages];
};

struct Pipeline {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};

// One thread.
template <Pack P>
__device__ __forceinline__ void produce(const GemmArgs& a, const StageLayout& layout, uint32_t base, uint64_t* full,
                                        uint64_t* empty) {
  constexpr int kHalves = P == Pack::kInt4 || P == Pack::kInt8 ? 2 : 1;  // of 128 bytes of a token in a stage
  constexpr int kMost = most_tokens(P);
  const Packed& w = a.weights;
  const int total = *a.num_tiles * w.tiles, stage_bytes = w.stage_bytes();
  Pipeline at;
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const TokenTile tile = a.tiles[index / w.tiles];
    const int count = arranged_rows(tile.count);
    const unsigned char* weights = w.data + tile.expert * w.expert_bytes() + index % w.tiles * w.tile_bytes();
    const unsigned char* x = static_cast<const unsigned char*>(a.x) + int64_t(tile.start) * a.x_blocks * 128;
    const float* scale = P == Pack::kFloat8 ? a.x_scale + int64_t(tile.start) * a.x_blocks : nullptr;
    for (int k = 0; k < w.stages; ++k) {
      barrier_wait(&empty[at.stage], at.phase ^ 1);
      const uint32_t stage = base + at.stage * layout.bytes;
      uint64_t* bar = &full[at.stage];
      barrier_expect(bar, stage_bytes + count * (kHalves * 128 + (P == Pack::kFloat8 ? 4 : 0)));
      bulk_copy(stage, weights, stage_bytes, bar);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        bulk_copy(stage + layout.right + half * kMost * 128, x, count * 128, bar);
        x += count * 128;
      }
      if constexpr (P == Pack::kFloat8) {
        bulk_copy(stage + layout.scales, scale, count * 4, bar);
        scale += count;
      }
      weights += stage_bytes;
      at.next(layout.stages);
    }
  }
}

// The products of one tile, d[half] for the warpgroup's two units.
template <typename T, Pack P, int N, bool kPlainScales>
__device__ __forceinline__ void multiply(const GemmArgs& a, const StageLayout& layout, unsigned char* shared,
                                         uint64_t* full, uint64_t* empty, Pipeline& at, float (&d)[2][N / 2]) {
  constexpr int kMost = most_tokens(P);
  const Packed& w = a.weights;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int unit0 = threadIdx.x / 128 * 2, row = warp * 16 + lane / 4;
  int before = -1;  // the stage that is still being read
  auto release = [&](int stage) {
    __syncwarp();
    if (stage >= 0 && lane == 0) barrier_arrive(&empty[stage]);
  };
  // Not by the first product: what it overwrites would be live from tile to tile.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[half][i] = 0.0f;
  }
  pin(d[0]), pin(d[1]);
  for (int k = 0; k < w.stages; ++k) {
    barrier_wait(&full[at.stage], at.phase);
    const unsigned char* stage = shared + at.stage * layout.bytes;
    const uint32_t right = address(stage) + layout.right;
    if constexpr (P == Pack::kPlain) {
      fence();
#pragma unroll
      for (int s = 0; s < 4; ++s) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Product<N>::template shared<T>(d[half], descriptor(address(stage) + (unit0 + half) * 8192 + s * 32),
                                         descriptor(right + s * 32), 1);
        }
      }
      commit();
      wait<1>();
      release(before);
    } else if constexpr (P == Pack::kFloat8) {
      const float* tails = reinterpret_cast<const float*>(stage + 4 * w.payload) + row;
      const float2* scales = reinterpret_cast<const float2*>(stage + layout.scales) + lane % 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float part[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) part[i] = 0.0f;
        pin(part);
        fence();
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          Product<N>::template shared<Float8>(part, descriptor(address(stage) + (unit0 + half) * 8192 + s * 32),
                                              descriptor(right + s * 32), s > 0);
        }
        commit();
        const float s0 = tails[(unit0 + half) * 64], s1 = tails[(unit0 + half) * 64 + 8];
        wait<0>();
        pin(part);
#pragma unroll
        for (int b = 0; b < N / 8; ++b) {
          const float2 x = scales[b * 4];
          d[half][4 * b] = fmaf(part[4 * b] * s0, x.x, d[half][4 * b]);
          d[half][4 * b + 1] = fmaf(part[4 * b + 1] * s0, x.y, d[half][4 * b + 1]);
          d[half][4 * b + 2] = fmaf(part[4 * b + 2] * s1, x.x, d[half][4 * b + 2]);
          d[half][4 * b + 3] = fmaf(part[4 * b + 3] * s1, x.y, d[half][4 * b + 3]);
        }
      }
      release(at.stage);
    } else {
      using Numbers = Raw<T, P>;
      constexpr int kPerWord = Numbers::kPerWord;
      const T* tails = reinterpret_cast<const T*>(stage + 4 * w.payload + unit0 * w.tail) + row;
      const int tail = w.tail / static_cast<int>(sizeof(T));
      uint32_t scale[2][2], off[2][2], left[2][4];
      uint4 words[2];
#pragma unroll
      for (int s = 0; s < 8; ++s) {
        const uint64_t b = descriptor(right + s / 4 * kMost * 128 + s % 4 * 32);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (kPlainScales ? s == 0 : s % 2 == 0) {
            const T* values = tails + half * tail + (w.sub == 1 ? 0 : s / 2 * 64);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              scale[half][i] = twice<T>(to_float(values[8 * i]));
              const float zero = kPlainScales || !w.zeros ? Numbers::kMiddle : to_float(values[w.sub * 64 + 8 * i]);
              off[half][i] = twice<T>(Scaled<T, P>::offset(zero));
            }
          }
          if (s % kPerWord == 0) {
            words[half] =
                *reinterpret_cast<const uint4*>(stage + (unit0 + half) * w.payload + s / kPerWord * 2048 + thread * 16);
          }
          wait<1>();  // this half's product of the step before has read its operand; the other half's may go on
          if (s == 0 && half == 1) release(before);
          Scaled<T, P>::integers(words[half], s % kPerWord, scale[half][0], scale[half][1], off[half][0], off[half][1],
                                 left[half]);
          fence();
          Product<N>::template registers<T>(d[half], left[half], b, 1);
          commit();
        }
      }
    }
    before = at.stage;
    at.next(layout.stages);
  }
  wait<0>();
  pin(d[0]), pin(d[1]);
  if constexpr (P != Pack::kFloat8) release(before);
}

// SiLU, GELU by tanh (which is x sigmoid(..)) and squared ReLU, without branches; GELU by erf takes the other kernel.
struct Smooth {
  float linear, cubic;
  bool relu2;
  __device__ __forceinline__ explicit Smooth(Activation kind)
      : linear(kind == Activation::kSilu ? 1.0f : 1.5957691216057308f),
        cubic(kind == Activation::kSilu ? 0.0f : 0.07135481282553f),
        relu2(kind == Activation::kRelu2) {}
  __device__ __forceinline__ float operator()(float x) const {
    const float y = __fdividef(x, 1.0f + __expf(-x * fmaf(cubic * x, x, linear)));
    const float r = x > 0.0f ? x * x : x != x ? x : 0.0f;
    return relu2 ? r : y;
  }
};
__device__ __forceinline__ float joined(const Activity& a, const Smooth& smooth, float gate, float up) {
  if (a.clamp == Clamp::kNone) return smooth(gate) * up;
  if (a.clamp == Clamp::kBefore) gate = at_most(gate, a.gate_limit);
  gate = smooth(gate);
  if (a.clamp == Clamp::kAfter) gate = at_most(gate, a.gate_limit);
  return gate * (up < -a.up_limit ? -a.up_limit : at_most(up, a.up_limit));
}

// The lane, read again where it is used: addresses made from it are not kept in registers over the products.
__device__ __forceinline__ int fresh_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;\n" : "=r"(lane));
  return lane;
}

// Two tokens' values of one channel a lane become two channels of one token: token lane / 4 then, channels 2 (lane %
// 4).
template <typename T>
__device__ __forceinline__ void store_pair(T* to, bool there, int left, float x, float y) {
  const uint32_t pair = transpose8(pack_pair(x, y, T()));
  if (!there || left <= 0) return;
  if (left > 1) {
    *reinterpret_cast<uint32_t*>(to) = pair;
  } else {
    *to = *reinterpret_cast<const T*>(&pair);
  }
}

template <typename T, Pack P, int N, bool kPlainScales>
__device__ __forceinline__ void consume_tile(const GemmArgs& a, const StageLayout& layout, unsigned char* shared,
                                             uint64_t* full, uint64_t* empty, Pipeline& at, const TokenTile& tile,
                                             int row_tile, float (*largest)[128], float* inverse) {
  float d[2][N / 2];
  multiply<T, P, N, kPlainScales>(a, layout, shared, full, empty, at, d);
  const Packed& w = a.weights;
  const int lane = fresh_lane(), warpgroup = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, t = lane % 4;
  if (w.multiplier) {
    const float factor = w.multiplier[tile.expert];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[0][i] *= factor, d[1][i] *= factor;
  }
  const Smooth smooth(a.activity.kind);
  const int64_t first = int64_t(tile.start + lane / 4) * a.out_stride;  // the lane's first token
  int token = lane / 4;
  if (!(a.activate && w.gated)) {
    const int channel = row_tile * 256 + warpgroup * 128 + warp * 32 + t * 2;
    T* to = static_cast<T*>(a.out) + first + channel;
    const int left = a.out_cols - channel;
#pragma unroll
    for (int b = 0; b < N / 8; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x = d[i / 2][4 * b + i % 2 * 2], y = d[i / 2][4 * b + i % 2 * 2 + 1];
        if (a.activate) x = smooth(x), y = smooth(y);
        store_pair(to + i * 8, token < tile.count, left - i * 8, x, y);
      }
      to += 8 * a.out_stride, token += 8;
    }
    return;
  }
#pragma unroll
  for (int b = 0; b < N / 8; ++b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      d[half][4 * b] = joined(a.activity, smooth, d[half][4 * b], d[half][4 * b + 2]);
      d[half][4 * b + 1] = joined(a.activity, smooth, d[half][4 * b + 1], d[half][4 * b + 3]);
    }
  }
  const int channel = row_tile * 128 + warpgroup * 64 + warp * 16 + t * 2;
  if (P == Pack::kFloat8 && a.out_scale) {
    // The tile's 128 channels of a token share a scale.
    const int consumer = threadIdx.x;
#pragma unroll
    for (int b = 0; b < N / 8; ++b) {
      float x = fmaxf(fabsf(d[0][4 * b]), fabsf(d[1][4 * b])),
            y = fmaxf(fabsf(d[0][4 * b + 1]), fabsf(d[1][4 * b + 1]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        x = fmaxf(x, __shfl_xor_sync(~0u, x, step)), y = fmaxf(y, __shfl_xor_sync(~0u, y, step));
      }
      if (lane < 4) *reinterpret_cast<float2*>(&largest[consumer / 32][b * 8 + 2 * t]) = make_float2(x, y);
    }
    named_barrier(1, 256);
    if (consumer < N) {
      float most = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) most = fmaxf(most, largest[i][consumer]);
      inverse[consumer] = most > 0.0f ? 448.0f / most : 1.0f;
      if (consumer < tile.count) {
        const int64_t block =
            int64_t(tile.start) * a.out_blocks + int64_t(row_tile) * arranged_rows(tile.count) + consumer;
        a.out_scale[block] = most > 0.0f ? most / 448.0f : 1.0f;
      }
    }
    named_barrier(1, 256);
    // 16 neighbouring channels are a chunk; lane / 4 is the row within eight.
    uint8_t* to = static_cast<uint8_t*>(a.out) +
                  (int64_t(tile.start) * a.out_blocks + int64_t(row_tile) * arranged_rows(tile.count) + token) * 128 +
                  ((channel % 128 / 16) ^ (lane / 4)) * 16 + t * 2;
#pragma unroll
    for (int b = 0; b < N / 8; ++b) {
      const float2 by = *reinterpret_cast<const float2*>(&inverse[b * 8 + 2 * t]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t pair = transpose8(pack_pair(d[half][4 * b] * by.x, d[half][4 * b + 1] * by.y, __half()));
        uint16_t bytes;
        asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;\n" : "=h"(bytes) : "r"(pair));
        if (token < tile.count) *reinterpret_cast<uint16_t*>(to + half * 8) = bytes;
      }
      to += 8 * 128, token += 8;
    }
  } else if (a.out_blocks) {
    // Eight channels are a chunk, 64 a block.
    unsigned char* to =
        static_cast<unsigned char*>(a.out) +
        (int64_t(tile.start) * a.out_blocks + int64_t(channel / 64) * arranged_rows(tile.count) + token) * 128 + t * 4;
    const int chunk = channel % 64 / 8;
#pragma unroll
    for (int b = 0; b < N / 8; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_pair(reinterpret_cast<T*>(to + ((chunk + half) ^ (lane / 4)) * 16), token < tile.count, 2, d[half][4 * b],
                   d[half][4 * b + 1]);
      }
      to += 8 * 128, token += 8;
    }
  } else {
    T* to = static_cast<T*>(a.out) + first + channel;
    const int left = a.out_cols - channel;
#pragma unroll
    for (int b = 0; b < N / 8; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_pair(to + half * 8, token < tile.count, left - half * 8, d[half][4 * b], d[half][4 * b + 1]);
      }
      to += 8 * a.out_stride, token += 8;
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T, Pack P, bool kPlainScales>
__global__ void __launch_bounds__(kThreads, 1) gemm_kernel(const __grid_constant__ GemmArgs a, StageLayout layout) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ Shared barriers;
  __shared__ __align__(8) float largest[P == Pack::kFloat8 ? 8 : 1][128];
  __shared__ __align__(8) float inverse[128];
  unsigned char* shared = dynamic + (1024 - (address(dynamic) & 1023)) % 1024;
  if (threadIdx.x == 0) {
    for (int i = 0; i < layout.stages; ++i) {
      barrier_init(&barriers.full[i], 1);
      barrier_init(&barriers.empty[i], 8);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    fewer_registers<40>();
    if (threadIdx.x == kConsumers) produce<P>(a, layout, address(shared), barriers.full, barriers.empty);
  } else {
    more_registers<232>();
    const int total = *a.num_tiles * a.weights.tiles;
    Pipeline at;
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
      const TokenTile tile = a.tiles[index / a.weights.tiles];
      const int row_tile = index % a.weights.tiles;
      auto consume = [&](auto size) {
        constexpr int N = decltype(size)::value;
        if constexpr (N <= most_tokens(P)) {
          consume_tile<T, P, N, kPlainScales>(a, layout, shared, barriers.full, barriers.empty, at, tile, row_tile,
                                              largest, inverse);
        }
      };
      switch ((tile.count + 31) / 32) {
        case 1:
          consume(std::integral_constant<int, 32>());
          break;
        case 2:
          consume(std::integral_constant<int, 64>());
          break;
        case 3:
          consume(std::integral_constant<int, 96>());
          break;
        case 4:
          consume(std::integral_constant<int, 128>());
          break;
        case 5:
          consume(std::integral_constant<int, 160>());
          break;
        default:
          consume(std::integral_constant<int, 192>());
          break;
      }
    }
  }
#else
  __trap();  // compiled without Hopper's own instructions: never launched (see launch)
#endif
}

template <typename T, Pack P, bool kPlainScales>
cudaError_t launch_kernel(const GemmArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const StageLayout layout = stage_layout(a.weights, device.shared_bytes);
  const int bytes = layout.stages * layout.bytes + 1024;
  cudaError_t status =
      cudaFuncSetAttribute(gemm_kernel<T, P, kPlainScales>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  gemm_kernel<T, P, kPlainScales>
      <<<static_cast<unsigned>(device.multiprocessors), kThreads, bytes, stream>>>(a, layout);
  return cudaGetLastError();
}

template <typename T, Pack P>
cudaError_t launch(const GemmArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  if constexpr (P == Pack::kInt4 || P == Pack::kInt8) {
    if (a.weights.sub != 1 || a.weights.zeros) return launch_kernel<T, P, false>(a, device, stream);
  }
  return launch_kernel<T, P, true>(a, device, stream);
}

}  // namespace sm90
}  // namespace deltafuse::moe
