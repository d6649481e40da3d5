// A few tokens: the choice of experts, then gates, ups and activation of the chosen ones and of the shared expert.
//
// A task is 16 rows of an expert for up to 4 of its tokens; `split` neighbouring warps share one, each with its own
// stages and its own ring of copies in flight. Nothing but the choice concerns a whole block.
#pragma once

#include "moe_arrange.cuh"
#include "moe_route.cuh"

namespace deltafuse::moe {

constexpr int kFirstThreads = 512;    // at most
constexpr int kFirstDepth = 4;        // stages in flight a warp
constexpr int kOperandBytes = 49152;  // of tokens in shared memory at most

struct FirstShared {
  static __host__ __device__ int slot_bytes(const DecodeArgs& a) { return slot_bytes_of(a.gate_up, a.shared_gate_up); }
  static __host__ __device__ int split_shift(const DecodeArgs& a) {  // split is 1, 2, 4 or 8
    return a.tuning.split == 8 ? 3 : a.tuning.split >> 1;
  }
  // Sums of the warps of a task meet here, two tasks at a time.
  static __host__ __device__ int partial_at(const DecodeArgs& a) { return Routing::kept_bytes(a.router); }
  static __host__ __device__ int operand_at(const DecodeArgs& a, int warps) {
    return (partial_at(a) + 2 * (warps - (warps >> split_shift(a))) * 256 + 127) / 128 * 128;
  }
  // With the scales and sums of a token that the block arranges itself.
  static __host__ __device__ int operand_bytes(const DecodeArgs& a) {
    return a.router.tokens * a.x.cols * 2 + (a.polled ? (a.x.cols / 128 * 20 + 127) / 128 * 128 : 0);
  }
  static __host__ __device__ bool operand_here(const DecodeArgs& a) { return operand_bytes(a) <= kOperandBytes; }
  // The rings' place is the choice's before.
  static __host__ __device__ int ring_at(const DecodeArgs& a, int warps) {
    return operand_at(a, warps) + (operand_here(a) ? operand_bytes(a) : 0);
  }
  static __host__ __device__ size_t bytes(const DecodeArgs& a, int warps) {
    const int ring = warps * kFirstDepth * slot_bytes(a), choice = a.polled ? sizeof(BlockChoice)
                                                                   : a.each ? warps * kCandidates * sizeof(Candidate)
                                                                            : Routing::scratch_bytes(a.router);
    const int scratch = Routing::lists_bytes(a.router) + choice;
    return ring_at(a, warps) + static_cast<size_t>(ring > scratch ? ring : scratch);
  }
};

// The block's tasks: the shared expert's are dealt out one by one, the others in runs, so that a block meets few
// experts. Local tasks are numbered, the shared ones first.
struct FirstTasks {
  int shared_count, begin, count;  // the block's shared tasks; its first other one; all of its own
  __device__ FirstTasks(const DecodeArgs& a, int items) {
    const int all =
        a.shared_gate_up.count ? slabs_of(a.shared_gate_up) * ((a.router.tokens + kItemTokens - 1) / kItemTokens) : 0;
    shared_count = static_cast<int>((all + (gridDim.x - 1 - blockIdx.x)) / gridDim.x);
    const uint32_t own = items * slabs_of(a.gate_up);  // at most 512 items of 4096 slabs
    begin = static_cast<int>(own * blockIdx.x / gridDim.x);
    count = shared_count + static_cast<int>(own * (blockIdx.x + 1) / gridDim.x) - begin;
  }
  __device__ bool is_shared(int local) const { return local < shared_count; }
  // Which item (of the shared expert: which four tokens), and which slab.
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

// A slab's channels of up to 4 tokens, those of rows g and g + 8 of the lane's token if it has one: sums to
// activations, for the second product. The whole warp.
template <typename T>
__device__ __forceinline__ void finish_slab(const DecodeArgs& a, bool gated, Pack h_pack, float low, float high,
                                            float weight, bool have, int row, int slab) {
  const int g = threadIdx.x % 32 / 4;
  unsigned char* h = static_cast<unsigned char*>(a.h) + int64_t(row) * a.h_stride * 2;
  const bool digits = h_pack == Pack::kInt4 || h_pack == Pack::kInt8;
#pragma unroll 1
  for (int j = 0; j < (gated ? 1 : 2); ++j) {
    const int group = gated ? slab : slab * 2 + j, channel = group * 8 + g;
    const float value = weight * (gated ? join(a.activity, low, high) : activate(a.activity.kind, j ? high : low));
    if (!digits) {
      if (have)
        reinterpret_cast<T*>(h)[channel / 128 * 128 + operand_slot(h_pack, channel % 128)] = from_float<T>(value);
      continue;
    }
    uint32_t most = __float_as_uint(value) & 0x7fffffffu;
#pragma unroll
    for (int step = 4; step < 32; step *= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
    const Digits by(most);
    const int n = __float2int_rn(value * by.by), upper = (n + 128) >> 8;
    const int64_t at = int64_t(row) * (a.h_stride / 8) + group_at(group);
    if (have) {
      unsigned char* out = h + digit_at(channel);
      out[0] = static_cast<unsigned char>(upper), out[64] = static_cast<unsigned char>(n);
      if (g == 0) a.h_scales[at] = by.scale;
    }
    if (a.has_sums) {
      float sum = static_cast<float>(n) * by.scale;
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (have && g == 0) a.h_sums[at] = sum;
    }
  }
}

// kOne: one token whose keys are polled (DecodeArgs::polled).
template <typename T, Pack P, Pack S, bool kOne>
__global__ void __launch_bounds__(kFirstThreads, 2) decode_first_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  const RouterArgs& r = a.router;
  const int warps = blockDim.x / 32, warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, g = lane / 4,
            t = lane % 4;
  const ExpertParts& parts = a.choice;
  const uint32_t* all_keys = reinterpret_cast<const uint32_t*>(a.scored) + kScored;
  uint32_t keys[kPartEach];
  if (kOne && warp < parts.count) peek_part(r, parts, warp, all_keys, keys);  // what comes before they do is for free
  const int split = a.tuning.split, shift = FirstShared::split_shift(a);
  const int part = warp & (split - 1), group = warp >> shift, groups = warps >> shift;
  const int slot_bytes = FirstShared::slot_bytes(a), ring_bytes = kFirstDepth * slot_bytes;
  unsigned char* rings = shared + FirstShared::ring_at(a, warps);
  const Routing routing(shared, rings, r);
  const int tokens = kOne ? 1 : r.tokens, pairs = tokens * r.top_k;

  // What the choice does not decide comes before the wait. Whatever was before the kernel before is done.
  auto prefetch = [&](int thread, int threads) {
    if ((a.tuning.prefetch & 2) && a.shared_gate_up.count) {
      const int64_t at = int64_t(blockIdx.x) * threads + thread, of = int64_t(gridDim.x) * threads;
      to_l2(a.shared_gate_up.data, a.shared_gate_up.expert_bytes(), at, of);
      to_l2(a.shared_down.data, a.shared_down.expert_bytes(), at, of);
    }
  };
  // The next stage to copy: all of a warp's stages of all its tasks, one after the other.
  int next_task = group, next_left = 0, next_step = 0;
  bool next_own = false;
  Source next{};
  const uint32_t ring_address = shared_address(rings + warp * ring_bytes);
  auto aim = [&](const FirstTasks& tasks) {  // at the next task, but for its expert; the item
    int item, slab;
    tasks.locate(a, next_task, &item, &slab);
    next_own = tasks.is_shared(next_task);
    const Packed& w = next_own ? a.shared_gate_up : a.gate_up;
    next = P == S || !next_own ? slab_source<P>(w, 0, slab, part) : slab_source<S>(w, 0, slab, part);
    next_left = (w.stages - part + split - 1) >> shift;
    next_step = split * w.stage_bytes();
    next_task += groups;
    return item;
  };
  auto aim_expert = [&](int item) {
    if (next_own) return;
    const int expert = tokens > 1 ? routing.items[item] : routing.ids[item];
    next.payload += static_cast<uint64_t>(a.gate_up.tiles * a.gate_up.stages * a.gate_up.stage_bytes()) *
                    static_cast<uint32_t>(expert);
  };
  const FirstTasks known(a, pairs);  // one token's
  int known_item = 0;
  if (kOne && next_task < known.count) known_item = aim(known);

  unsigned char* operand_here = shared + FirstShared::operand_at(a, warps);
  const unsigned char* x_rows = static_cast<const unsigned char*>(a.x.data);
  Operand operand = a.x;
  float score = 0.0f;
  const bool late = !kOne && a.each && tokens <= warps;  // weights are made when copies are on their way
  if constexpr (kOne) {
    if (warp < parts.count) {  // these warps choose
      BlockChoice& choice = *reinterpret_cast<BlockChoice*>(routing.choice);
      auto meet = [&] { asm volatile("bar.sync 15, %0;\n" ::"r"(parts.count * 32) : "memory"); };
      while (!part_there(r, parts, warp, keys)) peek_part(r, parts, warp, all_keys, keys);
      find_best(r, parts, warp, keys, choice);
      meet();
      find_candidates(r, parts, warp, keys, choice);
      meet();
      auto take = [&](int j, int expert) { routing.take_id(r, 0, j, expert); };
      if (!rank_parts(r, choice, warp, parts.count, take) && warp == 0) {
        wait_previous();
        const int id = select_unclear(r, a.each, a.scored, reinterpret_cast<Candidate*>(&choice), &score);
        if (lane < r.top_k) take(lane, id);
      }
    } else {  // the others arrange the token meanwhile
      const int thread = static_cast<int>(threadIdx.x) - parts.count * 32,
                threads = static_cast<int>(blockDim.x) - parts.count * 32;
      float* scales = reinterpret_cast<float*>(operand_here + a.x.cols * 2);
      const Arranged to(operand_here, scales, a.x.sums ? scales + a.x.cols / 128 : nullptr);
#pragma unroll 1
      for (int block = thread / 32; block < a.x.cols / 128; block += threads / 32) {
        arrange(to, a.x, static_cast<const T*>(r.x), r.hidden, block);
      }
      prefetch(thread, threads);
    }
    x_rows = operand_here, operand.scales = reinterpret_cast<float*>(operand_here + a.x.cols * 2);
    if (a.x.sums) operand.sums = operand.scales + a.x.cols / 128;
  } else {
    prefetch(threadIdx.x, blockDim.x);
    routing.clear(r);
    wait_previous();
    if (FirstShared::operand_here(a)) {  // the warps that choose come last
      const uint32_t here = shared_address(operand_here);
#pragma unroll 1
      for (int i = (blockDim.x - 1 - threadIdx.x) * 16; i < FirstShared::operand_bytes(a); i += blockDim.x * 16) {
        copy16(here + i, x_rows + i);
      }
      copies_commit();
      x_rows = operand_here;
    }
    if (a.each) {
      if (tokens > 1) __syncthreads();
#pragma unroll 1
      for (int token = warp; token < tokens; token += warps) {
        const int pair = token * r.top_k + lane;
        const int id = select_scored(r, a.each, false, a.scored + token * (2 * kScored),
                                     reinterpret_cast<Candidate*>(routing.choice) + warp * kCandidates, &score);
        if (lane < r.top_k) routing.take_id(r, token, pair, id);
        if (late) break;  // the weights later
        const float weight = weights_of(r, score);
        if (lane < r.top_k) routing.take_weight(r, pair, weight, blockIdx.x == 0);
      }
    } else {
      route(r, routing, blockIdx.x == 0);
    }
  }
  copies_wait<0>();
  __syncthreads();
  if (a.one && blockIdx.x == 0 && warp == warps - 1 && lane < r.top_k) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;\n" ::"l"(a.routed + 1 + lane), "r"(routing.ids[lane] + 1)
                 : "memory");
  }
  if (tokens > 1) list_items(r, routing, a.by_top_k);
  const FirstTasks tasks = kOne ? known : FirstTasks(a, tokens > 1 ? uniform(routing.counts[0]) : pairs);
  if (next_left != 0) aim_expert(known_item);

