// Which experts a token goes to: scores, groups, the best choices. Exactly as spec.py defines it.
#pragma once

#include "moe_device.cuh"

namespace deltafuse::moe {

// Floats as integers of the same order; NaN counts as minus infinity, and -0 as 0. 0 is below all of them.
__device__ __forceinline__ uint32_t order_of(float x) {
  if (x != x) x = __int_as_float(0xff800000);
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float number_of(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

struct SoftmaxStats {
  double largest = 0.0, sum = 1.0;
};

__device__ __forceinline__ float logit_of(const RouterArgs& a, int64_t token, int expert) {
  const int64_t i = token * a.experts + expert;
  if (a.logits) return __ldcg(a.logits + i);
  const float given = load_any(a.given, i, a.given_type);
  if (!a.router_bias) return given;
  return static_cast<float>(static_cast<double>(given) + static_cast<double>(a.router_bias[expert]));
}

__device__ __forceinline__ float score_of(const RouterArgs& a, const SoftmaxStats& stats, float logit) {
  const double x = static_cast<double>(logit);
  if (a.softmax) return static_cast<float>(exp(x - stats.largest) / stats.sum);
  return static_cast<float>(1.0 / (1.0 + exp(-x)));
}

// What the softmax of a token needs; the whole warp.
__device__ __forceinline__ SoftmaxStats softmax_stats(const RouterArgs& a, int64_t token, int lane) {
  SoftmaxStats stats;
  if (!a.softmax) return stats;
  float largest = __int_as_float(0xff800000);
  for (int e = lane; e < a.experts; e += 32) largest = fmaxf(largest, logit_of(a, token, e));
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  double sum = 0.0;
  for (int e = lane; e < a.experts; e += 32) sum += exp(static_cast<double>(logit_of(a, token, e)) - largest);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  stats.largest = largest, stats.sum = sum;
  return stats;
}

// The order of an expert's choice.
__device__ __forceinline__ uint32_t choice_of(const RouterArgs& a, const SoftmaxStats& stats, int64_t token,
                                              int expert) {
  float choice = score_of(a, stats, logit_of(a, token, expert));
  if (a.expert_bias) choice += a.expert_bias[expert];
  return order_of(choice);
}

struct Best {
  uint32_t key = 0;
  int index = 0x7fffffff;
};
__device__ __forceinline__ bool after(uint32_t key, int index, const Best& last) {
  return key < last.key || (key == last.key && index > last.index);
}
__device__ __forceinline__ bool better(uint32_t key, int index, const Best& than) {
  return key > than.key || (key == than.key && index < than.index);
}

// The best of keys[0, count) that comes after `last`; the whole warp.
__device__ __forceinline__ Best next_best(const uint32_t* keys, int count, const Best& last, int lane) {
  Best best;
#pragma unroll 4
  for (int i = lane; i < count; i += 32) {
    const uint32_t key = keys[i];
    if (after(key, i, last) && key > best.key) best.key = key, best.index = i;
  }
  const uint32_t key = __reduce_max_sync(~0u, best.key);
  best.index = __reduce_min_sync(~0u, best.key == key ? static_cast<unsigned>(best.index) : 0x7fffffffu);
  best.key = key;
  return best;
}

constexpr Best kFirst{0xffffffffu, -1};

// Leaves the choices of the groups that stay and masks the others. keys [E], groups [n_group] are the warp's own shared
// memory; afterwards groups[g] is 1 where the group stays.
__device__ __forceinline__ void mask_groups(const RouterArgs& a, uint32_t* keys, uint32_t* groups, int lane) {
  const int size = a.experts / a.n_group;
  int lanes = 32;  // for one group
  while (lanes > 1 && 32 / lanes < a.n_group) lanes /= 2;
  for (int base = 0; base < a.n_group; base += 32 / lanes) {
    const int group = base + lane / lanes, begin = group * size;
    Best last = kFirst;
    float total = 0.0f;
    for (int round = 0; round < a.group_top; ++round) {
      Best best;
      if (group < a.n_group) {
#pragma unroll 4
        for (int i = lane % lanes; i < size; i += lanes) {
          const uint32_t key = keys[begin + i];
          if (after(key, i, last) && key > best.key) best.key = key, best.index = i;
        }
      }
      for (int step = lanes / 2; step > 0; step /= 2) {
        const uint32_t key = __shfl_xor_sync(~0u, best.key, step);
        const int index = __shfl_xor_sync(~0u, best.index, step);
        if (better(key, index, best)) best.key = key, best.index = index;
      }
      total = round ? total + number_of(best.key) : number_of(best.key);
      last = best;
    }
    if (group < a.n_group && lane % lanes == 0) groups[group] = order_of(total);
  }
  __syncwarp();
  Best last = kFirst;
  for (int kept = 0; kept < a.topk_group; ++kept) last = next_best(groups, a.n_group, last, lane);
  __syncwarp();
  for (int g = lane; g < a.n_group; g += 32) groups[g] = !after(groups[g], g, last);
  __syncwarp();
  const uint32_t masked = order_of(a.masked_score_zero ? 0.0f : __int_as_float(0xff800000));
  for (int e = lane; e < a.experts; e += 32) {
    if (!groups[e / size]) keys[e] = masked;
  }
  __syncwarp();
}

// Chooses a token's experts; the whole warp. Lane j < top_k returns with the j-th expert and its weight.
__device__ __forceinline__ void select(const RouterArgs& a, const SoftmaxStats& stats, int64_t token, uint32_t* keys,
                                       uint32_t* groups, int lane, int* id, float* weight) {
  const bool grouped = a.topk_group < a.n_group;
  if (grouped) mask_groups(a, keys, groups, lane);
  Best last = kFirst;
  int mine = 0;
  for (int j = 0; j < a.top_k; ++j) {
    last = next_best(keys, a.experts, last, lane);
    if (lane == j) mine = last.index;
  }
  float w = 0.0f;
  if (lane < a.top_k) {
    w = score_of(a, stats, logit_of(a, token, mine));
    if (grouped && a.masked_weights && !groups[mine / (a.experts / a.n_group)]) w = 0.0f;
  }
  if (a.norm_topk_prob) {
    float sum = 0.0f;
    for (int j = 0; j < a.top_k; ++j) sum += __shfl_sync(~0u, w, j);
    w = w / (sum + a.norm_eps);
  }
  *id = mine, *weight = w * a.scaling;
}

}  // namespace deltafuse::moe
