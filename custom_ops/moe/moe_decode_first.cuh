// A few tokens: the choice of experts, then gates, ups and activation of the chosen ones and of the shared expert.
//
// A task is 16 rows of an expert for up to 8 of its tokens; `split` neighbouring warps share one, each with its own
// stages and its own ring of copies in flight. Nothing but the choice concerns a whole block.
#pragma once

#include "moe_decode_parts.cuh"
#include "moe_route.cuh"

namespace deltafuse::moe {

constexpr int kFirstThreads = 512;  // at most
constexpr int kFirstDepth = 4;      // stages in flight a warp

struct FirstShared {
  static __host__ __device__ int slot_bytes(const DecodeArgs& a) { return slot_bytes_of(a.gate_up, a.shared_gate_up); }
  static __host__ __device__ int lists_at(const DecodeArgs& a) { return Routing::kept_bytes(a.router); }
  // Sums of the warps of a task meet here, two tasks at a time; before that it is the choice's scratch.
  static __host__ __device__ int partial_at(const DecodeArgs& a, int warps) { return lists_at(a) + warps * 64; }
  static __host__ __device__ int partial_bytes(const DecodeArgs& a, int warps) {
    const int partial = 2 * (warps - warps / a.tuning.split) * 512, scratch = Routing::scratch_bytes(a.router);
    return partial > scratch ? partial : scratch;
  }
  static __host__ __device__ int ring_at(const DecodeArgs& a, int warps) {
    return (partial_at(a, warps) + partial_bytes(a, warps) + 127) / 128 * 128;
  }
  static __host__ __device__ size_t bytes(const DecodeArgs& a, int warps) {
    return ring_at(a, warps) + size_t(warps) * kFirstDepth * slot_bytes(a);
  }
};

// The block's tasks: the shared expert's are dealt out one by one, the others in runs, so that a block meets few
// experts. Local tasks are numbered, the shared ones first.
struct FirstTasks {
  int shared_count, begin = 0, count;  // the block's shared tasks; its first other one; all of its own
  __device__ explicit FirstTasks(const DecodeArgs& a) {
    const int all = a.shared_gate_up.count ? slabs_of(a.shared_gate_up) * ((a.router.tokens + 7) / 8) : 0;
    count = shared_count = (all + static_cast<int>(gridDim.x - 1 - blockIdx.x)) / static_cast<int>(gridDim.x);
  }
  __device__ void add_experts(const DecodeArgs& a, int items) {
    const uint64_t all = static_cast<uint64_t>(items) * slabs_of(a.gate_up);
    begin = static_cast<int>(all * blockIdx.x / gridDim.x);
    count = shared_count + static_cast<int>(all * (blockIdx.x + 1) / gridDim.x) - begin;
  }
  __device__ bool is_shared(int local) const { return local < shared_count; }
  // Which item (of the shared expert: which eight tokens), and which slab.
  __device__ void locate(const DecodeArgs& a, int local, int* item, int* slab) const {
    if (is_shared(local)) {
      const int id = blockIdx.x + gridDim.x * local;
      *item = a.by_shared_slabs(id), *slab = id - *item * static_cast<int>(a.by_shared_slabs.divisor);
    } else {
      const int id = begin + local - shared_count;
      *item = a.by_slabs(id), *slab = id - *item * static_cast<int>(a.by_slabs.divisor);
    }
  }
};

// A slab's channels of up to 8 tokens: sums to activations, for the second product; a whole warp.
template <typename T>
__device__ __forceinline__ void finish_slab(const DecodeArgs& a, bool gated, Pack h_pack, const float (&total)[4],
                                            const int* list, int count, const float* weights, int row0, int slab,
                                            float factor) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {  // tokens 2t, 2t + 1
    if (2 * t + i >= count) break;
    const int entry = list[2 * t + i];
    const float weight = weights ? weights[entry] : 1.0f;
    const float low = (i ? total[1] : total[0]) * factor, high = (i ? total[3] : total[2]) * factor;
    T* h = static_cast<T*>(a.h) + int64_t(row0 + entry) * a.h_stride;
    if (gated) {
      const int channel = slab * 8 + g;
      h[channel / 128 * 128 + operand_slot(h_pack, channel % 128)] =
          from_float<T>(join(a.activity, low, high) * weight);
    } else {
      int channel = slab * 16 + g;
#pragma unroll 1
      for (int j = 0; j < 2; ++j, channel += 8) {
        const float value = activate(a.activity.kind, j ? high : low);
        h[channel / 128 * 128 + operand_slot(h_pack, channel % 128)] = from_float<T>(value * weight);
      }
    }
  }
}

