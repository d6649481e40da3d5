// Which experts a token goes to: scores, groups, the best choices. Exactly as spec.py defines it. Compact: a call of
// one token runs all of this once, and instructions that are not in the cache yet cost more than the work.
#pragma once

#include "moe_decode.h"
#include "moe_device.cuh"

namespace deltafuse::moe {

// Floats as integers of the same order. 0 is below all of them.
__device__ __forceinline__ uint32_t order_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float key_number(uint32_t key) {  // and back
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}
// NaN counts as minus infinity, and -0 as 0.
__device__ __forceinline__ float comparable(float x) { return x != x ? __int_as_float(0xff800000) : x + 0.0f; }

// e^x for x from -200 to 0 in float64, to about an ulp. Few steps one after the other: a step takes 30 cycles.
__device__ __forceinline__ double exp_of(double x) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: rounds to an integer
  const double shifted = fma(x, 1.4426950408889634, kMagic), n = shifted - kMagic;
  const double r = fma(n, -1.9082149292705877e-10, fma(n, -0.6931471803691238, x));
  const double s = r * r, s2 = s * s, s3 = s * s2;
  double even = fma(1.0 / 24.0, s2, fma(0.5, s, 1.0)), odd = fma(1.0 / 120.0, s2, fma(1.0 / 6.0, s, 1.0));
  double even4 = fma(1.0 / 40320.0, s, 1.0 / 720.0), odd4 = fma(1.0 / 362880.0, s, 1.0 / 5040.0);
  even4 = fma(fma(1.0 / 479001600.0, s, 1.0 / 3628800.0), s2, even4);
  odd4 = fma(fma(1.0 / 6227020800.0, s, 1.0 / 39916800.0), s2, odd4);
  even = fma(even4, s3, even), odd = fma(odd4, s3, odd);
  const double p = fma(odd, r, even);
  return __hiloint2double(__double2hiint(p) + (__double2loint(shifted) << 20), __double2loint(p));
}
// e^x for x <= 0; below e^-200 that. NaN stays.
__device__ __forceinline__ double exp_negative(double x) { return x != x ? x : exp_of(x < -200.0 ? -200.0 : x); }

// 1 / (1 + e^-x).
__device__ __forceinline__ float sigmoid_exact(float logit) {
  const double t = exp_of(static_cast<double>(fmaxf(-fabsf(logit), -200.0f))), d = 1.0 + t;
  double guess;  // to 2^-20
  asm("rcp.approx.ftz.f64 %0, %1;\n" : "=d"(guess) : "d"(d));
  const double e = fma(-d, guess, 1.0);
  const double r = fma(guess, fma(e, e, e), guess);
  const float score = static_cast<float>(logit < 0.0f ? t * r : r);
  return logit != logit ? logit : score;
}

__device__ __forceinline__ float logit_of(const RouterArgs& a, int64_t token, int expert) {
  const int64_t i = token * a.experts + expert;
  if (a.logits) return __ldcg(a.logits + i);
  const float given = load_any(a.given, i, a.given_type);
  return a.router_bias ? static_cast<float>(static_cast<double>(given) + static_cast<double>(a.router_bias[expert]))
                       : given;
}

struct SoftmaxStats {
  double largest, inverse;  // of the sum
};
// The whole warp. logit(e): the token's.
template <typename Logit>
__device__ __forceinline__ void softmax_stats(int experts, Logit logit, SoftmaxStats* stats) {
  const int lane = threadIdx.x % 32;
  float largest = __int_as_float(0xff800000);
#pragma unroll 1
  for (int e = lane; e < experts; e += 32) largest = fmaxf(largest, logit(e));
#pragma unroll 1
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  double sum = 0.0;
#pragma unroll 1
  for (int e = lane; e < experts; e += 32) {
    sum += exp_negative(static_cast<double>(logit(e)) - static_cast<double>(largest));
  }
#pragma unroll 1
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  stats->largest = static_cast<double>(largest), stats->inverse = 1.0 / sum;
}

// Where a token's choice of an expert lies: pieces of 16 bytes change places, so that lanes with neighbouring experts
// can load theirs without bank conflicts.
__device__ __forceinline__ int choice_at(const RouterArgs& a, int expert) {
  return a.experts % 32 ? expert : expert ^ ((expert >> 5 & 7) << 2);
}

