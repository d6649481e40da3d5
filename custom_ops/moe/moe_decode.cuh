// A few tokens: gates, ups and activation in one launch, then down, weighted sum and shared expert in one. Both kernels
// route for themselves; sums are in a fixed order.
#pragma once

#include "moe_decode_parts.cuh"

namespace deltafuse::moe {

constexpr int kFirstThreads = 256;   // 2 units of 16 rows by 4 parts of the columns
constexpr int kSecondThreads = 512;  // 16 parts of experts and columns
constexpr int kSplits = kFirstThreads / 64;

struct FirstShared {
  static __host__ __device__ int x_stride(const DecodeArgs& a) {  // bytes of a token; 64 against bank conflicts
    return (a.gate_up.cols + 127) / 128 * 256 + 64;
  }
  static __host__ __device__ size_t x_bytes(const DecodeArgs& a) { return size_t(a.router.tokens) * x_stride(a); }
  static __host__ __device__ size_t bytes(const DecodeArgs& a) {
    return Routing::bytes(a.router) + (x_bytes(a) + 127) / 128 * 128 + sizeof(float4) * kSplits * 64 +
           sizeof(int) * (kFirstThreads / 32) * kDecodeTokens + sizeof(float) * kDecodeTokens;
  }
};

// Tokens into shared memory, in the order of a right operand; zeros past their end.
template <typename T, Pack P>
__device__ __forceinline__ void stage_tokens(const DecodeArgs& a, unsigned char* x) {
  const int cols = a.x_cols, pieces = (cols + 127) / 128 * 16, stride = FirstShared::x_stride(a);
  for (int i = threadIdx.x; i < a.router.tokens * pieces; i += kFirstThreads) {
    const int token = i / pieces, col = i % pieces * 8;
    uint4 words = make_uint4(0, 0, 0, 0);
    if (col < cols) words = *reinterpret_cast<const uint4*>(static_cast<const T*>(a.x) + int64_t(token) * cols + col);
    const uint16_t* values = reinterpret_cast<const uint16_t*>(&words);
    uint16_t* out = reinterpret_cast<uint16_t*>(x + token * stride + col / 128 * 256);
#pragma unroll
    for (int j = 0; j < 8; ++j) out[operand_slot<P>(col % 128 + j)] = values[j];
  }
}

struct FirstTask {
  const unsigned char* tile;  // of the expert's packed weights
  int warpgroup, warp, channel;
  float factor;
};

// One slab of one expert for up to 8 tokens at a time; all threads.
template <typename T, Pack P>
__device__ __forceinline__ void first_slab(const DecodeArgs& a, const Packed& w, const FirstTask& task,
                                           const unsigned char* x, const int* list, int count, const float* weights,
                                           int divide, int row0, Pack h_pack, float4* sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int half = warp % 2, split = warp / 2, unit = task.warpgroup * 2 + half;
  const int blocks = w.blocks(), stride = FirstShared::x_stride(a);
  constexpr int kAhead = kBlocksAhead<P>;
  const int64_t block_bytes = int64_t(Shape<P>::kUnitsPerBlock) * w.stage_bytes();
  for (int base = 0; base < count; base += 8) {
    const unsigned char* column = base + g < count ? x + list[base + g] / divide * stride + t * 16 : nullptr;
    float total[4] = {};
    for (int k = split; k < blocks; k += kAhead * kSplits) {
      Block<T, P> block[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (k + i * kSplits < blocks)
          block[i].load(w, task.tile + (k + i * kSplits) * block_bytes, unit, task.warp, lane);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = k + i * kSplits;
        if (at >= blocks) break;
        auto right = [&](int p) {
          return column ? *reinterpret_cast<const uint4*>(column + at * 256 + p * 64) : make_uint4(0, 0, 0, 0);
        };
        block[i].multiply(w, task.tile + at * block_bytes, unit, task.warp, lane, right, task.factor, total);
      }
    }
    sums[(split * 2 + half) * 32 + lane] = make_float4(total[0], total[1], total[2], total[3]);
    __syncthreads();
    if (threadIdx.x < 64) {
      float4 sum = sums[threadIdx.x];
#pragma unroll
      for (int i = 1; i < kSplits; ++i) {
        const float4 more = sums[i * 64 + threadIdx.x];
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // tokens 2t, 2t + 1
        if (base + 2 * t + i >= count) continue;
        const int entry = list[base + 2 * t + i];
        const float weight = weights ? weights[entry] : 1.0f;
        const float low = i ? sum.y : sum.x, high = i ? sum.w : sum.z;
        T* h = static_cast<T*>(a.h) + int64_t(row0 + entry) * a.h_stride;
        auto store = [&](int channel, float value) {
          h[channel / 128 * 128 + operand_slot(h_pack, channel % 128)] = from_float<T>(value * weight);
        };
        if (w.gated) {
          store(task.channel + half * 8 + g, join(a.activity, low, high));
        } else {
          store(task.channel + half * 16 + g, activate(a.activity.kind, low));
          store(task.channel + half * 16 + 8 + g, activate(a.activity.kind, high));
        }
      }
    }
    __syncthreads();
  }
}

template <typename T, Pack P, Pack S>
__global__ void __launch_bounds__(kFirstThreads, P == Pack::kInt4 && S == P ? 4 : 3) decode_first_kernel(DecodeArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  const RouterArgs& r = a.router;
  const Routing routing(shared, r);
  unsigned char* x = shared + Routing::bytes(r);
  float4* sums = reinterpret_cast<float4*>(x + (FirstShared::x_bytes(a) + 127) / 128 * 128);
  int* lists = reinterpret_cast<int*>(sums + kSplits * 64);
  float* gates = reinterpret_cast<float*>(lists + kFirstThreads / 32 * kDecodeTokens);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int* list = lists + warp * kDecodeTokens;
  const int shared_slabs = a.shared_gate_up.count ? a.shared_gate_up.tiles * 8 : 0, slabs = a.gate_up.tiles * 8;
  const int pairs = r.tokens * r.top_k;
  bool routed = false;
  int staged = -1;  // pack of the tokens in shared memory

  auto task_of = [&](const Packed& w, int expert, int slab) {
    FirstTask task;
    task.tile = w.data + expert * w.expert_bytes() + slab / 8 * w.tile_bytes();
    task.warpgroup = slab / 4 % 2, task.warp = slab % 4;
    task.channel = w.gated ? slab * 16 : slab * 32;
    task.factor = w.multiplier ? w.multiplier[expert] : 1.0f;
    return task;
  };
  int task_index = blockIdx.x;
  if (task_index >= shared_slabs) {
    stage_tokens<T, P>(a, x);
    staged = static_cast<int>(P);
  }
  for (;; task_index += gridDim.x) {
    if (task_index < shared_slabs) {
      if (staged != static_cast<int>(S)) {
        stage_tokens<T, S>(a, x);
        staged = static_cast<int>(S);
        if (a.shared_gate) {
          for (int n = warp; n < r.tokens; n += kFirstThreads / 32) {
            float sum = 0.0f;
            for (int k = lane; k < r.hidden; k += 32) {
              sum = fmaf(to_float(static_cast<const T*>(a.x)[int64_t(n) * a.x_cols + k]),
                         load_any(a.shared_gate, k, a.shared_gate_type), sum);
            }
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane == 0) gates[n] = 1.0f / (1.0f + expf(-sum));
          }
        }
      }
      if (lane < r.tokens) list[lane] = lane;
      __syncthreads();
      first_slab<T, S>(a, a.shared_gate_up, task_of(a.shared_gate_up, 0, task_index), x, list, r.tokens,
                       a.shared_gate ? gates : nullptr, 1, pairs, a.shared_down.pack, sums);
      continue;
    }
    if (!routed) {
      wait_previous();  // for the logits
      release_next();
      if (staged != static_cast<int>(P)) stage_tokens<T, P>(a, x);
      staged = static_cast<int>(P);
      route(r, routing, blockIdx.x == gridDim.x - 1);
      routed = true;
    }
    const int item = (task_index - shared_slabs) / slabs;
    if (item >= *routing.num_items) break;
    const int expert = routing.items[item];
    int count = 0;  // the expert's pairs, in order
    for (int base = 0; base < pairs; base += 32) {
      const bool match = base + lane < pairs && routing.ids[base + lane] == expert;
      const unsigned matches = __ballot_sync(~0u, match);
      if (match) list[count + __popc(matches & ((1u << lane) - 1))] = base + lane;
      count += __popc(matches);
    }
    __syncwarp();
    first_slab<T, P>(a, a.gate_up, task_of(a.gate_up, expert, (task_index - shared_slabs) % slabs), x, list, count,
                     routing.weights, r.top_k, 0, a.down.pack, sums);
  }
}

