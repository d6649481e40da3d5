// From a LatentAttention node to mla::Params: attributes, operands, and every check of spec.py on them.
// The same checks run when a graph is partitioned (some dimensions unknown) and at each call (all known).
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "../../custom_ops/mla/mla.h"
#include "attributes.h"
#include "operands.h"

namespace deltafuse::ep {

inline constexpr const char* kMlaOpType = "LatentAttention";
inline constexpr int kMlaVersion = 1;

// In the order of spec.INPUTS and spec.OUTPUTS.
struct MlaInput {
  enum : size_t {
    kQ,
    kLatent,
    kKRope,
    kKvBWeight,
    kKvNormWeight,
    kCos,
    kSin,
    kPositionIds,
    kQScale,
    kPastLatent,
    kPastKRope,
    kPastLatentScale,
    kPastKey,
    kPastValue,
    kCacheLengths,
    kBlockTable,
    kAttnMask,
    kGate,
    kCount
  };
};
struct MlaOutput {
  enum : size_t { kO, kPresentLatent, kPresentKRope, kPresentLatentScale, kPresentKey, kPresentValue, kCount };
};
extern const std::array<const char*, MlaInput::kCount> kMlaInputNames;
extern const std::array<const char*, MlaOutput::kCount> kMlaOutputNames;

struct MlaAttributes {
  int64_t num_heads = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
  int64_t kv_lora_rank = 0;
  float scale = 1.0f;
  std::string rope = "none";
  int64_t causal = 1;
  int64_t window = 0;
  std::string gate_activation = "none";
  float kv_norm_eps = 1e-6f;
  std::string cache = "none";
  std::string cache_type = "same";
};

struct MlaOperands {
  std::array<Operand, MlaInput::kCount> inputs;
  std::array<Operand, MlaOutput::kCount> outputs;  // only presence and type are looked at
};

const AttributeTypes& MlaAttributeTypes();

// Both return "" or the reason for a refusal, one sentence.
std::string ReadAttributes(const AttributeSource& source, MlaAttributes* attributes);
// Fills geometry, attributes and strides; sizes that are unknown are 1. The pointers stay null.
std::string BindGeometry(const MlaAttributes& attributes, const MlaOperands& operands, mla::Params* params);

// The pointers of the inputs, and those strides that depend on them.
void BindInputs(const std::array<const void*, MlaInput::kCount>& data, mla::Params* params);
void BindOutputs(const std::array<void*, MlaOutput::kCount>& data, mla::Params* params);
// Both, before there are data: which operands there are decides how large the workspace is. Nothing may be read from or
// written to them.
void BindStandIns(const MlaOperands& operands, mla::Params* params);

// Shapes and types of the outputs for a bound call.
std::array<Shape, MlaOutput::kCount> OutputShapes(const mla::Params& params);
std::array<ONNXTensorElementDataType, MlaOutput::kCount> OutputTypes(const mla::Params& params);

}  // namespace deltafuse::ep