// Scores and choices of `tokens` tokens into shared memory [tokens, E], by `threads` threads of which this is `thread`.
// logit(token, expert): may read what stands in `scores`. stats: of each token, for softmax.
template <typename Logit>
__device__ __forceinline__ void score_tokens(const RouterArgs& a, int tokens, Logit logit, const SoftmaxStats* stats,
                                             float* scores, float* choices, int thread, int threads) {
  constexpr int kTogether = 4;
  const int total = tokens * a.experts;
#pragma unroll 1
  for (int base = thread; base < total; base += kTogether * threads) {
    float value[kTogether], bias[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int i = base + j * threads;
      if (i >= total) break;
      const int token = tokens == 1 ? 0 : i / a.experts, expert = i - token * a.experts;
      value[j] = logit(token, expert);
      bias[j] = a.expert_bias ? __ldg(a.expert_bias + expert) : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int i = base + j * threads;
      if (i >= total) break;
      float score;
      if (a.softmax) {
        const SoftmaxStats& s = stats[tokens == 1 ? 0 : i / a.experts];
        score = static_cast<float>(exp_negative(static_cast<double>(value[j]) - s.largest) * s.inverse);
      } else {
        score = sigmoid_exact(value[j]);
      }
      scores[i] = score;
      const int expert = tokens == 1 ? i : i % a.experts;
      choices[i - expert + choice_at(a, expert)] = comparable(a.expert_bias ? score + bias[j] : score);
    }
  }
}

// A token's scores and keys in the order in which the lanes of a warp load them: a lane holds `each` neighbouring
// experts, four of which are 16 bytes. Then the keys' place is scored_at + kScored.
__device__ __forceinline__ int scored_at(int each, int expert) {
  const int lane = expert / each, i = expert - lane * each;
  return i / 4 * 128 + lane * 4 + i % 4;
}
// A sigmoid score and its key, from a logit.
__device__ __forceinline__ void store_scored(const RouterArgs& a, float* scored, int at, int expert, float logit,
                                             bool write = true) {
  const float score = sigmoid_exact(logit);
  const float choice = comparable(a.expert_bias ? score + __ldg(a.expert_bias + expert) : score);
  if (write) scored[at] = score, reinterpret_cast<uint32_t*>(scored)[kScored + at] = order_of(choice);
}

struct Best {
  uint32_t key = 0;
  int index = 0x7fffffff;
};
__device__ __forceinline__ bool after(uint32_t key, int index, const Best& last) {
  return key < last.key || (key == last.key && index > last.index);
}

// The best of value(0) to value(count - 1) that comes after `last`, by `lanes` neighbouring lanes.
template <typename Value>
__device__ __forceinline__ Best next_best(Value value, int count, const Best& last, int lanes) {
  Best best;
#pragma unroll 1
  for (int i = threadIdx.x % lanes; i < count; i += lanes) {
    const uint32_t key = order_of(value(i));
    if (after(key, i, last) && key > best.key) best.key = key, best.index = i;
  }
#pragma unroll 1
  for (int step = lanes / 2; step > 0; step /= 2) {
    const uint32_t key = __shfl_xor_sync(~0u, best.key, step);
    const int index = __shfl_xor_sync(~0u, best.index, step);
    if (key > best.key || (key == best.key && index < best.index)) best.key = key, best.index = index;
  }
  return best;
}

// Any groups: choices [E] of the warp's token are masked in place, kept[g] is 1 where a group stays. The whole warp.
static __device__ __noinline__ void mask_groups(const RouterArgs& a, float* choices, float* kept) {
  const int size = a.experts / a.n_group, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int g = 0; g < a.n_group; ++g) {
    Best last{0xffffffffu, -1};
    float total = 0.0f;
    auto choice = [&](int i) { return choices[choice_at(a, g * size + i)]; };
#pragma unroll 1
    for (int round = 0; round < a.group_top; ++round) {
      last = next_best(choice, size, last, 32);
      const float value = choice(last.index);
      total = round ? total + value : value;
    }
    if (lane == 0) kept[g] = comparable(total);
  }
  __syncwarp();
  Best last{0xffffffffu, -1};
#pragma unroll 1
  for (int i = 0; i < a.topk_group; ++i) {
    last = next_best([&](int g) { return kept[g]; }, a.n_group, last, 32);
  }
  __syncwarp();
#pragma unroll 1
  for (int g = lane; g < a.n_group; g += 32) kept[g] = after(order_of(kept[g]), g, last) ? 0.0f : 1.0f;
  __syncwarp();
  const float masked = a.masked_score_zero ? 0.0f : __int_as_float(0xff800000);
#pragma unroll 1
  for (int e = lane; e < a.experts; e += 32) {
    if (kept[e / size] == 0.0f) choices[choice_at(a, e)] = masked;
  }
  __syncwarp();
}

// A candidate's place among the choices: its key and its expert.
struct Candidate {
  uint32_t key;
  int expert;
};
constexpr int kCandidates = 32;  // room for a warp's

