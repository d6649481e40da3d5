// The router of prompts: selection, and the order of tokens by expert, in one launch. Tokens stay on the device.
#include "moe_dependent.h"
#include "moe_logits_fast.h"
#include "moe_select_block.cuh"

namespace deltafuse::moe {
namespace {

constexpr int kWarps = 16;
constexpr int kSizes = 16;  // of tiles: sixteens of tokens
static_assert(kWarps >= kParts, "a warp a part where a block chooses");

// Of a warp: scores, choices, groups; 16 bytes' worth.
__host__ __device__ __forceinline__ int floats_each(const RouterArgs& a) {
  return (2 * a.experts + a.n_group + 3) / 4 * 4;
}

// All blocks are resident (a cooperative launch), so they can wait for each other.
__device__ __forceinline__ void grid_barrier(uint32_t* counter, uint32_t target) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counter, 1u);
    while (*reinterpret_cast<volatile uint32_t*>(counter) < target) {
    }
    __threadfence();
  }
  __syncthreads();
}

// Exclusive sums of values[0, count), in place; returns the total. All threads; scratch: kWarps + 1.
__device__ __forceinline__ int exclusive_sums(int* values, int count, int* scratch) {
  const int per = (count + blockDim.x - 1) / blockDim.x, begin = threadIdx.x * per;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int sum = 0;
  for (int i = begin; i < min(begin + per, count); ++i) sum += values[i];
  int upto = sum;
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += below;
  }
  if (lane == 31) scratch[warp] = upto;
  __syncthreads();
  int before = upto - sum;
  before += static_cast<int>(__reduce_add_sync(~0u, lane < warp ? static_cast<unsigned>(scratch[lane]) : 0u));
  if (threadIdx.x == blockDim.x - 1) scratch[kWarps] = before + sum;
  __syncthreads();
  for (int i = begin; i < min(begin + per, count); ++i) {
    const int value = values[i];
    values[i] = before;
    before += value;
  }
  __syncthreads();
  return scratch[kWarps];
}

// The order of one token's experts; lane j has the j-th.
__device__ __forceinline__ void order_one(const RouterArgs& a, const PermuteArgs& p, int id) {
  const int lane = threadIdx.x % 32;
  int before = 0;
#pragma unroll 4
  for (int j = 0; j < a.top_k; ++j) before += __shfl_sync(~0u, id, j) < id;
  if (lane < a.top_k) {
    const int row = before * arranged_rows(1);
    p.positions[lane] = row, p.sorted[row] = 0;
    p.tiles[before] = TokenTile{id, row, 1, 0};
    if (lane == 0) *p.num_tiles = a.top_k;
  }
}

// The choice among a token's few experts that can be chosen; the whole warp. Lane j < top_k gets the j-th and its
// weight. False: they are not known.
__device__ __forceinline__ bool select_few(const RouterArgs& a, const uint16_t* few, int token, Candidate* candidates,
                                           int* id, float* weight) {
  const int lane = threadIdx.x % 32;
  const int expert = __ldcg(few + int64_t(token) * kFew + lane);
  if (__shfl_sync(~0u, expert, 0) == kAnyExpert) return false;
  const unsigned certain = static_cast<unsigned>(__shfl_sync(~0u, expert, kFewExperts)) |
                           static_cast<unsigned>(__shfl_sync(~0u, expert, kFewExperts + 1)) << 16;
  const bool there = lane < kFewExperts && expert != kNoExpert;
  const int count = __popc(__ballot_sync(~0u, there));
  float score = 0.0f;
  uint32_t key = 0;  // of no expert
  if (there) {
    score = sigmoid_exact(logit_of(a, token, expert));
    key = order_of(comparable(a.expert_bias ? score + __ldg(a.expert_bias + expert) : score));
  }
  const bool grouped = a.topk_group < a.n_group;
  const int group = grouped && there ? expert / (a.experts / a.n_group) : 0;
  const bool doubtful = grouped && there && !(certain >> group & 1);
  if (__any_sync(~0u, doubtful)) {  // the best ones of such groups are all there
    uint32_t one = key, two = 0;    // the largest of the lane's group
    bool leads = there;
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      const uint32_t other = __shfl_sync(~0u, key, j);
      const bool same = __shfl_sync(~0u, group, j) == group;  // lanes beyond `count` change nothing
      if (same && j != lane) two = max(two, min(one, other)), one = max(one, other);
      if (same && j < lane) leads = false;
    }
    const float total = a.group_top == 2 ? key_number(one) + key_number(two) : key_number(one);
    const uint32_t own = order_of(comparable(total));
    int better = __popc(certain);
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      const uint32_t other = __shfl_sync(~0u, own, j);
      const int other_group = __shfl_sync(~0u, group, j);
      const bool counts = __shfl_sync(~0u, leads && doubtful, j);
      better += counts && (other > own || (other == own && other_group < group));
    }
    if (doubtful && better >= a.topk_group) key = 0;
  }
  int place = 0;
