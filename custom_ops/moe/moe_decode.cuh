// A few tokens: gates, ups and activation in one launch, then down, weighted sum and shared expert in one. Both kernels
// route for themselves; sums are in a fixed order.
#pragma once

#include "moe_decode_parts.cuh"

namespace deltafuse::moe {

constexpr int kFirstThreads = 256;   // 2 units of 16 rows by 4 parts of the columns
constexpr int kSecondThreads = 512;  // 16 parts of experts and columns
constexpr int kSplits = kFirstThreads / 64;
constexpr int kFirstWarps = kFirstThreads / 32, kSecondWarps = kSecondThreads / 32;

// Stages in flight a warp.
template <Pack P>
constexpr int kFirstDepth = P == Pack::kInt4 ? 5 : 3;
template <Pack P>
constexpr int kSecondDepth = P == Pack::kInt4 ? 4 : 2;

struct FirstShared {
  static __host__ __device__ int x_stride(const DecodeArgs& a) {  // bytes of a token; 64 against bank conflicts
    return (a.gate_up.cols + 127) / 128 * 256 + 64;
  }
  static __host__ __device__ int x_bytes(const DecodeArgs& a) {
    return (a.router.tokens * x_stride(a) + 127) / 128 * 128;
  }
  static __host__ __device__ int slot_bytes(const DecodeArgs& a) {
    const int own = Slot::bytes(a.gate_up), other = a.shared_gate_up.count ? Slot::bytes(a.shared_gate_up) : 0;
    return own > other ? own : other;
  }
  static __host__ __device__ size_t bytes(const DecodeArgs& a, int depth) {
    return Routing::bytes(a.router) + x_bytes(a) + kFirstWarps * depth * slot_bytes(a) + sizeof(float4) * kSplits * 64 +
           sizeof(int) * kFirstWarps * 8 + sizeof(float) * kDecodeTokens;
  }
};

// Tokens into shared memory, in the order of a right operand; zeros past their end.
template <typename T, Pack P>
__device__ __forceinline__ void stage_tokens(const DecodeArgs& a, unsigned char* x) {
  const int cols = a.x_cols, pieces = (cols + 127) / 128 * 16, stride = FirstShared::x_stride(a);
#pragma unroll 1
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

// sigmoid(shared_gate_weight x) of each token; all threads.
template <typename T>
static __device__ __noinline__ void shared_gates(const DecodeArgs& a, float* gates) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int n = warp; n < a.router.tokens; n += kFirstWarps) {
    float sum = 0.0f;
#pragma unroll 4
    for (int k = lane; k < a.router.hidden; k += 32) {
      sum = fmaf(to_float(static_cast<const T*>(a.x)[int64_t(n) * a.x_cols + k]),
                 load_any(a.shared_gate, k, a.shared_gate_type), sum);
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) gates[n] = 1.0f / (1.0f + expf(-sum));
  }
}

// A channel's value from the four parts' sums: thread < 64 of the slab.
template <typename T>
static __device__ __noinline__ void finish_slab(const DecodeArgs& a, bool gated, Pack h_pack, const float4* sums,
                                                const int* list, int count, const float* weights, int row0,
                                                int channel0, float factor) {
  const int half = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float4 sum = sums[threadIdx.x];
#pragma unroll
  for (int i = 1; i < kSplits; ++i) {
    const float4 more = sums[i * 64 + threadIdx.x];
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
  }
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {  // tokens 2t, 2t + 1
    if (2 * t + i >= count) break;
    const int entry = list[2 * t + i];
    const float weight = weights ? weights[entry] : 1.0f;
    float low = (i ? sum.y : sum.x) * factor, high = (i ? sum.w : sum.z) * factor;
    T* h = static_cast<T*>(a.h) + int64_t(row0 + entry) * a.h_stride;
    int channel = channel0 + (gated ? half * 8 : half * 16) + g;
    if (gated) low = join(a.activity, low, high);
#pragma unroll 1
    for (int j = 0; j < (gated ? 1 : 2); ++j, channel += 8) {
      const float value = gated ? low : activate(a.activity.kind, j ? high : low);
      h[channel / 128 * 128 + operand_slot(h_pack, channel % 128)] = from_float<T>(value * weight);
    }
  }
}