// The j-th best of up to kCandidates, to lane j < top_k: each finds how many are ahead of it. The whole warp.
__device__ __forceinline__ int rank_candidates(Candidate* candidates, int count, int top_k) {
  const int lane = threadIdx.x % 32;
  const Candidate own = lane < count ? candidates[lane] : Candidate{0, 0};
  int place = 0;
#pragma unroll 4
  for (int j = 0; j < count; ++j) {
    const Candidate other = candidates[j];
    place += other.key > own.key || (other.key == own.key && other.expert < own.expert);
  }
  __syncwarp();
  if (lane < count && place < top_k) candidates[place].expert = own.expert;
  __syncwarp();
  const int mine = lane < top_k ? candidates[lane].expert : 0;
  __syncwarp();
  return mine;
}

// The top_k largest keys, of equal ones the lower expert first, lane j gets the j-th; the whole warp. A lane holds
// `each` neighbouring experts, kEach at most. Only keys as large as the top_k-th of the lanes' best ones can be among
// them: those go to shared memory, and each finds how many are ahead of it.
template <int kEach>
__device__ __forceinline__ int largest(uint32_t (&keys)[kEach], int each, int top_k, Candidate* candidates) {
  const int lane = threadIdx.x % 32;
  uint32_t best = keys[0];
#pragma unroll
  for (int i = 1; i < kEach; ++i) best = max(best, keys[i]);
  int ahead = 0;
#pragma unroll 8
  for (int j = 0; j < 32; ++j) ahead += __shfl_sync(~0u, best, j) > best;
  const uint32_t least = max(__reduce_min_sync(~0u, ahead < top_k ? best : ~0u), 1u);  // 0: there is no expert
  const unsigned below = (1u << lane) - 1;
  int count = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const bool in = keys[i] >= least;
    const unsigned who = __ballot_sync(~0u, in);
    const int at = count + __popc(who & below);
    if (in && at < kCandidates) candidates[at] = Candidate{keys[i], lane * each + i};
    count += __popc(who);
  }
  if (count <= kCandidates) {
    __syncwarp();
    return rank_candidates(candidates, count, top_k);
  }
  int mine = 0;  // many equal keys: one after the other
#pragma unroll 1
  for (int j = 0; j < top_k; ++j) {
    int at = 0;
    best = keys[0];
#pragma unroll
    for (int i = 1; i < kEach; ++i) {
      if (keys[i] > best) best = keys[i], at = i;
    }
    const uint32_t most = __reduce_max_sync(~0u, best);
    const int owner = __ffs(static_cast<int>(__ballot_sync(~0u, best == most))) - 1;  // lower lanes hold lower experts
    const int expert = owner * each + __shfl_sync(~0u, at, owner);
    if (lane == j) mine = expert;
#pragma unroll
    for (int i = 0; i < kEach; ++i) keys[i] = lane == owner && i == at ? 0 : keys[i];
  }
  return mine;
}

// Groups that are whole lanes of `each` experts, a power of two of them, go by registers.
__host__ __device__ __forceinline__ bool easy_groups(const RouterArgs& a, int each) {
  const int size = a.experts / a.n_group, lanes = size / each;
  return a.group_top <= 2 && lanes * each == size && (lanes & (lanes - 1)) == 0 && lanes <= 32;
}

// Masks the keys of groups that do not stay; returns the lanes of those that do. The whole warp.
template <int kEach>
__device__ __forceinline__ unsigned mask_easy_groups(const RouterArgs& a, int each, uint32_t (&keys)[kEach]) {
  const int lane = threadIdx.x % 32, lanes = a.experts / a.n_group / each;
  uint32_t one = 0, two = 0;  // the largest of the group
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    two = max(two, min(one, keys[i]));
    one = max(one, keys[i]);
  }
#pragma unroll 1
  for (int step = 1; step < lanes; step *= 2) {
    const uint32_t other = __shfl_xor_sync(~0u, one, step), second = __shfl_xor_sync(~0u, two, step);
    two = max(max(two, second), min(one, other));
    one = max(one, other);
  }
  const float total = a.group_top == 2 ? key_number(one) + key_number(two) : key_number(one);
  const uint32_t own = order_of(comparable(total));
  int better = 0;
#pragma unroll 4
  for (int g = 0; g < a.n_group; ++g) {
    const uint32_t other = __shfl_sync(~0u, own, g * lanes);
    better += other > own || (other == own && g * lanes + lanes <= lane);
  }
  const bool stays = better < a.topk_group;
  if (!stays) {
    const uint32_t masked = order_of(a.masked_score_zero ? 0.0f : __int_as_float(0xff800000));
#pragma unroll
    for (int i = 0; i < kEach; ++i) keys[i] = i < each && lane * each + i < a.experts ? masked : 0;
  }
  return __ballot_sync(~0u, stays);
}

