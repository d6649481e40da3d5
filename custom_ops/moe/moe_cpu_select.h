// Which experts a token goes to, from its float32 logits. Plain code: the same on every processor.
#pragma once

#include <cmath>
#include <limits>

#include "moe_cpu_plan.h"

namespace deltafuse::moe::cpu {

inline float NanIsLowest(float x) { return std::isnan(x) ? -std::numeric_limits<float>::infinity() : x; }

// Index of the largest number that `taken` does not name, the lowest of equal ones.
template <typename Taken>
int64_t Largest(const float* values, int64_t count, const Taken& taken) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i)
    if (!taken(i) && (best < 0 || values[i] > values[best])) best = i;
  return best;
}

// Replaces logits by scores.
inline void Scores(const Params& p, float* values) {
  if (p.score == Score::kSigmoid) {
    for (int64_t e = 0; e < p.num_experts; ++e)
      values[e] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(values[e]))));
    return;
  }
  float most = values[0];
  for (int64_t e = 1; e < p.num_experts; ++e) most = values[e] > most ? values[e] : most;
  double total = 0.0;  // with a NaN or an infinity among the logits it is NaN
  for (int64_t e = 0; e < p.num_experts; ++e) total += std::exp(static_cast<double>(values[e]) - most);
  for (int64_t e = 0; e < p.num_experts; ++e)
    values[e] = static_cast<float>(std::exp(static_cast<double>(values[e]) - most) / total);
}

// The sum of a group's group_top largest choices, larger first.
inline float GroupScore(const Params& p, const float* choices, int64_t group) {
  const int64_t size = p.num_experts / p.n_group, first = group * size;
  float total = 0.0f;
  // The last one taken, and all before it in the order (larger, then lower index), are behind us.
  float last = 0.0f;
  int64_t last_index = -1;
  for (int32_t place = 0; place < p.group_top; ++place) {
    float best = 0.0f;
    int64_t best_index = -1;
    for (int64_t e = first; e < first + size; ++e) {
      const float choice = choices[e];
      if (last_index >= 0 && !(choice < last || (choice == last && e > last_index))) continue;
      if (best_index >= 0 && !(choice > best)) continue;
      best = choice;
      best_index = e;
    }
    total = place == 0 ? best : total + best;
    last = best;
    last_index = best_index;
  }
  return NanIsLowest(total);
}

// Replaces one token's logits by its scores; ids and weights of its top_k experts. `choice` and `group_scores` are
// buffers of num_experts and n_group.
inline void Select(const Params& p, float* logits, float* choice, float* group_scores, int32_t* ids, float* weights) {
  const auto choose = [&] {
    for (int64_t e = 0; e < p.num_experts; ++e)
      choice[e] = NanIsLowest(p.expert_bias ? logits[e] + p.expert_bias[e] : logits[e]);
  };
  if (p.choose_by_logits) choose();
  Scores(p, logits);
  if (!p.choose_by_logits) choose();
  const int64_t size = p.num_experts / p.n_group;
  constexpr float kTaken = std::numeric_limits<float>::quiet_NaN();
  for (int64_t g = 0; g < p.n_group; ++g) group_scores[g] = 0.0f;
  if (p.topk_group < p.n_group) {
    for (int64_t g = 0; g < p.n_group; ++g) group_scores[g] = GroupScore(p, choice, g);
    const auto kept = [&](int64_t g) { return std::isnan(group_scores[g]); };
    for (int32_t i = 0; i < p.topk_group; ++i) group_scores[Largest(group_scores, p.n_group, kept)] = kTaken;
  } else {
    for (int64_t g = 0; g < p.n_group; ++g) group_scores[g] = kTaken;
  }
  const float masked = p.masked_score_zero ? 0.0f : -std::numeric_limits<float>::infinity();
  const auto stays = [&](int64_t e) { return std::isnan(group_scores[e / size]); };
  for (int64_t e = 0; e < p.num_experts; ++e)
    if (!stays(e)) choice[e] = masked;
  const auto taken = [&](int64_t e) { return std::isnan(choice[e]); };
  float total = 0.0f;
  for (int32_t i = 0; i < p.top_k; ++i) {
    const int64_t e = Largest(choice, p.num_experts, taken);
    choice[e] = kTaken;
    ids[i] = static_cast<int32_t>(e);
    weights[i] = p.masked_weights && !stays(e) ? 0.0f : logits[e];
    total += weights[i];
  }
  float divisor = total + p.norm_eps;
  if (divisor < p.norm_min) divisor = p.norm_min;  // a NaN stays one
  for (int32_t i = 0; i < p.top_k; ++i) {
    if (p.norm_topk_prob) weights[i] /= divisor;
    weights[i] *= p.routed_scaling_factor;
  }
}

}  // namespace deltafuse::moe::cpu