template <typename T, Pack P, Pack S>
__global__ void __launch_bounds__(kFirstThreads, 3) decode_first_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int kDepth = kFirstDepth<P>;
  const RouterArgs& r = a.router;
  const Routing routing(shared, r);
  unsigned char* x = shared + Routing::bytes(r);
  const int slot_bytes = FirstShared::slot_bytes(a), x_stride = FirstShared::x_stride(a);
  unsigned char* ring = x + FirstShared::x_bytes(a);
  float4* sums = reinterpret_cast<float4*>(ring + kFirstWarps * kDepth * slot_bytes);
  int* lists = reinterpret_cast<int*>(sums + kSplits * 64);
  float* gates = reinterpret_cast<float*>(lists + kFirstWarps * 8);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int half = warp % 2, split = warp / 2;
  int* list = lists + warp * 8;
  ring += warp * kDepth * slot_bytes;
  const int shared_slabs = a.shared_gate_up.count ? a.shared_gate_up.tiles * 8 : 0, slabs = a.gate_up.tiles * 8;
  const int shared_tasks = shared_slabs * ((r.tokens + 7) / 8), pairs = r.tokens * r.top_k;

  if (P == S || static_cast<int>(blockIdx.x) >= shared_tasks) {
    stage_tokens<T, P>(a, x);
  } else {
    stage_tokens<T, S>(a, x);
  }
  bool staged_other = P != S && static_cast<int>(blockIdx.x) < shared_tasks;
  if (a.shared_gate && static_cast<int>(blockIdx.x) < shared_tasks) shared_gates<T>(a, gates);
  wait_previous();  // for the logits
  release_next();
  route(r, routing, blockIdx.x == gridDim.x - 1);
  const int tasks = shared_tasks + *routing.num_items * slabs;

  auto is_shared = [&](int task) { return task < shared_tasks; };
  auto slab_of = [&](int task) { return is_shared(task) ? task % shared_slabs : (task - shared_tasks) % slabs; };
  auto item_of = [&](int task) {  // expert, and its first token 65536 times
    return is_shared(task) ? task / shared_slabs << 19 : routing.items[(task - shared_tasks) / slabs];
  };
  // The next stage to fetch: all of a warp's stages of all its tasks, one after the other.
  int next_task = blockIdx.x, next_stage = split, next_slot = 0;
  auto fetch = [&] {
    if (next_task < tasks) {
      const Packed& w = is_shared(next_task) ? a.shared_gate_up : a.gate_up;
      const int slab = slab_of(next_task), expert = is_shared(next_task) ? 0 : item_of(next_task) & 0xffff;
      if (next_stage < w.stages) {
        const unsigned char* stage =
            w.data + expert * w.expert_bytes() + slab / 8 * w.tile_bytes() + int64_t(next_stage) * w.stage_bytes();
        fetch_slab(w, stage, slab / 4 % 2 * 2 + half, slab % 4, ring + next_slot * slot_bytes);
        next_slot = next_slot + 1 == kDepth ? 0 : next_slot + 1;
        next_stage += kSplits;
      }
      if (next_stage >= w.stages) next_stage = split, next_task += gridDim.x;
    }
    copies_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kDepth; ++i) fetch();

  int slot = 0;
#pragma unroll 1
  for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
    const bool own = is_shared(task);
    const Packed& w = own ? a.shared_gate_up : a.gate_up;
    const int item = item_of(task), expert = own ? 0 : item & 0xffff, begin = item >> 16, slab = slab_of(task);
    if (P != S && staged_other && !own) {
      __syncthreads();
      stage_tokens<T, P>(a, x);
      staged_other = false;
      __syncthreads();
    }
    int count;
    if (own) {
      count = min(8, r.tokens - begin);
      if (lane < count) list[lane] = begin + lane;
    } else {  // the expert's pairs from `begin` on
      count = -begin;
#pragma unroll 1
      for (int base = 0; base < pairs; base += 32) {
        const bool match = base + lane < pairs && routing.ids[base + lane] == expert;
        const unsigned matches = __ballot_sync(~0u, match);
        const int at = count + __popc(matches & ((1u << lane) - 1));
        if (match && at >= 0 && at < 8) list[at] = base + lane;
        count += __popc(matches);
      }
      count = min(count, 8);
    }
    __syncwarp();
    const unsigned char* column = g < count ? x + (own ? list[g] : list[g] / r.top_k) * x_stride + t * 16 : nullptr;
    float total[4] = {};