  auto fetch = [&](int to) {
    while (next_left == 0 && next_task < tasks.count) aim_expert(aim(tasks));
    if (next_left != 0) {
      if (P == S || !next_own) {
        copy_stage<P>(next, ring_address + to);
      } else {
        copy_stage<S>(next, ring_address + to);
      }
      next.payload += next_step;
      --next_left;
    }
    copies_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kFirstDepth; ++i) fetch(i * slot_bytes);

  if (blockIdx.x == 0 && !a.one) {  // for the second product
#pragma unroll 1
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
      a.routed[1 + i] = tokens == 1 ? routing.ids[i] : i < routing.counts[1] ? routing.experts[i] : 0;
      a.routed[1 + pairs + i] = tokens == 1 ? i : routing.places[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      asm volatile("st.release.gpu.global.s32 [%0], %1;\n" ::"l"(a.routed), "r"(tokens > 1 ? routing.counts[1] : pairs)
                   : "memory");
    }
  }
  release_next();
  if (late) {
    if (warp < tokens) {
      const float weight = weights_of(r, score);
      if (lane < r.top_k) routing.take_weight(r, warp * r.top_k + lane, weight, blockIdx.x == 0);
    }
    __syncthreads();
  }
  bool weighted = !kOne;
  if (kOne && (a.gates || a.shared_x.data)) wait_previous();