#pragma unroll 4
  for (int j = 0; j < count; ++j) {
    const uint32_t other = __shfl_sync(~0u, key, j);
    const int other_expert = __shfl_sync(~0u, expert, j);
    place += other > key || (other == key && other_expert < expert);
  }
  if (key && place < a.top_k) candidates[place] = Candidate{__float_as_uint(score), expert};
  __syncwarp();
  const Candidate mine = lane < a.top_k ? candidates[lane] : Candidate{0, 0};
  __syncwarp();
  *id = mine.expert, *weight = weights_of(a, __uint_as_float(mine.key));
  return true;
}

__global__ void __launch_bounds__(kWarps * 32)
    select_kernel(const __grid_constant__ RouterArgs a, const __grid_constant__ PermuteArgs p) {
  extern __shared__ __align__(16) float shared[];
  __shared__ SoftmaxStats stats[kWarps];
  __shared__ Candidate candidates[kWarps][kCandidates];
  __shared__ BlockChoice choice;
  __shared__ int chosen[kMaxTopK];
  __shared__ int sizes[kSizes];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, blocks = p.blocks;
  const int each = floats_each(a);
  int* counts = reinterpret_cast<int*>(shared + kWarps * each);
  int* scratch = counts + a.experts;
  for (int e = threadIdx.x; e < a.experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();

  wait_previous();
  release_next();
  for (int i = block * blockDim.x + threadIdx.x; i < p.zero_count; i += blocks * blockDim.x) p.zeros[i] = 0;

  const int first = static_cast<int>(int64_t(a.tokens) * block / blocks);
  const int end = static_cast<int>(int64_t(a.tokens) * (block + 1) / blocks);
  // A warp takes a token; a lone token's scores are made by all, and where it is the only one the choice.
  const bool alone = end - first == 1;
  bool by_parts = chooses_by_parts(a);
  const ExpertParts parts(a);
  if (alone) {
    auto logit = [&](int, int expert) { return logit_of(a, first, expert); };
    if (a.softmax && warp == 0) softmax_stats(a.experts, [&](int expert) { return logit(0, expert); }, &stats[0]);
    __syncthreads();
    score_tokens(a, 1, logit, stats, shared, shared + a.experts, threadIdx.x, blockDim.x);
    __syncthreads();
  }
  if (by_parts) {
    const float* choices = shared + a.experts;
    uint32_t keys[kPartEach];
    if (warp < parts.count) {
      part_keys(a, parts, warp, [&](int e) { return order_of(choices[choice_at(a, e)]); }, keys);
      find_best(a, parts, warp, keys, choice);
    }
    __syncthreads();
    if (warp < parts.count) find_candidates(a, parts, warp, keys, choice);
    __syncthreads();
    by_parts = rank_parts(a, choice, warp, kWarps, [&](int j, int expert) { chosen[j] = expert; });
    __syncthreads();
  }
#pragma unroll 1
  for (int token = first + warp; token < end; token += kWarps) {
    float* scores = shared + warp * each;
    float* choices = scores + a.experts;
    int id;
    float weight;
    const bool known = p.few && select_few(a, p.few, token, candidates[warp], &id, &weight);
    if (!alone && !known) {  // all logits are on their way at once
#pragma unroll 16
      for (int e = lane; e < a.experts; e += 32) scores[e] = logit_of(a, token, e);
      auto logit = [&](int, int expert) { return scores[expert]; };
      if (a.softmax) softmax_stats(a.experts, [&](int expert) { return logit(0, expert); }, &stats[warp]);
      __syncwarp();
      score_tokens(a, 1, logit, &stats[warp], scores, choices, lane, 32);
      __syncwarp();
    }
    if (by_parts) {
      id = lane < a.top_k ? chosen[lane] : 0;
      weight = weights_of(a, lane < a.top_k ? scores[id] : 0.0f);
    } else if (!known) {
      select(a, scores, choices, choices + a.experts, candidates[warp], &id, &weight);
    }
    if (lane < a.top_k) {
      const int64_t pair = int64_t(token) * a.top_k + lane;
      p.ids[pair] = id;
      p.weights[pair] = weight;
      if (a.ids_out) a.ids_out[pair] = id;
      if (a.weights_out) a.weights_out[pair] = weight;
      if (a.tokens > 1) p.positions[pair] = atomicAdd(&counts[id], 1);  // any order within the expert is as good
    }
    if (a.tokens == 1) order_one(a, p, id);
    __syncwarp();
  }
  if (a.tokens == 1) return;
  __syncthreads();

  // Where each block's tokens of an expert begin: the experts are dealt out to all warps of the grid.
  if (blocks > 1) {
    for (int e = threadIdx.x; e < a.experts; e += blockDim.x) p.histogram[int64_t(e) * blocks + block] = counts[e];
    grid_barrier(p.barrier, blocks);
    for (int e = block * kWarps + warp; e < a.experts; e += blocks * kWarps) {
      int before = 0;
      for (int base = 0; base < blocks; base += 32) {
        const int count = base + lane < blocks ? __ldcg(p.histogram + int64_t(e) * blocks + base + lane) : 0;
        int upto = count;
        for (int step = 1; step < 32; step *= 2) {
          const int below = __shfl_up_sync(~0u, upto, step);
          if (lane >= step) upto += below;
        }
        if (base + lane < blocks) p.histogram[int64_t(e) * blocks + base + lane] = before + upto - count;
        before += __shfl_sync(~0u, upto, 31);
      }
      if (lane == 0) p.totals[e] = before;
    }
    grid_barrier(p.barrier, 2 * blocks);
    for (int e = threadIdx.x; e < a.experts; e += blockDim.x) counts[e] = __ldcg(p.totals + e);
    __syncthreads();
  }
  int* tiles_before = reinterpret_cast<int*>(shared);  // the keys are not needed any more
  int* begins = tiles_before + a.experts;
  for (int e = threadIdx.x; e < a.experts; e += blockDim.x) {
    begins[e] = arranged_rows(counts[e]);
    tiles_before[e] = (counts[e] + p.tile_tokens - 1) / p.tile_tokens;
  }
  __syncthreads();
  exclusive_sums(begins, a.experts, scratch);
  if (block == 0) {
    if (threadIdx.x < kSizes) sizes[threadIdx.x] = 0;
    const int total = exclusive_sums(tiles_before, a.experts, scratch);
    if (threadIdx.x == 0) *p.num_tiles = total;
    // An expert's tiles are of about the same size, multiples of 8.
    auto tiles_of = [&](int e) { return (counts[e] + p.tile_tokens - 1) / p.tile_tokens; };
    auto each_of = [&](int e, int tiles) { return ((counts[e] + tiles - 1) / tiles + 7) / 8 * 8; };
    auto size_of = [&](int e, int tiles) { return max(kSizes - 1 - (each_of(e, tiles) + 15) / 16, 0); };
    if (p.by_size) {  // the largest first, so that a multiprocessor meets the code of one size after the other
      for (int e = threadIdx.x; e < a.experts; e += blockDim.x) {
        if (const int tiles = tiles_of(e)) atomicAdd(&sizes[size_of(e, tiles)], tiles);
      }
      __syncthreads();
      if (warp == 0) {
        const int own = lane < kSizes ? sizes[lane] : 0;
        int upto = own;
        for (int step = 1; step < 32; step *= 2) {
          const int below = __shfl_up_sync(~0u, upto, step);
          if (lane >= step) upto += below;
        }
        if (lane < kSizes) sizes[lane] = upto - own;
      }
      __syncthreads();
      for (int e = threadIdx.x; e < a.experts; e += blockDim.x) {
        if (const int tiles = tiles_of(e)) tiles_before[e] = atomicAdd(&sizes[size_of(e, tiles)], tiles);
      }
    }
    for (int e = threadIdx.x; e < a.experts; e += blockDim.x) {
      const int tiles = tiles_of(e), each = tiles ? each_of(e, tiles) : 0;
      for (int i = 0; i < tiles; ++i) {
        const int begin = min(i * each, counts[e]), stop = min(begin + each, counts[e]);
        p.tiles[tiles_before[e] + i] = TokenTile{e, begins[e] + begin, stop - begin, 0};
      }
    }
  }
  const int64_t last = int64_t(end) * a.top_k;
  for (int64_t pair = int64_t(first) * a.top_k + threadIdx.x; pair < last; pair += blockDim.x) {
    const int e = p.ids[pair];
    const int before = blocks > 1 ? __ldcg(p.histogram + int64_t(e) * blocks + block) : 0;
    const int position = begins[e] + before + p.positions[pair];
    p.positions[pair] = position;
    p.sorted[position] = static_cast<int>(pair / a.top_k);
  }
}

__global__ void __launch_bounds__(256) shared_tiles_kernel(TokenTile* tiles, int32_t* num_tiles, int tokens, int each) {
  const int total = (tokens + each - 1) / each;
  for (int i = threadIdx.x; i < total; i += 256) tiles[i] = TokenTile{0, i * each, min(each, tokens - i * each), 0};
  if (threadIdx.x == 0) *num_tiles = total;
}

size_t select_shared(const RouterArgs& a) { return sizeof(float) * (kWarps * floats_each(a) + a.experts + kWarps + 1); }

}  // namespace

int select_blocks(int tokens, const DeviceInfo& device) {
  const int wanted = (tokens + kWarps - 1) / kWarps;
  return wanted < 1 ? 1 : wanted > device.multiprocessors ? device.multiprocessors : wanted;
}

cudaError_t launch_select(const RouterArgs& args, const PermuteArgs& permute, const DeviceInfo& device,
                          cudaStream_t stream) {
  const bool together = permute.blocks > 1;
  if (together && !permute.barrier_set) {
    const cudaError_t status = cudaMemsetAsync(permute.barrier, 0, sizeof(uint32_t), stream);
    if (status != cudaSuccess) return status;
  }
  LaunchForm form{static_cast<unsigned>(permute.blocks), kWarps * 32, select_shared(args)};
  form.cooperative = together;
  return launch_dependent(select_kernel, form, device, stream, args, permute);
}

cudaError_t launch_shared_tiles(TokenTile* tiles, int32_t* num_tiles, int tokens, int tile_tokens,
                                cudaStream_t stream) {
  shared_tiles_kernel<<<1, 256, 0, stream>>>(tiles, num_tiles, tokens, tile_tokens);
  return cudaGetLastError();
}

}  // namespace deltafuse::moe