template <typename T, Pack P, Pack S>
__global__ void __launch_bounds__(kFirstThreads, 2) decode_first_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  const RouterArgs& r = a.router;
  const Routing routing(shared, r);
  const int warps = blockDim.x / 32, warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, g = lane / 4,
            t = lane % 4;
  const int split = a.tuning.split, shift = __ffs(split) - 1;  // a power of two
  const int part = warp & (split - 1), group = warp >> shift, groups = warps >> shift;
  const int slot_bytes = FirstShared::slot_bytes(a), ring_bytes = kFirstDepth * slot_bytes;
  int* list = reinterpret_cast<int*>(shared + FirstShared::lists_at(a)) + warp * 16;  // pairs, then their tokens
  const unsigned char* ring = shared + FirstShared::ring_at(a, warps) + warp * ring_bytes;
  FirstTasks tasks(a);

  // The next stage to copy: all of a warp's stages of all its tasks, one after the other.
  int next_task, next_left, next_step, next_at;
  bool next_own;
  Source next;
  auto have_next = [&] {
    while (next_left == 0 && next_task < tasks.count) {
      int item, slab;
      tasks.locate(a, next_task, &item, &slab);
      next_own = tasks.is_shared(next_task);
      if (next_own) {
        next = slab_source<S>(a.shared_gate_up, 0, slab, part);
        next_left = (a.shared_gate_up.stages - part + split - 1) >> shift;
        next_step = split * a.shared_gate_up.stage_bytes();
      } else {
        next = slab_source<P>(a.gate_up, routing.items[item] & 0xffff, slab, part);
        next_left = (a.gate_up.stages - part + split - 1) >> shift;
        next_step = split * a.gate_up.stage_bytes();
      }
      next_task += groups;
    }
    return next_left != 0;
  };
  auto copy_next = [&](bool wanted) {
    if (wanted) {
      const uint32_t slot = shared_address(ring) + next_at;
      if (P == S || !next_own) {
        copy_stage<P>(next, slot);
      } else {
        copy_stage<S>(next, slot);
      }
    }
    next.payload += next_step;
    next_at = next_at + slot_bytes == ring_bytes ? 0 : next_at + slot_bytes;
    --next_left;
  };
  // What the choice does not decide comes before the wait. Whatever was before the kernel before is done.
  if ((a.tuning.prefetch & 2) && a.shared_gate_up.count) {
    const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, of = int64_t(gridDim.x) * blockDim.x;
    to_l2(a.shared_gate_up.data, a.shared_gate_up.expert_bytes(), at, of);
    to_l2(a.shared_down.data, a.shared_down.expert_bytes(), at, of);
  }
  int ahead = 0;  // stages that are on their way
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    if (pass) wait_previous();
    if (pass || a.tuning.rehearse) route(r, routing, pass == 0, pass && blockIdx.x == 0);
    if (pass) tasks.add_experts(a, uniform(routing.counts[0]));
    next_task = group, next_left = 0, next_step = 0, next_at = 0, next_own = false, next = Source{};
    int stages = 0;
#pragma unroll 1
    for (; stages < kFirstDepth && have_next(); ++stages) {
      copy_next(stages >= ahead);
      if (stages >= ahead) copies_commit();
    }
    ahead = stages;
  }
#pragma unroll 1
  for (; ahead < kFirstDepth; ++ahead) copies_commit();

  const int pairs = r.tokens * r.top_k;
  if (blockIdx.x == 0) {  // for the second product, which may start when this is there
#pragma unroll 1
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
      a.routed[1 + i] = i < routing.counts[1] ? routing.items[i] : 0;
      a.routed[1 + pairs + i] = routing.places[i];
    }
    if (threadIdx.x == 0) a.routed[0] = routing.counts[1];
    __threadfence();
  }
  __syncthreads();  // also: the choice's scratch becomes the sums' place
  release_next();

  int at = 0, odd = 0;