  const unsigned char* ring = rings + warp * ring_bytes;
  int at = 0, odd = 0;
#pragma unroll 1
  for (int task = group; task < tasks.count; task += groups, odd ^= 1) {
    const bool own = tasks.is_shared(task);
    int item, slab, expert = 0, count = 1, pair, token_in = 0, token_out = 0;
    tasks.locate(a, task, &item, &slab);
    const Packed& w = own ? a.shared_gate_up : a.gate_up;
    if (tokens == 1) {
      pair = own ? 0 : item;
      if (!own) expert = routing.ids[item];
    } else if (own) {
      count = min(kItemTokens, tokens - item * kItemTokens);
      token_in = item * kItemTokens + min(g / 2, count - 1);
      token_out = pair = item * kItemTokens + min(t, count - 1);
    } else {
      const int16_t* rows = routing.rows + item * kItemTokens;
      expert = routing.items[item];
      count = kItemTokens;
      for (int i = kItemTokens - 1; i > 0; --i) count = rows[i] < 0 ? i : count;
      pair = rows[min(t, count - 1)];
      token_in = a.by_top_k(rows[min(g / 2, count - 1)]);
      token_out = a.by_top_k(pair);
    }

    float total[2] = {}, floats[4] = {};
    auto stages = [&](auto pack, const unsigned char* rows, const Operand& x) {
      constexpr Pack kPack = decltype(pack)::kPack;
      constexpr bool kInteger = kPack == Pack::kInt4 || kPack == Pack::kInt8;
      constexpr int kBytes = kStageCols<kPack> * 2;
      const unsigned char* right =
          rows + token_in * (x.cols * 2) + part * kBytes + t * 16 + (kInteger ? (g & 1) * 64 : 0);
      const int block = token_out * (x.cols / 128);
      const bool fine = w.sub != 1, zeros = w.zeros;
#pragma unroll 1
      for (int k = part; k < w.stages; k += split) {
        float scale = 0.0f;
        if constexpr (kInteger) scale = x.scales[block + k];
        copies_wait<kFirstDepth - 1>();
        __syncwarp();
        if constexpr (kInteger) {
          auto sum_of = [&](int sub) { return x.sums[(block + k) * 4 + sub]; };
          if (fine) {
            multiply_digits<T, kPack, true>(zeros, ring + at, right, scale, sum_of, total);
          } else {
            multiply_digits<T, kPack, false>(zeros, ring + at, right, scale, sum_of, total);
          }
        } else {
          multiply_floats<T, kPack>(ring + at, right, true, 1.0f, floats);
        }
        __syncwarp();
        right += split * kBytes;
        fetch(at);
        at = at + slot_bytes == ring_bytes ? 0 : at + slot_bytes;
      }
    };
    const bool apart = own && a.shared_x.data != nullptr;
    if (P == S || !own) {
      stages(PackOf<P>(), x_rows, operand);
    } else {
      stages(PackOf<S>(), apart ? static_cast<const unsigned char*>(a.shared_x.data) : x_rows,
             apart ? a.shared_x : operand);
    }
    total[0] += floats[0], total[1] += floats[2];
    if (!weighted && part == 0) {  // each warp makes them
      wait_previous();
      const int id = lane < r.top_k ? routing.ids[lane] : 0;
      score = weights_of(r, lane < r.top_k ? __ldcg(a.scored + id) : 0.0f);
      weighted = true;
      if (blockIdx.x == 0 && warp == 0 && lane < r.top_k) {
        if (r.ids_out) r.ids_out[lane] = id;
        if (r.weights_out) r.weights_out[lane] = score;
      }
    }
    if (split > 1) {
      float2* mine = reinterpret_cast<float2*>(shared + FirstShared::partial_at(a)) +
                     (odd * groups + group) * (split - 1) * 32 + lane;
      if (part) mine[(part - 1) * 32] = make_float2(total[0], total[1]);
      asm volatile("bar.sync %0, %1;\n" ::"r"(group + 1), "r"(split * 32) : "memory");
      if (part) continue;
#pragma unroll 1
      for (int i = 0; i < split - 1; ++i) total[0] += mine[i * 32].x, total[1] += mine[i * 32].y;
    }
    const float factor = w.multiplier ? w.multiplier[expert] : 1.0f;
    const float chosen = kOne ? __shfl_sync(~0u, score, own ? 0 : pair) : own ? 0.0f : routing.weights[pair];
    const float weight = !own ? chosen : a.gates ? a.gates[pair] : 1.0f;
    finish_slab<T>(a, w.gated, own ? a.shared_down.pack : a.down.pack, total[0] * factor, total[1] * factor, weight,
                   t < count, own ? pairs + pair : pair, slab);
  }
  copies_wait<0>();
  if (kOne) wait_previous();
}