struct SecondShared {
  static __host__ __device__ size_t table_bytes(const DecodeArgs& a) {  // int16 [items, tokens]
    return (size_t(a.router.tokens) * a.router.top_k * a.router.tokens * 2 + 127) / 128 * 128;
  }
  static __host__ __device__ size_t bytes(const DecodeArgs& a) {
    return Routing::bytes(a.router) + table_bytes(a) + sizeof(float) * kSecondThreads * 4;
  }
};

template <typename T, Pack P, Pack S>
__global__ void __launch_bounds__(kSecondThreads, P == Pack::kInt4 && S == P ? 2 : 1)
    decode_second_kernel(DecodeArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  const RouterArgs& r = a.router;
  const Routing routing(shared, r);
  int16_t* table = reinterpret_cast<int16_t*>(shared + Routing::bytes(r));
  float* sums = reinterpret_cast<float*>(shared + Routing::bytes(r) + SecondShared::table_bytes(a));
  constexpr int kWarps = kSecondThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x / 16, unit = blockIdx.x / 4 % 4, slab = blockIdx.x % 4;
  const int row0 = tile * 256 + unit / 2 * 128 + slab * 32 + unit % 2 * 16;
  if (row0 >= a.down.rows) return;
  const int pairs = r.tokens * r.top_k;

  // The kernel before waited for the logits, so they are there although it may not be done yet.
  route(r, routing, false);
  const int items = *routing.num_items;
  for (int i = threadIdx.x; i < items * r.tokens; i += kSecondThreads) table[i] = -1;
  __syncthreads();
  for (int pair = threadIdx.x; pair < pairs; pair += kSecondThreads) {
    int low = 0, high = items - 1;
    const int id = routing.ids[pair];
    while (low < high) {
      const int middle = (low + high) / 2;
      if (routing.items[middle] < id)
        low = middle + 1;
      else
        high = middle;
    }
    table[low * r.tokens + pair / r.top_k] = static_cast<int16_t>(pair);
  }
  __syncthreads();

  const int blocks = a.down.blocks(), work = items * blocks;
  const int shared_blocks = a.shared_down.count ? a.shared_down.blocks() : 0;
  const unsigned char* h = static_cast<const unsigned char*>(a.h);
  const int64_t h_bytes = int64_t(a.h_stride) * sizeof(T);
  bool waited = false;

  for (int base = 0; base < r.tokens; base += 8) {
    float total[4] = {};
    const int token = base + g;
    constexpr int kAhead = P == Pack::kInt4 ? 4 : kBlocksAhead<P>;
    const int64_t block_bytes = int64_t(Shape<P>::kUnitsPerBlock) * a.down.stage_bytes();
    // With equal formats the shared expert's blocks follow the others; each warp takes every kWarps-th block.
    const int all = P == S ? work + shared_blocks : work;
    for (int k = warp; k < all; k += kAhead * kWarps) {
      Block<T, P> block[kAhead];
      const unsigned char* stage[kAhead];
      const unsigned char* column[kAhead];
      float factor[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = k + i * kWarps;
        stage[i] = nullptr;
        if (at >= all) continue;
        const bool is_shared = P == S && at >= work;
        const Packed& w = is_shared ? a.shared_down : a.down;
        const int item = at / blocks, expert = is_shared ? 0 : routing.items[item];
        const int part = is_shared ? at - work : at % blocks;
        const int row = token >= r.tokens ? -1 : is_shared ? pairs + token : table[item * r.tokens + token];
        if (__ballot_sync(~0u, row >= 0) == 0) continue;
        column[i] = row >= 0 ? h + row * h_bytes + part * 256 + t * 16 : nullptr;
        factor[i] = w.multiplier ? w.multiplier[expert] : 1.0f;
        stage[i] = w.data + expert * w.expert_bytes() + tile * w.tile_bytes() + part * block_bytes;
        block[i].load(w, stage[i], unit, slab, lane);
      }
      if (!waited) wait_previous();  // for the activations; the weights are on their way
      waited = true;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (!stage[i]) continue;
        auto right = [&](int p) {
          return column[i] ? __ldcg(reinterpret_cast<const uint4*>(column[i] + p * 64)) : make_uint4(0, 0, 0, 0);
        };
        const Packed& w = P == S && k + i * kWarps >= work ? a.shared_down : a.down;
        block[i].multiply(w, stage[i], unit, slab, lane, right, factor[i], total);
      }
    }
    if (!waited) wait_previous();
    waited = true;
    if constexpr (P != S) {
      const Packed& w = a.shared_down;
      const int64_t shared_bytes = int64_t(Shape<S>::kUnitsPerBlock) * w.stage_bytes();
      for (int k = kWarps - 1 - warp; k < shared_blocks; k += kWarps) {
        const unsigned char* stage = w.data + tile * w.tile_bytes() + k * shared_bytes;
        const unsigned char* column = token < r.tokens ? h + (pairs + token) * h_bytes + k * 256 + t * 16 : nullptr;
        Block<T, S> block;
        block.load(w, stage, unit, slab, lane);
        auto right = [&](int p) {
          return column ? __ldcg(reinterpret_cast<const uint4*>(column + p * 64)) : make_uint4(0, 0, 0, 0);
        };
        block.multiply(w, stage, unit, slab, lane, right, w.multiplier ? w.multiplier[0] : 1.0f, total);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[(i * kWarps + warp) * 32 + lane] = total[i];
    __syncthreads();
    if (threadIdx.x < 128) {
      const int i = threadIdx.x / 32;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += sums[(i * kWarps + w) * 32 + lane];
      const int row = row0 + g + i / 2 * 8, column = base + 2 * t + i % 2;
      if (row < a.down.rows && column < r.tokens) {
        static_cast<T*>(a.y)[int64_t(column) * a.down.rows + row] = from_float<T>(sum);
      }
    }
    __syncthreads();
  }
}

template <typename T, Pack P, Pack S>
cudaError_t launch_decode_pair(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const size_t first_bytes = FirstShared::bytes(a), second_bytes = SecondShared::bytes(a);
  cudaError_t status = cudaFuncSetAttribute(decode_first_kernel<T, P, S>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(first_bytes));
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(decode_second_kernel<T, P, S>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(second_bytes));
  if (status != cudaSuccess) return status;
  const int shared_slabs = a.shared_gate_up.count ? a.shared_gate_up.tiles * 8 : 0;
  const int pairs = a.router.tokens * a.router.top_k;
  const int64_t most =
      shared_slabs + int64_t(pairs < a.router.experts ? pairs : a.router.experts) * a.gate_up.tiles * 8;
  const int64_t resident = int64_t(device.multiprocessors) * 4;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = device.capability >= 90 && a.router.logits ? 1 : 0;
  config.gridDim = dim3(static_cast<unsigned>(most < resident ? most : resident));
  config.blockDim = dim3(kFirstThreads);
  config.dynamicSmemBytes = first_bytes;
  status = cudaLaunchKernelEx(&config, decode_first_kernel<T, P, S>, a);
  if (status != cudaSuccess) return status;
  config.numAttrs = device.capability >= 90 ? 1 : 0;
  config.gridDim = dim3(static_cast<unsigned>(a.down.tiles * 16));
  config.blockDim = dim3(kSecondThreads);
  config.dynamicSmemBytes = second_bytes;
  status = cudaLaunchKernelEx(&config, decode_second_kernel<T, P, S>, a);
  return status == cudaSuccess ? cudaGetLastError() : status;
}

template <typename T, Pack P>
cudaError_t launch_decode_pack(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  if constexpr (P != Pack::kPlain) {
    if (a.shared_gate_up.count && a.shared_gate_up.pack != P) {
      return launch_decode_pair<T, P, Pack::kPlain>(a, device, stream);
    }
  }
  return launch_decode_pair<T, P, P>(a, device, stream);
}

template <typename T>
cudaError_t launch_decode_type(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  switch (a.gate_up.pack) {
    case Pack::kPlain:
      return launch_decode_pack<T, Pack::kPlain>(a, device, stream);
    case Pack::kInt4:
      return launch_decode_pack<T, Pack::kInt4>(a, device, stream);
    case Pack::kInt8:
      return launch_decode_pack<T, Pack::kInt8>(a, device, stream);
    case Pack::kFloat8:
      return launch_decode_pack<T, Pack::kFloat8>(a, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace deltafuse::moe