#pragma unroll 1
  for (int task = group; task < tasks.count; task += groups, odd ^= 1) {
    const bool own = tasks.is_shared(task);
    int item, slab, expert = 0, count;
    tasks.locate(a, task, &item, &slab);
    __syncwarp();
    if (own) {
      count = min(8, r.tokens - item * 8);
      if (lane < count) list[lane] = list[8 + lane] = item * 8 + lane;
    } else {
      const int entry = uniform(routing.items[item]);
      expert = entry & 0xffff;
      count = min(8, pairs_of(routing, pairs, expert, entry >> 16, list));
      if (lane < count) list[8 + lane] = a.by_top_k(list[lane]);
    }
    __syncwarp();

    float total[4] = {};
    auto stages = [&](auto pack, const Packed& w, const void* data, const float* sums, int cols, int each) {
      constexpr Pack kPack = decltype(pack)::kPack;
      constexpr bool kInteger = kPack == Pack::kInt4 || kPack == Pack::kInt8;
      constexpr int kBytes = kStageCols<kPack> * 2;
      const int sub = w.sub, step = split * sub;
      const bool have = g < count, have_low = kInteger && 2 * t < count, have_high = kInteger && 2 * t + 1 < count;
      const unsigned char* right = static_cast<const unsigned char*>(data) +
                                   (have ? list[8 + g] : 0) * int64_t(cols) * sizeof(T) + t * 16 + part * kBytes;
      int low = (have_low ? list[8 + 2 * t] : 0) * each + part * sub;
      int high = (have_high ? list[9 + 2 * t] : 0) * each + part * sub;
#pragma unroll 1
      for (int k = part; k < w.stages; k += split) {
        auto sum_of = [&](int i, int within) {
          return i ? (have_high ? sums[high + within] : 0.0f) : (have_low ? sums[low + within] : 0.0f);
        };
        copies_wait<kFirstDepth - 1>();
        __syncwarp();
        multiply_any<T, kPack, false, false>(sub != 1, w.zeros, ring + at, right, have, sum_of, Shifts{}, 1.0f, total);
        __syncwarp();
        right += split * kBytes, low += step, high += step;
        at = at + slot_bytes == ring_bytes ? 0 : at + slot_bytes;
        if (have_next()) copy_next(true);
        copies_commit();
      }
    };
    if (own) {
      const bool apart = a.shared_x.data != nullptr;
      stages(PackOf<S>(), a.shared_gate_up, apart ? a.shared_x.data : a.x.data, apart ? a.shared_x.sums : a.x.sums,
             apart ? a.shared_x.cols : a.x.cols, a.shared_gate_up.blocks() * a.shared_gate_up.sub);
    } else {
      stages(PackOf<P>(), a.gate_up, a.x.data, a.x.sums, a.x.cols, a.gate_up.blocks() * a.gate_up.sub);
    }
    if (split > 1) {
      float4* mine = reinterpret_cast<float4*>(shared + FirstShared::partial_at(a, warps)) +
                     (odd * groups + group) * (split - 1) * 32 + lane;
      if (part) mine[(part - 1) * 32] = make_float4(total[0], total[1], total[2], total[3]);
      asm volatile("bar.sync %0, %1;\n" ::"r"(group + 1), "r"(split * 32) : "memory");
      if (part) continue;
#pragma unroll 1
      for (int i = 0; i < split - 1; ++i) {
        const float4 more = mine[i * 32];
        total[0] += more.x, total[1] += more.y, total[2] += more.z, total[3] += more.w;
      }
    }
    const Packed& w = own ? a.shared_gate_up : a.gate_up;
    finish_slab<T>(a, w.gated, own ? a.shared_down.pack : a.down.pack, total, list, count,
                   own ? a.gates : routing.weights, own ? pairs : 0, slab, w.multiplier ? w.multiplier[expert] : 1.0f);
  }
  copies_wait<0>();
}

template <typename T, Pack P, Pack S>
cudaError_t launch_first_pair(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const int threads = a.tuning.first_threads;
  const size_t shared = FirstShared::bytes(a, threads / 32);
  int resident = 0;
  cudaError_t status = cudaFuncSetAttribute(decode_first_kernel<T, P, S>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared));
  if (status != cudaSuccess) return status;
  status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, decode_first_kernel<T, P, S>, threads, shared);
  if (status != cudaSuccess) return status;
  const int wanted = a.tuning.first_blocks ? a.tuning.first_blocks : a.router.tokens == 1 ? 1 : 2;
  const int each = resident < 1 ? 1 : resident < wanted ? resident : wanted;
  const int64_t tasks = int64_t(a.shared_gate_up.count ? slabs_of(a.shared_gate_up) : 0) * ((a.router.tokens + 7) / 8) +
                        int64_t(a.router.tokens) * a.router.top_k * slabs_of(a.gate_up);
  const int64_t room = int64_t(device.multiprocessors) * each;
  return launch_kernel(decode_first_kernel<T, P, S>, tasks < room ? tasks : room, threads, shared,
                       device.capability >= 90 && a.tuning.dependent, stream, a);
}

template <typename T>
cudaError_t launch_first_type(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const Pack shared = a.shared_gate_up.count ? a.shared_gate_up.pack : a.gate_up.pack;
  return dispatch_packs(a.gate_up.pack, shared, [&](auto own, auto other) {
    return launch_first_pair<T, decltype(own)::kPack, decltype(other)::kPack>(a, device, stream);
  });
}

}  // namespace deltafuse::moe
