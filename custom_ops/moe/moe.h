// The host interface of the GroupedQMoE kernels, CPU and CUDA. Knows nothing of ORT. See spec.py for the mathematics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace deltafuse::moe {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
enum class Format : int32_t { kFloat = 0, kInt4 = 1, kUInt4 = 2, kInt8 = 3, kUInt8 = 4, kFloat8 = 5, kBFloat16 = 6 };
enum class Score : int32_t { kSigmoid = 0, kSoftmax = 1 };
enum class Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu2 = 3 };
enum class Clamp : int32_t { kNone = 0, kBefore = 1, kAfter = 2 };

// Weights as the model stores them: [count, rows, cols], two int4 a byte, the first in the low half (cols is even
// then). Zero points are one byte each, of 4-bit weights too: int8 for kInt4 and kInt8, uint8 for kUInt4 and kUInt8.
// Null: absent, or packed into the layer before.
struct Matrix {
  const void* data = nullptr;
  const void* scale = nullptr;
  const void* zero_point = nullptr;
  Format format = Format::kFloat;
  int32_t has_zero_point = 0;  // also where the pointer is null
  int32_t scale_float32 = 1;   // else T
  int32_t block_size = 0;      // along cols; 0: the whole row
  int32_t block_rows = 1;
};

// One call. Pointers are device or host pointers, as the kernel asks; an absent operand is null.
struct Params {
  // geometry
  int64_t num_tokens = 0;
  int32_t num_experts = 0, top_k = 0, hidden_size = 0, intermediate_size = 0;
  int32_t shared_intermediate_size = 0;  // 0: no shared expert
  int32_t zero_experts = 0;              // the last of num_experts: they have no weights and give x back
  DType dtype = DType::kFloat32;         // x, y, float weights
  // attributes
  Score score = Score::kSigmoid;
  int32_t choose_by_logits = 0;
  int32_t n_group = 1, topk_group = 1, group_top = 2;
  int32_t masked_score_zero = 0;
  int32_t masked_weights = 0;
  int32_t norm_topk_prob = 1;
  float norm_eps = 0.0f;
  float norm_min = 0.0f;  // what the scores are divided by is at least this
  float routed_scaling_factor = 1.0f;
  Activation activation = Activation::kSilu;
  float activation_alpha = 1.0f;  // silu is x sigmoid(alpha x)
  int32_t gated = 1;
  float up_offset = 0.0f;  // added to up, after its clamp
  Clamp clamp = Clamp::kNone;
  float gate_limit = std::numeric_limits<float>::infinity();
  float up_limit = std::numeric_limits<float>::infinity();
  // operands' forms
  int32_t router_weight_float32 = 1;  // else T
  int32_t router_logits_float32 = 1;  // else T
  int32_t shared_gate_float32 = 0;    // else T
  int32_t has_bias = 0;               // any of the experts' biases; also where the pointers are null
  // inputs
  const void* x = nullptr;
  const void* router_weight = nullptr;
  const void* router_logits = nullptr;
  const float* router_bias = nullptr;
  const float* expert_bias = nullptr;
  Matrix gate_up, down;                // [F, G*I, D], [F, D, I] with F = E - zero_experts
  Matrix shared_gate_up, shared_down;  // [1, G*J, D], [1, D, J]
  const void* shared_gate_weight = nullptr;
  const float* gate_up_bias = nullptr;         // [F, G*I]
  const float* down_bias = nullptr;            // [F, D]
  const float* shared_gate_up_bias = nullptr;  // [G*J]
  const float* shared_down_bias = nullptr;     // [D]
  // outputs; ids and weights may be null
  void* y = nullptr;
  int64_t* expert_ids = nullptr;
  float* expert_weights = nullptr;
};

// CPU. `parallel` runs fn(ctx, i) for i in [0, count), on as many threads as the caller likes.
using ParallelFor = void (*)(void* user, int64_t count, void (*fn)(void* ctx, int64_t i), void* ctx);

// Why the kernel does not take this call, or null. `reason` stays valid until the thread's next call.
const char* cpu_refusal(const Params& params);
size_t cpu_workspace_bytes(const Params& params);
// Returns null, or the reason of the failure (nothing was written then).
const char* cpu_forward(const Params& params, void* workspace, ParallelFor parallel, void* user);

// CUDA. A layer holds what one node keeps between calls: weights in the kernels' own order.
struct CudaLayer;

// The geometry and attributes decide; pointers may be null. `compute_capability`: 90 for 9.0.
const char* cuda_refusal(const Params& params, int compute_capability);
// Packs the weights that are given (device pointers in `params`, each matrix with its scales and zero points) into
// memory of the layer, queued on `stream` (a cudaStream_t). The caller may free its own once the stream has passed, and
// pass null data and scales in each call.
const char* cuda_create(const Params& params, void* stream, CudaLayer** layer);
// Packs the matrices that are given now, beside those that the layer has: so that a caller can free one matrix before
// it gives the next. cuda_forward refuses a layer that lacks one.
const char* cuda_pack(CudaLayer* layer, const Params& params, void* stream);
void cuda_destroy(CudaLayer* layer);
size_t cuda_layer_bytes(const Params& params);
size_t cuda_workspace_bytes(const CudaLayer* layer, const Params& params);
// Launches on `stream` and returns without waiting; no host synchronisation, safe to capture into a CUDA graph. Returns
// null, or the reason of the failure.
const char* cuda_forward(CudaLayer* layer, const Params& params, void* workspace, void* stream);

}  // namespace deltafuse::moe
