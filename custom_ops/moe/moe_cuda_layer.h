// What the parts of the dispatch share: the layer, and what decode and prompts both read from a call.
#pragma once

#include <algorithm>

#include "moe_cuda_plan.h"

namespace deltafuse::moe {

struct CudaLayer {
  DType dtype = DType::kFloat32;
  Packed gate_up, down, shared_gate_up, shared_down;
  void* memory[4] = {};  // of each matrix
};

inline const char* failed(const char* what, cudaError_t status) {
  return reason("%s: %s", what, cudaGetErrorString(status));
}

inline bool misaligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; }

inline RouterArgs router_args(const Params& p, int64_t first, int tokens) {
  RouterArgs r{};
  const int size = size_of(p.dtype);
  r.x_type = p.dtype;
  r.weight_type = p.router_weight_float32 ? DType::kFloat32 : p.dtype;
  r.given_type = p.router_logits_float32 ? DType::kFloat32 : p.dtype;
  r.x = static_cast<const char*>(p.x) + first * p.hidden_size * size;
  r.weight = p.router_weight;
  if (!p.router_weight && p.router_logits) {
    r.given = static_cast<const char*>(p.router_logits) + first * p.num_experts * size_of(r.given_type);
  }
  r.router_bias = p.router_bias, r.expert_bias = p.expert_bias;
  r.tokens = tokens, r.experts = p.num_experts, r.top_k = p.top_k, r.hidden = p.hidden_size;
  r.n_group = p.n_group, r.topk_group = p.topk_group, r.group_top = p.group_top;
  r.masked_score_zero = p.masked_score_zero, r.masked_weights = p.masked_weights;
  r.softmax = p.score == Score::kSoftmax, r.norm_topk_prob = p.norm_topk_prob;
  r.norm_eps = p.norm_eps, r.scaling = p.routed_scaling_factor;
  r.ids_out = p.expert_ids ? p.expert_ids + first * p.top_k : nullptr;
  r.weights_out = p.expert_weights ? p.expert_weights + first * p.top_k : nullptr;
  return r;
}

inline Activity activity(const Params& p) { return {p.activation, p.gated, p.clamp, p.gate_limit, p.up_limit}; }

inline int wide_cols(int cols, DType dtype) { return rounded(cols, 16 / size_of(dtype)); }

inline int hidden_stride(const Packed& first, const Packed& second) {
  return std::max(first.padded_channels(), second.blocks() * 128);
}

// The layer's matrices as they will be packed; data is null still.
void describe(const Params& p, CudaLayer* layer);

// Calls of a few tokens (moe_cuda_decode.cc).
bool is_few(const CudaLayer& layer, const Params& p, const DeviceInfo& device);
int64_t few_bytes(const CudaLayer& layer, const Params& p);
const char* run_few(const CudaLayer& layer, const Params& p, const DeviceInfo& device, void* workspace,
                    cudaStream_t stream);

// All others, `tokens` of them from `begin` on (moe_cuda_prompt.cc).
int64_t chunk_tokens(const CudaLayer& layer, const Params& p);  // at once, at most
int64_t many_bytes(const CudaLayer& layer, const Params& p, int64_t tokens, const DeviceInfo& device);
const char* run_many(const CudaLayer& layer, const Params& p, int64_t begin, int tokens, const DeviceInfo& device,
                     void* workspace, cudaStream_t stream);

}  // namespace deltafuse::moe