// The weights of a token's experts from their scores, lane j the j-th's.
__device__ __forceinline__ float weights_of(const RouterArgs& a, float w) {
  if (a.norm_topk_prob) {
    float sum = w;
#pragma unroll 1
    for (int step = 1; step < a.top_k; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    w = w / (sum + a.norm_eps);
  }
  return w * a.scaling;
}

// Chooses a token's experts; the whole warp, a lane holds kEach neighbouring experts. Lane j < top_k returns with the
// j-th expert and its weight.
template <int kEach>
__device__ __forceinline__ void select_from(const RouterArgs& a, const float* scores, float* choices, float* kept,
                                            Candidate* candidates, int* id, float* weight) {
  const int lane = threadIdx.x % 32;
  const bool grouped = a.topk_group < a.n_group, easy = grouped && easy_groups(a, kEach);
  if (grouped && !easy) mask_groups(a, choices, kept);
  uint32_t keys[kEach];
  if (kEach % 4 == 0 && a.experts % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kEach / 4 * 4; i += 4) {
      const int e = lane * kEach + i;
      const bool in = e < a.experts;
      const float4 four = *reinterpret_cast<const float4*>(choices + (in ? choice_at(a, e) : 0));
      keys[i] = in ? order_of(four.x) : 0, keys[i + 1] = in ? order_of(four.y) : 0;
      keys[i + 2] = in ? order_of(four.z) : 0, keys[i + 3] = in ? order_of(four.w) : 0;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int e = lane * kEach + i;
      keys[i] = e < a.experts ? order_of(choices[choice_at(a, e)]) : 0;
    }
  }
  const unsigned staying = easy ? mask_easy_groups(a, kEach, keys) : ~0u;  // lanes
  const int mine = largest(keys, kEach, a.top_k, candidates);
  float w = lane < a.top_k ? scores[mine] : 0.0f;
  if (grouped && a.masked_weights) {
    const bool stays = easy ? (staying >> (mine / kEach)) & 1 : kept[mine / (a.experts / a.n_group)] != 0.0f;
    if (!stays) w = 0.0f;
  }
  *id = mine, *weight = weights_of(a, w);
}

// Apart: its registers would weigh on everything else in the kernel.
static __device__ __noinline__ void select_from_many(const RouterArgs& a, const float* scores, float* choices,
                                                     float* kept, Candidate* candidates, int* id, float* weight) {
  select_from<32>(a, scores, choices, kept, candidates, id, weight);
}

// candidates: kCandidates of the warp's own.
__device__ __forceinline__ void select(const RouterArgs& a, const float* scores, float* choices, float* kept,
                                       Candidate* candidates, int* id, float* weight) {
  if (a.experts <= 64) {
    select_from<2>(a, scores, choices, kept, candidates, id, weight);
  } else if (a.experts <= 256) {
    select_from<8>(a, scores, choices, kept, candidates, id, weight);
  } else if (a.experts <= 512) {
    select_from<16>(a, scores, choices, kept, candidates, id, weight);
  } else {
    select_from_many(a, scores, choices, kept, candidates, id, weight);
  }
}

// Chooses from what store_scored left of a token; the whole warp. Keys lie as scored_at has it, or (each_apart) by
// expert. Lane j < top_k gets the j-th expert, and then what its weight is made of.
__device__ __forceinline__ int select_scored(const RouterArgs& a, int each, bool each_apart, const float* scored,
                                             Candidate* candidates, float* score) {
  constexpr int kEach = kScored / 32;
  const int lane = threadIdx.x % 32;
  const uint32_t* all = reinterpret_cast<const uint32_t*>(scored) + kScored;
  uint32_t keys[kEach];
  if (each_apart) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      keys[i] = i < each && lane * each + i < a.experts ? __ldcg(all + lane * each + i) : 0;
    }
  } else {
    uint4 keys4[kEach / 4];
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i) keys4[i] = __ldcg(reinterpret_cast<const uint4*>(all) + i * 32 + lane);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      keys[i] = i < each && lane * each + i < a.experts ? word_of(keys4[i / 4], i % 4) : 0;
    }
  }
  const bool grouped = a.topk_group < a.n_group;
  const unsigned staying = grouped ? mask_easy_groups(a, each, keys) : ~0u;
  const int mine = largest(keys, each, a.top_k, candidates);
  *score = lane < a.top_k ? __ldcg(scored + (each_apart ? mine : scored_at(each, mine))) : 0.0f;
  if (grouped && a.masked_weights && !((staying >> (mine / each)) & 1)) *score = 0.0f;
  return mine;
}
// Apart: a block that could not choose.
static __device__ __noinline__ int select_unclear(const RouterArgs& a, int each, const float* scored,
                                                  Candidate* candidates, float* score) {
  return select_scored(a, each, true, scored, candidates, score);
}

}  // namespace deltafuse::moe