#pragma unroll 1
    for (int k = split; k < w.stages; k += kSplits) {
      copies_wait<kDepth - 1>();
      __syncwarp();
      if (P == S || !own) {
        auto right = [&](int p) {
          return column ? *reinterpret_cast<const uint4*>(column + k * (kStageCols<P> * 2) + p * 64)
                        : make_uint4(0, 0, 0, 0);
        };
        multiply_slot<T, P>(w, ring + slot * slot_bytes, right, 1.0f, total);
      } else {
        auto right = [&](int p) {
          return column ? *reinterpret_cast<const uint4*>(column + k * (kStageCols<S> * 2) + p * 64)
                        : make_uint4(0, 0, 0, 0);
        };
        multiply_slot<T, S>(w, ring + slot * slot_bytes, right, 1.0f, total);
      }
      __syncwarp();
      slot = slot + 1 == kDepth ? 0 : slot + 1;
      fetch();
    }
    sums[(split * 2 + half) * 32 + lane] = make_float4(total[0], total[1], total[2], total[3]);
    __syncthreads();
    if (warp < 2) {
      finish_slab<T>(a, w.gated, own ? a.shared_down.pack : a.down.pack, sums, list, count,
                     own ? (a.shared_gate ? gates : nullptr) : routing.weights, own ? pairs : 0,
                     w.gated ? slab * 16 : slab * 32, w.multiplier ? w.multiplier[expert] : 1.0f);
    }
    __syncthreads();
  }
  copies_wait<0>();
}

struct SecondShared {
  static __host__ __device__ int table_bytes(const DecodeArgs& a) {  // int16 [items, tokens]
    return (a.router.tokens * a.router.top_k * a.router.tokens * 2 + 127) / 128 * 128;
  }
  static __host__ __device__ int slot_bytes(const DecodeArgs& a) {
    const int own = Slot::bytes(a.down), other = a.shared_down.count ? Slot::bytes(a.shared_down) : 0;
    return own > other ? own : other;
  }
  static __host__ __device__ size_t bytes(const DecodeArgs& a, int depth) {
    const size_t ring = kSecondWarps * depth * slot_bytes(a), sums = sizeof(float) * kSecondThreads * 4;
    return Routing::bytes(a.router) + table_bytes(a) + (ring > sums ? ring : sums);
  }
};

template <typename T, Pack P, Pack S>
__global__ void __launch_bounds__(kSecondThreads, 2) decode_second_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int kDepth = kSecondDepth<P>;
  const RouterArgs& r = a.router;
  const Routing routing(shared, r);
  int16_t* table = reinterpret_cast<int16_t*>(shared + Routing::bytes(r));
  unsigned char* ring = shared + Routing::bytes(r) + SecondShared::table_bytes(a);
  float* sums = reinterpret_cast<float*>(ring);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x / 16, unit = blockIdx.x / 4 % 4, slab = blockIdx.x % 4;
  const int row0 = tile * 256 + unit / 2 * 128 + slab * 32 + unit % 2 * 16;
  if (row0 >= a.down.rows) return;
  const int pairs = r.tokens * r.top_k, slot_bytes = SecondShared::slot_bytes(a);

  // The kernel before waited for the logits, so they are there although it may not be done yet.
  route(r, routing, false);
  // The experts alone, each with the pairs of all its tokens.
  int items = *routing.num_items;
  while (items > 0 && routing.items[items - 1] >> 16) --items;
#pragma unroll 1
  for (int i = threadIdx.x; i < items * r.tokens; i += kSecondThreads) table[i] = -1;
  __syncthreads();
#pragma unroll 1
  for (int pair = threadIdx.x; pair < pairs; pair += kSecondThreads) {
    const int id = routing.ids[pair];
    int low = 0, high = items - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (routing.items[middle] < id) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    table[low * r.tokens + pair / r.top_k] = static_cast<int16_t>(pair);
  }
  __syncthreads();

  ring += warp * kDepth * slot_bytes;
  const int stages = a.down.stages, work = items * stages;
  const int all = work + (a.shared_down.count ? a.shared_down.stages : 0);  // the shared expert's stages come last
  const unsigned char* h = static_cast<const unsigned char*>(a.h);
  const int64_t h_bytes = int64_t(a.h_stride) * sizeof(T);
  bool waited = false;

