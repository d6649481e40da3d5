#include "kda_binding.h"

#include <cmath>
#include <initializer_list>

namespace deltafuse::ep {
namespace {

constexpr int kMaxConvWidth = 8;  // spec.MAX_CONV_WIDTH
constexpr std::array<const char*, kKdaInputs> kInputNames = {
    "q",       "k",           "v",         "g",          "beta",          "A_log",
    "dt_bias", "conv_weight", "conv_bias", "conv_state", "initial_state", "norm_weight",
    "gate",    "cu_seqlens"};

std::string CheckShape(KdaInput which, const Operand& operand, std::initializer_list<int64_t> expected) {
  return CheckShape(kInputNames[which], operand, expected);
}

std::string CheckType(KdaInput which, const Operand& operand, ONNXTensorElementDataType expected) {
  return CheckType(kInputNames[which], operand, expected);
}

// Merges what two operands say of one dimension; the first that knows it decides.
int64_t FirstKnown(const KdaOperands& operands, std::initializer_list<KdaInput> inputs, size_t axis) {
  for (const KdaInput input : inputs) {
    const Operand& operand = operands.inputs[input];
    if (operand.present && operand.rank > static_cast<int64_t>(axis) && operand.dims[axis] != kUnknown)
      return operand.dims[axis];
  }
  return kUnknown;
}

}  // namespace

const AttributeTypes& KdaAttributeTypes() {
  static const AttributeTypes types = {{"num_heads", ORT_OP_ATTR_INT},       {"num_v_heads", ORT_OP_ATTR_INT},
                                       {"head_dim", ORT_OP_ATTR_INT},        {"head_v_dim", ORT_OP_ATTR_INT},
                                       {"scale", ORT_OP_ATTR_FLOAT},         {"qk_l2norm", ORT_OP_ATTR_STRING},
                                       {"l2norm_eps", ORT_OP_ATTR_FLOAT},    {"gate_activation", ORT_OP_ATTR_STRING},
                                       {"lower_bound", ORT_OP_ATTR_FLOAT},   {"beta_activation", ORT_OP_ATTR_STRING},
                                       {"beta_scale", ORT_OP_ATTR_FLOAT},    {"conv_activation", ORT_OP_ATTR_STRING},
                                       {"output_gate", ORT_OP_ATTR_STRING},  {"norm_eps", ORT_OP_ATTR_FLOAT},
                                       {"state_layout", ORT_OP_ATTR_STRING}, {"conv_state_width", ORT_OP_ATTR_INT},
                                       {"state_dtype", ORT_OP_ATTR_INT}};
  return types;
}

std::string ReadAttributes(const AttributeSource& source, KdaAttributes* a) {
  const std::initializer_list<Choice<int64_t*>> geometry = {{"num_heads", &a->num_heads},
                                                            {"num_v_heads", &a->num_v_heads},
                                                            {"head_dim", &a->head_dim},
                                                            {"head_v_dim", &a->head_v_dim}};
  for (const auto& [name, value] : geometry) {
    DF_REFUSE_IF(!source.Int(name, value), "attribute ", name, " is missing");
    DF_REFUSE_IF(*value < 1 || *value > 65536, name, " ", *value, ": expected 1 to 65536");
  }
  DF_REFUSE_IF(!source.Float("scale", &a->scale), "attribute scale is missing");
  source.String("qk_l2norm", &a->qk_l2norm);
  source.Float("l2norm_eps", &a->l2norm_eps);
  source.String("gate_activation", &a->gate_activation);
  source.Float("lower_bound", &a->lower_bound);
  source.String("beta_activation", &a->beta_activation);
  source.Float("beta_scale", &a->beta_scale);
  source.String("conv_activation", &a->conv_activation);
  source.String("output_gate", &a->output_gate);
  source.Float("norm_eps", &a->norm_eps);
  source.String("state_layout", &a->state_layout);
  source.Int("conv_state_width", &a->conv_state_width);

  DF_REFUSE_IF(a->num_v_heads % a->num_heads, "num_v_heads ", a->num_v_heads, " is not a multiple of num_heads ",
               a->num_heads);
  DF_REFUSE_IF(!std::isfinite(a->scale), "scale is not finite");
  DF_REFUSE_IF(a->gate_activation == "sigmoid" && !(a->lower_bound < 0), "lower_bound ", a->lower_bound,
               ": the log decay must be negative");
  return "";
}

std::string BindGeometry(const KdaAttributes& a, const KdaOperands& operands, kda::Params* p) {
  const auto& in = operands.inputs;
  const int64_t heads = a.num_heads, v_heads = a.num_v_heads, key = a.head_dim, value = a.head_v_dim;
  const int64_t channels = 2 * heads * key + v_heads * value;

  // attributes
  p->num_heads = static_cast<int32_t>(heads);
  p->num_v_heads = static_cast<int32_t>(v_heads);
  p->head_dim = static_cast<int32_t>(key);
  p->head_v_dim = static_cast<int32_t>(value);
  p->scale = a.scale;
  p->l2norm_eps = a.l2norm_eps;
  p->lower_bound = a.lower_bound;
  p->beta_scale = a.beta_scale;
  p->norm_eps = a.norm_eps;
  DF_TRY(Choose("qk_l2norm", a.qk_l2norm,
                {{"none", kda::L2Norm::kNone}, {"sum", kda::L2Norm::kSum}, {"max", kda::L2Norm::kMax}}, &p->qk_l2norm));
  DF_TRY(Choose("gate_activation", a.gate_activation,
                {{"none", kda::GateActivation::kNone},
                 {"softplus", kda::GateActivation::kSoftplus},
                 {"sigmoid", kda::GateActivation::kSigmoid}},
                &p->gate_activation));
  DF_TRY(Choose("beta_activation", a.beta_activation, {{"none", 0}, {"sigmoid", 1}}, &p->beta_sigmoid));
  DF_TRY(Choose("conv_activation", a.conv_activation, {{"none", 0}, {"silu", 1}}, &p->conv_silu));
  DF_TRY(Choose(
      "output_gate", a.output_gate,
      {{"none", kda::OutputGate::kNone}, {"sigmoid", kda::OutputGate::kSigmoid}, {"silu", kda::OutputGate::kSilu}},
      &p->output_gate));
  DF_TRY(Choose("state_layout", a.state_layout, {{"KV", 0}, {"VK", 1}}, &p->state_v_first));

  // which operands there are
  for (const KdaInput required : {kQ, kG, kBeta})
    DF_REFUSE_IF(!in[required].present, "input ", kInputNames[required], " is missing");
  DF_REFUSE_IF(!operands.outputs[kO].present, "output o is missing");
  DF_REFUSE_IF(in[kK].present != in[kV].present, "k and v must both be there, or both be absent (q packed)");
  const bool packed = !in[kK].present;
  const bool conv = in[kConvWeight].present;
  const bool present_conv = operands.outputs[kPresentConvState].present;
  DF_REFUSE_IF(in[kALog].present != (a.gate_activation != "none"), "A_log ",
               in[kALog].present ? "without a gate_activation" : "is missing for the gate_activation");
  DF_REFUSE_IF(in[kGate].present != (a.output_gate != "none"), "gate ",
               in[kGate].present ? "without an output_gate" : "is missing for the output_gate");
  DF_REFUSE_IF(
      !conv && (in[kConvBias].present || in[kConvState].present || present_conv || a.conv_activation != "none"),
      "conv_bias, conv_state or conv_activation without a conv_weight");
  DF_REFUSE_IF((in[kConvState].present || present_conv) && a.conv_state_width < 1,
               "conv_state or present_conv_state without conv_state_width");

  // element types
  const ONNXTensorElementDataType type = in[kQ].type;
  DF_REFUSE_IF(!ToDType(type, &p->dtype), "q is ", TypeName(type), ": expected float32, float16 or bfloat16");
  for (const KdaInput input : {kK, kV, kG, kBeta, kConvState, kGate})
    if (in[input].present) DF_TRY(CheckType(input, in[input], type));
  for (const KdaInput input : {kALog, kDtBias, kConvWeight, kConvBias, kNormWeight})
    if (in[input].present) DF_TRY(CheckType(input, in[input], ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT));
  const Operand& final_state = operands.outputs[kFinalState];
  if (in[kInitialState].present) {
    DF_REFUSE_IF(!ToDType(in[kInitialState].type, &p->state_dtype), "initial_state is ",
                 TypeName(in[kInitialState].type), ": expected float32, float16 or bfloat16");
    DF_REFUSE_IF(final_state.present && final_state.type != in[kInitialState].type, "final_state is ",
                 TypeName(final_state.type), " and initial_state ", TypeName(in[kInitialState].type),
                 ": expected the same");
  } else if (final_state.present) {
    DF_REFUSE_IF(!ToDType(final_state.type, &p->state_dtype), "final_state is ", TypeName(final_state.type),
                 ": expected float32, float16 or bfloat16");
  }
  if (in[kCuSeqlens].present) {
    const ONNXTensorElementDataType lengths = in[kCuSeqlens].type;
    DF_REFUSE_IF(lengths != ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 && lengths != ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
                 "cu_seqlens is ", TypeName(lengths), ": expected int32 or int64");
    p->cu_seqlens_int64 = lengths == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  }

  // shapes
  const std::initializer_list<KdaInput> token_rows = {kQ, kK, kV, kG, kBeta, kGate};
  const int64_t batch = in[kCuSeqlens].present ? 1 : FirstKnown(operands, token_rows, 0);
  const int64_t tokens = FirstKnown(operands, token_rows, 1);
  const std::array<int64_t, kKdaInputs> widths = {packed ? channels : heads * key,
                                                  heads * key,
                                                  v_heads * value,
                                                  v_heads * key,
                                                  v_heads,
                                                  0,
                                                  0,
                                                  0,
                                                  0,
                                                  0,
                                                  0,
                                                  0,
                                                  v_heads * value,
                                                  0};
  for (const KdaInput input : token_rows)
    if (in[input].present) DF_TRY(CheckShape(input, in[input], {batch, tokens, widths[input]}));
  int64_t sequences = batch;
  if (in[kCuSeqlens].present) {
    DF_TRY(CheckShape(kCuSeqlens, in[kCuSeqlens], {kUnknown}));
    const int64_t entries = FirstKnown(operands, {kCuSeqlens}, 0);
    DF_REFUSE_IF(entries == 0, "cu_seqlens is empty: expected N+1 prefix sums");
    sequences = entries == kUnknown ? FirstKnown(operands, {kInitialState, kConvState}, 0) : entries - 1;
  }
  if (in[kALog].present) DF_TRY(CheckShape(kALog, in[kALog], {v_heads}));
  if (in[kDtBias].present) DF_TRY(CheckShape(kDtBias, in[kDtBias], {v_heads * key}));
  if (in[kNormWeight].present) DF_TRY(CheckShape(kNormWeight, in[kNormWeight], {value}));
  if (conv) {
    DF_TRY(CheckShape(kConvWeight, in[kConvWeight], {channels, 1, kUnknown}));
    const int64_t width = FirstKnown(operands, {kConvWeight}, 2);
    DF_REFUSE_IF(width == kUnknown, "the shape of conv_weight is not known when the graph is partitioned");
    DF_REFUSE_IF(width < 1 || width > kMaxConvWidth, "conv_weight has width ", width, ": expected 1 to ",
                 kMaxConvWidth);
    DF_REFUSE_IF(a.conv_state_width != 0 && a.conv_state_width != width - 1 && a.conv_state_width != width,
                 "conv_state_width ", a.conv_state_width, ": expected ", width - 1, " or ", width);
    p->conv_width = static_cast<int32_t>(width);
    p->conv_state_width = static_cast<int32_t>(a.conv_state_width);
    if (in[kConvBias].present) DF_TRY(CheckShape(kConvBias, in[kConvBias], {channels}));
    if (in[kConvState].present)
      DF_TRY(CheckShape(kConvState, in[kConvState], {sequences, channels, a.conv_state_width}));
  }
  if (in[kInitialState].present) {
    const bool v_first = p->state_v_first != 0;
    DF_TRY(CheckShape(kInitialState, in[kInitialState],
                      {sequences, v_heads, v_first ? value : key, v_first ? key : value}));
  }

  p->batch = batch == kUnknown ? 1 : batch;
  p->seq_len = tokens == kUnknown ? 1 : tokens;
  p->num_seqs = sequences == kUnknown ? 1 : sequences;
  p->q_row_stride = packed ? channels : heads * key;
  p->k_row_stride = packed ? channels : heads * key;
  p->v_row_stride = packed ? channels : v_heads * value;
  return "";
}

std::array<Shape, kKdaOutputs> OutputShapes(const kda::Params& p) {
  const int64_t channels = 2 * int64_t{p.num_heads} * p.head_dim + int64_t{p.num_v_heads} * p.head_v_dim;
  const bool v_first = p.state_v_first != 0;
  std::array<Shape, kKdaOutputs> shapes;
  shapes[kO] = {{p.batch, p.seq_len, int64_t{p.num_v_heads} * p.head_v_dim}, 3};
  shapes[kPresentConvState] = {{p.num_seqs, channels, p.conv_state_width}, 3};
  shapes[kFinalState] = {
      {p.num_seqs, p.num_v_heads, v_first ? p.head_v_dim : p.head_dim, v_first ? p.head_dim : p.head_v_dim}, 4};
  return shapes;
}

}  // namespace deltafuse::ep
