#include "moe_binding.h"

#include <cmath>
#include <initializer_list>

namespace deltafuse::ep {

using In = MoeInput;

const std::array<const char*, In::kCount> kMoeInputNames = {"x",
                                                            "router_weight",
                                                            "router_logits",
                                                            "router_bias",
                                                            "expert_bias",
                                                            "gate_up_weight",
                                                            "gate_up_scale",
                                                            "gate_up_zero_point",
                                                            "down_weight",
                                                            "down_scale",
                                                            "down_zero_point",
                                                            "shared_gate_up_weight",
                                                            "shared_gate_up_scale",
                                                            "shared_gate_up_zero_point",
                                                            "shared_down_weight",
                                                            "shared_down_scale",
                                                            "shared_down_zero_point",
                                                            "shared_gate_weight",
                                                            "gate_up_bias",
                                                            "down_bias",
                                                            "shared_gate_up_bias",
                                                            "shared_down_bias"};
const std::array<const char*, MoeOutput::kCount> kMoeOutputNames = {"y", "expert_ids", "expert_weights"};
const std::array<MoeMatrix, 4> kMoeMatrices = {
    {{In::kGateUp, In::kGateUpBias, &moe::Params::gate_up, &moe::Params::gate_up_bias, false},
     {In::kDown, In::kDownBias, &moe::Params::down, &moe::Params::down_bias, false},
     {In::kSharedGateUp, In::kSharedGateUpBias, &moe::Params::shared_gate_up, &moe::Params::shared_gate_up_bias, true},
     {In::kSharedDown, In::kSharedDownBias, &moe::Params::shared_down, &moe::Params::shared_down_bias, true}}};

namespace {

constexpr ONNXTensorElementDataType kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;

// Name, field, least, most: of the integer attributes.
struct IntAttribute {
  const char* name;
  int64_t MoeAttributes::* field;
  int64_t least, most;
  bool required;
};
constexpr int64_t kMost = 1 << 20;
const std::initializer_list<IntAttribute>& IntAttributes() {
  static const std::initializer_list<IntAttribute> all = {
      {"num_experts", &MoeAttributes::num_experts, 1, 65536, true},
      {"top_k", &MoeAttributes::top_k, 1, 65536, true},
      {"hidden_size", &MoeAttributes::hidden_size, 1, kMost, true},
      {"intermediate_size", &MoeAttributes::intermediate_size, 1, kMost, true},
      {"shared_intermediate_size", &MoeAttributes::shared_intermediate_size, 0, kMost, false},
      {"zero_experts", &MoeAttributes::zero_experts, 0, 65535, false},
      {"choose_by_logits", &MoeAttributes::choose_by_logits, 0, 1, false},
      {"n_group", &MoeAttributes::n_group, 1, 65536, false},
      {"topk_group", &MoeAttributes::topk_group, 1, 65536, false},
      {"group_top", &MoeAttributes::group_top, 1, 65536, false},
      {"masked_weights", &MoeAttributes::masked_weights, 0, 1, false},
      {"norm_topk_prob", &MoeAttributes::norm_topk_prob, 0, 1, false},
      {"gated", &MoeAttributes::gated, 0, 1, false},
      {"block_size", &MoeAttributes::block_size, 0, kMost, false},
      {"block_rows", &MoeAttributes::block_rows, 1, kMost, false},
      {"shared_block_size", &MoeAttributes::shared_block_size, 0, kMost, false},
      {"shared_block_rows", &MoeAttributes::shared_block_rows, 1, kMost, false}};
  return all;
}
const std::initializer_list<Choice<float MoeAttributes::*>>& FloatAttributes() {
  static const std::initializer_list<Choice<float MoeAttributes::*>> all = {
      {"norm_eps", &MoeAttributes::norm_eps},
      {"norm_min", &MoeAttributes::norm_min},
      {"routed_scaling_factor", &MoeAttributes::routed_scaling_factor},
      {"activation_alpha", &MoeAttributes::activation_alpha},
      {"up_offset", &MoeAttributes::up_offset},
      {"gate_limit", &MoeAttributes::gate_limit},
      {"up_limit", &MoeAttributes::up_limit}};
  return all;
}
const std::initializer_list<Choice<std::string MoeAttributes::*>>& StringAttributes() {
  static const std::initializer_list<Choice<std::string MoeAttributes::*>> all = {
      {"score_function", &MoeAttributes::score_function}, {"masked_score", &MoeAttributes::masked_score},
      {"activation", &MoeAttributes::activation},         {"clamp", &MoeAttributes::clamp},
      {"weight_format", &MoeAttributes::weight_format},   {"shared_format", &MoeAttributes::shared_format}};
  return all;
}

bool Plain(moe::Format format) { return format == moe::Format::kFloat || format == moe::Format::kBFloat16; }
bool FourBit(moe::Format format) { return format == moe::Format::kInt4 || format == moe::Format::kUInt4; }

// The type that weights of a format have; T for plain ones.
ONNXTensorElementDataType StoredType(moe::Format format, ONNXTensorElementDataType type) {
  switch (format) {
    case moe::Format::kFloat:
      return type;
    case moe::Format::kBFloat16:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
    case moe::Format::kInt8:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
    default:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  }
}

std::string CheckOperand(size_t which, const MoeOperands& operands, ONNXTensorElementDataType type,
                         std::initializer_list<int64_t> shape) {
  const Operand& operand = operands.inputs[which];
  DF_TRY(CheckType(kMoeInputNames[which], operand, type));
  return CheckShape(kMoeInputNames[which], operand, shape);
}

// float32 or T: which of them into `is_float32`.
std::string CheckEither(size_t which, const MoeOperands& operands, ONNXTensorElementDataType type,
                        int32_t* is_float32) {
  const ONNXTensorElementDataType found = operands.inputs[which].type;
  DF_REFUSE_IF(found != kFloat && found != type, kMoeInputNames[which], " is ", TypeName(found),
               ": expected float32 or ", TypeName(type));
  *is_float32 = found == kFloat;
  return "";
}

// One matrix [rows, cols], of each expert where `experts` is not 0.
std::string BindMatrix(const MoeMatrix& where, const MoeOperands& operands, ONNXTensorElementDataType type,
                       int64_t experts, int64_t rows, int64_t cols, moe::Matrix* m) {
  const size_t weight = where.weight, scale = weight + 1, zero = weight + 2;
  const auto& in = operands.inputs;
  const char* name = kMoeInputNames[weight];
  DF_REFUSE_IF(!in[weight].present, "input ", name, " is missing");
  DF_REFUSE_IF(in[scale].present == Plain(m->format), kMoeInputNames[scale],
               Plain(m->format) ? " with weights that are not quantized" : " is missing");
  DF_REFUSE_IF(in[zero].present && (Plain(m->format) || m->format == moe::Format::kFloat8), kMoeInputNames[zero],
               " with weights of a format that has none");
  DF_REFUSE_IF(FourBit(m->format) && (cols % 2 || m->block_size % 2), name, " has rows of ", cols, " in blocks of ",
               m->block_size, ": 4-bit weights need even numbers");
  m->has_zero_point = in[zero].present;
  const int64_t stored = FourBit(m->format) ? cols / 2 : cols;
  const int64_t numbers = (rows + m->block_rows - 1) / m->block_rows;
  const int64_t blocks = m->block_size > 0 ? (cols + m->block_size - 1) / m->block_size : 1;
  const auto check = [&](size_t which, ONNXTensorElementDataType wanted, int64_t r, int64_t c) {
    return experts ? CheckOperand(which, operands, wanted, {experts, r, c})
                   : CheckOperand(which, operands, wanted, {r, c});
  };
  DF_TRY(check(weight, StoredType(m->format, type), rows, stored));
  if (Plain(m->format)) return "";
  DF_TRY(CheckEither(scale, operands, type, &m->scale_float32));
  DF_TRY(check(scale, in[scale].type, numbers, blocks));
  if (!in[zero].present) return "";
  const bool is_signed = m->format == moe::Format::kInt4 || m->format == moe::Format::kInt8;
  return check(zero, is_signed ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, numbers,
               blocks);
}

std::string ChooseFormat(const char* attribute, const std::string& text, moe::Format* format) {
  return Choose(attribute, text,
                {{"float", moe::Format::kFloat},
                 {"int4", moe::Format::kInt4},
                 {"uint4", moe::Format::kUInt4},
                 {"int8", moe::Format::kInt8},
                 {"uint8", moe::Format::kUInt8},
                 {"float8", moe::Format::kFloat8},
                 {"bfloat16", moe::Format::kBFloat16}},
                format);
}

std::string CheckBlocks(const char* prefix, moe::Format format, int64_t block_size, int64_t block_rows) {
  DF_REFUSE_IF(Plain(format) && (block_size || block_rows != 1), prefix, "block_size ", block_size,
               ": the weights are not quantized");
  DF_REFUSE_IF(block_rows != 1 && format != moe::Format::kFloat8, prefix, "block_rows ", block_rows,
               ": only float8 weights share scales between rows");
  return "";
}

// The number of tokens, or kUnknown.
int64_t TokensOf(const Operand& operand) {
  if (operand.rank == kUnknown) return kUnknown;
  int64_t count = 1;
  for (int64_t axis = 0; axis + 1 < operand.rank; ++axis) {
    if (operand.dims[axis] == kUnknown) return kUnknown;
    count *= operand.dims[axis];
  }
  return count;
}

std::string CheckRows(size_t which, const Operand& operand, int64_t width) {
  const char* name = kMoeInputNames[which];
  if (operand.rank == 2) return CheckShape(name, operand, {kUnknown, width});
  return CheckShape(name, operand, {kUnknown, kUnknown, width});
}

}  // namespace

const AttributeTypes& MoeAttributeTypes() {
  static const AttributeTypes types = [] {
    AttributeTypes all;
    for (const IntAttribute& a : IntAttributes()) all[a.name] = ORT_OP_ATTR_INT;
    for (const auto& a : FloatAttributes()) all[a.name] = ORT_OP_ATTR_FLOAT;
    for (const auto& a : StringAttributes()) all[a.name] = ORT_OP_ATTR_STRING;
    return all;
  }();
  return types;
}

std::string ReadAttributes(const AttributeSource& source, MoeAttributes* a) {
  for (const IntAttribute& wanted : IntAttributes()) {
    int64_t& value = a->*wanted.field;
    DF_REFUSE_IF(!source.Int(wanted.name, &value) && wanted.required, "attribute ", wanted.name, " is missing");
    DF_REFUSE_IF(value < wanted.least || value > wanted.most, wanted.name, " ", value, ": expected ", wanted.least,
                 " to ", wanted.most);
  }
  for (const auto& [name, field] : FloatAttributes()) source.Float(name, &(a->*field));
  for (const auto& [name, field] : StringAttributes()) source.String(name, &(a->*field));

  DF_REFUSE_IF(a->zero_experts >= a->num_experts, "zero_experts ", a->zero_experts, " of num_experts ", a->num_experts);
  DF_REFUSE_IF(a->top_k > a->num_experts, "top_k ", a->top_k, " of num_experts ", a->num_experts);
  DF_REFUSE_IF(a->num_experts % a->n_group || a->topk_group > a->n_group, "num_experts ", a->num_experts, ", n_group ",
               a->n_group, ", topk_group ", a->topk_group);
  DF_REFUSE_IF(a->group_top > a->num_experts / a->n_group, "group_top ", a->group_top, " of ",
               a->num_experts / a->n_group, " experts a group");
  for (const float number : {a->norm_eps, a->norm_min, a->routed_scaling_factor, a->activation_alpha, a->up_offset})
    DF_REFUSE_IF(!std::isfinite(number),
                 "norm_eps, norm_min, routed_scaling_factor, activation_alpha or up_offset is not finite");
  DF_REFUSE_IF(a->norm_min < 0, "norm_min ", a->norm_min);
  DF_REFUSE_IF(a->activation != "silu" && a->activation_alpha != 1.0f, "activation_alpha ", a->activation_alpha,
               " with activation ", a->activation);
  DF_REFUSE_IF(!a->gated && a->up_offset != 0.0f, "up_offset ", a->up_offset, " with gated 0");
  DF_REFUSE_IF(a->clamp != "none" && !(a->gated && a->gate_limit > 0 && a->up_limit > 0), "gate_limit ", a->gate_limit,
               ", up_limit ", a->up_limit, ", gated ", a->gated);
  return "";
}

std::string BindGeometry(const MoeAttributes& a, const MoeOperands& operands, moe::Params* p) {
  const auto& in = operands.inputs;
  const auto set = [](int32_t* to, int64_t value) { *to = static_cast<int32_t>(value); };

  // attributes
  set(&p->num_experts, a.num_experts);
  set(&p->top_k, a.top_k);
  set(&p->hidden_size, a.hidden_size);
  set(&p->intermediate_size, a.intermediate_size);
  set(&p->shared_intermediate_size, a.shared_intermediate_size);
  set(&p->zero_experts, a.zero_experts);
  set(&p->choose_by_logits, a.choose_by_logits);
  set(&p->n_group, a.n_group);
  set(&p->topk_group, a.topk_group);
  set(&p->group_top, a.group_top);
  set(&p->masked_weights, a.masked_weights);
  set(&p->norm_topk_prob, a.norm_topk_prob);
  set(&p->gated, a.gated);
  p->norm_eps = a.norm_eps;
  p->norm_min = a.norm_min;
  p->activation_alpha = a.activation_alpha;
  p->up_offset = a.up_offset;
  p->routed_scaling_factor = a.routed_scaling_factor;
  p->gate_limit = a.gate_limit;
  p->up_limit = a.up_limit;
  DF_TRY(Choose("score_function", a.score_function,
                {{"sigmoid", moe::Score::kSigmoid}, {"softmax", moe::Score::kSoftmax}}, &p->score));
  DF_TRY(Choose("masked_score", a.masked_score, {{"-inf", 0}, {"0", 1}}, &p->masked_score_zero));
  DF_TRY(Choose("activation", a.activation,
                {{"silu", moe::Activation::kSilu},
                 {"gelu", moe::Activation::kGelu},
                 {"gelu_tanh", moe::Activation::kGeluTanh},
                 {"relu2", moe::Activation::kRelu2}},
                &p->activation));
  DF_TRY(Choose("clamp", a.clamp,
                {{"none", moe::Clamp::kNone}, {"before", moe::Clamp::kBefore}, {"after", moe::Clamp::kAfter}},
                &p->clamp));
  moe::Format routed = moe::Format::kFloat, shared = moe::Format::kFloat;
  DF_TRY(ChooseFormat("weight_format", a.weight_format, &routed));
  DF_TRY(ChooseFormat("shared_format", a.shared_format, &shared));
  DF_TRY(CheckBlocks("", routed, a.block_size, a.block_rows));
  DF_TRY(CheckBlocks("shared_", shared, a.shared_block_size, a.shared_block_rows));
  for (const MoeMatrix& matrix : kMoeMatrices) {
    moe::Matrix& m = p->*matrix.field;
    m.format = matrix.shared ? shared : routed;
    set(&m.block_size, matrix.shared ? a.shared_block_size : a.block_size);
    set(&m.block_rows, matrix.shared ? a.shared_block_rows : a.block_rows);
  }

  // operands
  DF_REFUSE_IF(!in[In::kX].present, "input x is missing");
  DF_REFUSE_IF(in[In::kRouterWeight].present == in[In::kRouterLogits].present,
               "one of router_weight and router_logits must be there");
  const ONNXTensorElementDataType type = in[In::kX].type;
  DF_REFUSE_IF(!ToDType(type, &p->dtype), "x is ", TypeName(type), ": expected float32, float16 or bfloat16");
  DF_TRY(CheckRows(In::kX, in[In::kX], a.hidden_size));
  if (in[In::kRouterWeight].present) {
    DF_TRY(CheckEither(In::kRouterWeight, operands, type, &p->router_weight_float32));
    DF_TRY(CheckShape(kMoeInputNames[In::kRouterWeight], in[In::kRouterWeight], {a.num_experts, a.hidden_size}));
  } else {
    DF_TRY(CheckEither(In::kRouterLogits, operands, type, &p->router_logits_float32));
    DF_TRY(CheckRows(In::kRouterLogits, in[In::kRouterLogits], a.num_experts));
  }
  for (const size_t bias : {size_t{In::kRouterBias}, size_t{In::kExpertBias}})
    if (in[bias].present) DF_TRY(CheckOperand(bias, operands, kFloat, {a.num_experts}));
  const int64_t joined = a.gated ? 2 : 1, own = a.num_experts - a.zero_experts;
  p->has_bias = 0;
  for (const MoeMatrix& matrix : kMoeMatrices) {
    if (matrix.shared && a.shared_intermediate_size == 0) {
      for (size_t i = 0; i < 3; ++i)
        DF_REFUSE_IF(in[matrix.weight + i].present, kMoeInputNames[matrix.weight + i],
                     " without a shared_intermediate_size");
      DF_REFUSE_IF(in[matrix.bias].present, kMoeInputNames[matrix.bias], " without a shared_intermediate_size");
      continue;
    }
    const bool down = matrix.weight == In::kDown || matrix.weight == In::kSharedDown;
    const int64_t inter = matrix.shared ? a.shared_intermediate_size : a.intermediate_size;
    const int64_t rows = down ? a.hidden_size : joined * inter;
    DF_TRY(BindMatrix(matrix, operands, type, matrix.shared ? 0 : own, rows, down ? inter : a.hidden_size,
                      &(p->*matrix.field)));
    if (!in[matrix.bias].present) continue;
    p->has_bias = 1;
    if (matrix.shared) {
      DF_TRY(CheckOperand(matrix.bias, operands, kFloat, {rows}));
    } else {
      DF_TRY(CheckOperand(matrix.bias, operands, kFloat, {own, rows}));
    }
  }
  if (in[In::kSharedGateWeight].present) {
    DF_REFUSE_IF(a.shared_intermediate_size == 0, "shared_gate_weight without a shared_intermediate_size");
    DF_TRY(CheckEither(In::kSharedGateWeight, operands, type, &p->shared_gate_float32));
    DF_TRY(CheckShape(kMoeInputNames[In::kSharedGateWeight], in[In::kSharedGateWeight], {1, a.hidden_size}));
  }

  const int64_t tokens = TokensOf(in[In::kX]);
  if (in[In::kRouterLogits].present) {
    const int64_t rows = TokensOf(in[In::kRouterLogits]);
    DF_REFUSE_IF(tokens != kUnknown && rows != kUnknown && tokens != rows, "router_logits has ", rows,
                 " tokens and x has ", tokens);
  }
  p->num_tokens = tokens == kUnknown ? 1 : tokens;
  return "";
}

void BindInputs(const std::array<const void*, In::kCount>& data, moe::Params* p) {
  p->x = data[In::kX];
  p->router_weight = data[In::kRouterWeight];
  p->router_logits = data[In::kRouterLogits];
  p->router_bias = static_cast<const float*>(data[In::kRouterBias]);
  p->expert_bias = static_cast<const float*>(data[In::kExpertBias]);
  for (const MoeMatrix& matrix : kMoeMatrices) {
    moe::Matrix& m = p->*matrix.field;
    m.data = data[matrix.weight];
    m.scale = data[matrix.weight + 1];
    m.zero_point = data[matrix.weight + 2];
    p->*matrix.bias_field = static_cast<const float*>(data[matrix.bias]);
  }
  p->shared_gate_weight = data[In::kSharedGateWeight];
}

std::array<Shape, MoeOutput::kCount> OutputShapes(const moe::Params& p, const Operand& x) {
  std::array<Shape, MoeOutput::kCount> shapes;
  shapes[MoeOutput::kY] = {x.dims, static_cast<size_t>(x.rank)};
  shapes[MoeOutput::kExpertIds] = {{p.num_tokens, p.top_k}, 2};
  shapes[MoeOutput::kExpertWeights] = {{p.num_tokens, p.top_k}, 2};
  return shapes;
}

std::array<ONNXTensorElementDataType, MoeOutput::kCount> OutputTypes(const Operand& x) {
  return {x.type, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, kFloat};
}

}  // namespace deltafuse::ep