#pragma unroll 1
  for (int base = 0; base < r.tokens; base += 8) {
    const int token = base + g;
    // Row of h of the lane's token in a piece of work, or -1.
    auto row_of = [&](int at) {
      return token >= r.tokens ? -1
             : at >= work      ? pairs + token
                               : static_cast<int>(table[at / stages * r.tokens + token]);
    };
    auto skip = [&](int at) {  // pieces that none of the 8 tokens needs
      while (at < all && __ballot_sync(~0u, row_of(at) >= 0) == 0) at += kSecondWarps;
      return at;
    };
    int next = skip(warp), next_slot = 0;
    auto fetch = [&] {
      if (next < all) {
        const bool own = next >= work;
        const Packed& w = own ? a.shared_down : a.down;
        const int expert = own ? 0 : routing.items[next / stages], part = own ? next - work : next % stages;
        const unsigned char* stage =
            w.data + expert * w.expert_bytes() + tile * w.tile_bytes() + int64_t(part) * w.stage_bytes();
        fetch_slab(w, stage, unit, slab, ring + next_slot * slot_bytes);
        next_slot = next_slot + 1 == kDepth ? 0 : next_slot + 1;
        next = skip(next + kSecondWarps);
      }
      copies_commit();
    };
#pragma unroll 1
    for (int i = 0; i < kDepth; ++i) fetch();
    if (!waited) wait_previous();  // for the activations; the weights are on their way
    waited = true;

    float total[4] = {};
    int slot = 0;
#pragma unroll 1
    for (int at = skip(warp); at < all; at = skip(at + kSecondWarps)) {
      const bool own = at >= work;
      const int row = row_of(at), part = own ? at - work : at % stages;
      const int cols = own ? kStageCols<S> : kStageCols<P>;
      uint4 b[4] = {};
      if (row >= 0) {
        const unsigned char* column = h + row * h_bytes + part * cols * 2 + t * 16;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          if (p * 32 < cols) b[p] = __ldcg(reinterpret_cast<const uint4*>(column + p * 64));
        }
      }
      const Packed& w = own ? a.shared_down : a.down;
      const float factor = w.multiplier ? w.multiplier[own ? 0 : routing.items[at / stages]] : 1.0f;
      copies_wait<kDepth - 1>();
      __syncwarp();
      auto right = [&](int p) { return b[p]; };
      if (P == S || !own) {
        multiply_slot<T, P>(w, ring + slot * slot_bytes, right, factor, total);
      } else {
        multiply_slot<T, S>(w, ring + slot * slot_bytes, right, factor, total);
      }
      __syncwarp();
      slot = slot + 1 == kDepth ? 0 : slot + 1;
      fetch();
    }
    copies_wait<0>();
    __syncthreads();  // the ring becomes the sums' place
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[(i * kSecondWarps + warp) * 32 + lane] = total[i];
    __syncthreads();
    if (threadIdx.x < 128) {
      const int i = threadIdx.x / 32;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kSecondWarps; ++w) sum += sums[(i * kSecondWarps + w) * 32 + lane];
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
  const size_t first_bytes = FirstShared::bytes(a, kFirstDepth<P>),
               second_bytes = SecondShared::bytes(a, kSecondDepth<P>);
  cudaError_t status = cudaFuncSetAttribute(decode_first_kernel<T, P, S>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(first_bytes));
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(decode_second_kernel<T, P, S>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(second_bytes));
  if (status != cudaSuccess) return status;
  int resident = 0;
  status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, decode_first_kernel<T, P, S>, kFirstThreads,
                                                         first_bytes);
  if (status != cudaSuccess) return status;
  const int shared_slabs = a.shared_gate_up.count ? a.shared_gate_up.tiles * 8 : 0;
  const int64_t pairs = int64_t(a.router.tokens) * a.router.top_k;
  const int64_t most = shared_slabs * ((a.router.tokens + 7) / 8) + pairs * a.gate_up.tiles * 8;
  const int64_t room = int64_t(device.multiprocessors) * (resident < 1 ? 1 : resident);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = device.capability >= 90 && a.router.logits ? 1 : 0;
  config.gridDim = dim3(static_cast<unsigned>(most < room ? most : room));
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
