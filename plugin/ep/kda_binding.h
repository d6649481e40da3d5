// From a KimiDeltaAttention node to kda::Params: attributes, operands, and every check of spec.py on them.
// The same checks run when a graph is partitioned (some dimensions unknown) and at each call (all known).
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "../../custom_ops/kda/kda.h"
#include "attributes.h"
#include "operands.h"

namespace deltafuse::ep {

inline constexpr const char* kKdaOpType = "KimiDeltaAttention";
inline constexpr int kKdaVersion = 1;

// In the order of spec.INPUTS and spec.OUTPUTS.
enum KdaInput : size_t {
  kQ,
  kK,
  kV,
  kG,
  kBeta,
  kALog,
  kDtBias,
  kConvWeight,
  kConvBias,
  kConvState,
  kInitialState,
  kNormWeight,
  kGate,
  kCuSeqlens,
  kKdaInputs
};
enum KdaOutput : size_t { kO, kPresentConvState, kFinalState, kKdaOutputs };

struct KdaAttributes {
  int64_t num_heads = 0;
  int64_t num_v_heads = 0;
  int64_t head_dim = 0;
  int64_t head_v_dim = 0;
  float scale = 0.0f;
  std::string qk_l2norm = "none";
  float l2norm_eps = 1e-6f;
  std::string gate_activation = "none";
  float lower_bound = -5.0f;
  std::string beta_activation = "none";
  float beta_scale = 1.0f;
  std::string conv_activation = "none";
  std::string output_gate = "none";
  float norm_eps = 1e-5f;
  std::string state_layout = "KV";
  int64_t conv_state_width = 0;
};

struct KdaOperands {
  std::array<Operand, kKdaInputs> inputs;
  std::array<Operand, kKdaOutputs> outputs;  // only presence and type are looked at
};

const AttributeTypes& KdaAttributeTypes();

// Both return "" or the reason for a refusal, one sentence.
std::string ReadAttributes(const AttributeSource& source, KdaAttributes* attributes);
// Fills geometry, attributes and strides; batch and seq_len are 1 where unknown. The pointers stay null.
std::string BindGeometry(const KdaAttributes& attributes, const KdaOperands& operands, kda::Params* params);

// Shapes of the outputs for a bound call: o, present_conv_state, final_state.
std::array<Shape, kKdaOutputs> OutputShapes(const kda::Params& params);

}  // namespace deltafuse::ep
