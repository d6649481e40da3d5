// From a GroupedQMoE node to moe::Params: attributes, operands, and every check of spec.py on them.
// The same checks run when a graph is partitioned (some dimensions unknown) and at each call (all known).
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <string>

#include "../../custom_ops/moe/moe.h"
#include "attributes.h"
#include "operands.h"

namespace deltafuse::ep {

inline constexpr const char* kMoeOpType = "GroupedQMoE";
inline constexpr int kMoeVersion = 1;

// In the order of spec.INPUTS and spec.OUTPUTS. A matrix's scale and zero point follow its weight.
struct MoeInput {
  enum : size_t {
    kX,
    kRouterWeight,
    kRouterLogits,
    kRouterBias,
    kExpertBias,
    kGateUp,
    kDown = kGateUp + 3,
    kSharedGateUp = kDown + 3,
    kSharedDown = kSharedGateUp + 3,
    kSharedGateWeight = kSharedDown + 3,
    kGateUpBias,
    kDownBias,
    kSharedGateUpBias,
    kSharedDownBias,
    kCount
  };
};
struct MoeOutput {
  enum : size_t { kY, kExpertIds, kExpertWeights, kCount };
};
extern const std::array<const char*, MoeInput::kCount> kMoeInputNames;
extern const std::array<const char*, MoeOutput::kCount> kMoeOutputNames;

// Where each matrix's weight and bias are among the inputs, and both in the parameters.
struct MoeMatrix {
  size_t weight, bias;
  moe::Matrix moe::Params::* field;
  const float* moe::Params::* bias_field;
  bool shared;
};
extern const std::array<MoeMatrix, 4> kMoeMatrices;

struct MoeAttributes {
  int64_t num_experts = 0;
  int64_t top_k = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t shared_intermediate_size = 0;
  int64_t zero_experts = 0;
  std::string score_function = "sigmoid";
  int64_t choose_by_logits = 0;
  int64_t n_group = 1;
  int64_t topk_group = 1;
  int64_t group_top = 2;
  std::string masked_score = "-inf";
  int64_t masked_weights = 0;
  int64_t norm_topk_prob = 1;
  float norm_eps = 0.0f;
  float norm_min = 0.0f;
  float routed_scaling_factor = 1.0f;
  std::string activation = "silu";
  float activation_alpha = 1.0f;
  int64_t gated = 1;
  float up_offset = 0.0f;
  std::string clamp = "none";
  float gate_limit = std::numeric_limits<float>::infinity();
  float up_limit = std::numeric_limits<float>::infinity();
  int64_t block_size = 0;
  int64_t block_rows = 1;
  int64_t shared_block_size = 0;
  int64_t shared_block_rows = 1;
  std::string weight_format = "float";
  std::string shared_format = "float";
};

struct MoeOperands {
  std::array<Operand, MoeInput::kCount> inputs;
  std::array<Operand, MoeOutput::kCount> outputs;  // only presence and type are looked at
};

const AttributeTypes& MoeAttributeTypes();

// Both return "" or the reason for a refusal, one sentence.
std::string ReadAttributes(const AttributeSource& source, MoeAttributes* attributes);
// Fills geometry, attributes and forms; num_tokens is 1 where it is unknown. The pointers stay null.
std::string BindGeometry(const MoeAttributes& attributes, const MoeOperands& operands, moe::Params* params);

void BindInputs(const std::array<const void*, MoeInput::kCount>& data, moe::Params* params);

// Shapes and types of the outputs for a bound call.
std::array<Shape, MoeOutput::kCount> OutputShapes(const moe::Params& params, const Operand& x);
std::array<ONNXTensorElementDataType, MoeOutput::kCount> OutputTypes(const Operand& x);

}  // namespace deltafuse::ep