template <typename T, Pack P, Pack S, bool kOne>
cudaError_t launch_first_kernel(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const int threads = a.tuning.first_threads;
  const size_t shared = FirstShared::bytes(a, threads / 32);
  int resident = 0;
  cudaError_t status = cudaFuncSetAttribute(decode_first_kernel<T, P, S, kOne>,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (status != cudaSuccess) return status;
  status =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, decode_first_kernel<T, P, S, kOne>, threads, shared);
  if (status != cudaSuccess) return status;
  const int wanted = a.tuning.first_blocks ? a.tuning.first_blocks : a.router.tokens == 1 ? 1 : 2;
  const int each = resident < 1 ? 1 : resident < wanted ? resident : wanted;
  const int64_t tasks = int64_t(a.shared_gate_up.count ? slabs_of(a.shared_gate_up) : 0) *
                            ((a.router.tokens + kItemTokens - 1) / kItemTokens) +
                        int64_t(a.router.tokens) * a.router.top_k * slabs_of(a.gate_up);
  const int64_t room = int64_t(device.multiprocessors) * each;
  const LaunchForm form{dim3(static_cast<unsigned>(tasks < room ? tasks : room)), threads, shared};
  return launch_few(decode_first_kernel<T, P, S, kOne>, form, a, device, stream);
}

template <typename T, Pack P, Pack S>
cudaError_t launch_first_pair(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  return a.polled ? launch_first_kernel<T, P, S, true>(a, device, stream)
                  : launch_first_kernel<T, P, S, false>(a, device, stream);
}

template <typename T>
cudaError_t launch_first_type(const DecodeArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const Pack shared = a.shared_gate_up.count ? a.shared_gate_up.pack : a.gate_up.pack;
  return dispatch_packs(a.gate_up.pack, shared, [&](auto own, auto other) {
    return launch_first_pair<T, decltype(own)::kPack, decltype(other)::kPack>(a, device, stream);
  });
}

}  // namespace deltafuse::moe
