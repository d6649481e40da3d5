#include "mla_binding.h"

#include <cmath>
#include <initializer_list>
#include <limits>

namespace deltafuse::ep {

using In = MlaInput;
using Out = MlaOutput;

const std::array<const char*, MlaInput::kCount> kMlaInputNames = {
    "q",        "latent",       "k_rope",        "kv_b_weight", "kv_norm_weight", "cos",
    "sin",      "position_ids", "q_scale",       "past_latent", "past_k_rope",    "past_latent_scale",
    "past_key", "past_value",   "cache_lengths", "block_table", "attn_mask",      "gate"};
const std::array<const char*, MlaOutput::kCount> kMlaOutputNames = {
    "o", "present_latent", "present_k_rope", "present_latent_scale", "present_key", "present_value"};

namespace {

constexpr ONNXTensorElementDataType kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr int64_t kFloat8Group = 128;  // spec.FLOAT8_GROUP

std::string CheckShape(size_t which, const MlaOperands& operands, std::initializer_list<int64_t> expected) {
  const Operand& operand = operands.inputs[which];
  return operand.present ? CheckShape(kMlaInputNames[which], operand, expected) : "";
}

std::string CheckType(size_t which, const MlaOperands& operands, ONNXTensorElementDataType expected) {
  const Operand& operand = operands.inputs[which];
  return operand.present ? CheckType(kMlaInputNames[which], operand, expected) : "";
}

// The dimension of the first operand that knows it.
int64_t FirstKnown(const MlaOperands& operands, std::initializer_list<size_t> inputs, size_t axis) {
  for (const size_t input : inputs)
    if (const int64_t dim = operands.inputs[input].Dim(axis); dim != kUnknown) return dim;
  return kUnknown;
}

// What a dimension of an operand that may be broadcast along it must be: 1 where it is 1.
int64_t OneOr(const Operand& operand, size_t axis, int64_t full) { return operand.Dim(axis) == 1 ? 1 : full; }

int64_t Sum(int64_t a, int64_t b) { return a == kUnknown || b == kUnknown ? kUnknown : a + b; }
int64_t Product(int64_t a, int64_t b) { return a == kUnknown || b == kUnknown ? kUnknown : a * b; }

// Sizes of one call; kUnknown where the graph does not tell.
struct Sizes {
  int64_t batch, tokens, past, keys;
};

std::string CheckPresence(const MlaAttributes& a, const MlaOperands& operands, const mla::Params& p) {
  const auto has = [&](size_t input) { return operands.inputs[input].present; };
  const auto asked = [&](size_t output) { return operands.outputs[output].present; };
  for (const size_t required : {In::kQ, In::kLatent, In::kKvBWeight})
    DF_REFUSE_IF(!has(required), "input ", kMlaInputNames[required], " is missing");
  DF_REFUSE_IF(!asked(Out::kO), "output o is missing");
  const bool rotary = a.qk_rope_head_dim > 0, rope = p.rope != mla::Rope::kNone;
  DF_REFUSE_IF(has(In::kKRope) && !rotary, "k_rope with qk_rope_head_dim 0");
  for (const size_t angle : {In::kCos, In::kSin})
    DF_REFUSE_IF(has(angle) != rope, kMlaInputNames[angle], rope ? " is missing for rope '" : " with rope '", a.rope,
                 "'");
  DF_REFUSE_IF(has(In::kPositionIds) && !rope, "position_ids with rope 'none'");
  DF_REFUSE_IF(has(In::kGate) != (p.gate_sigmoid != 0), "gate ",
               has(In::kGate) ? "without a gate_activation" : "is missing for the gate_activation");

  const bool latent = p.cache == mla::Cache::kLatent, expanded = p.cache == mla::Cache::kExpanded;
  for (const size_t input : {In::kPastLatent, In::kPastKRope, In::kPastLatentScale})
    DF_REFUSE_IF(has(input) && !latent, kMlaInputNames[input], " with cache '", a.cache, "'");
  for (const size_t input : {In::kPastKey, In::kPastValue})
    DF_REFUSE_IF(has(input) && !expanded, kMlaInputNames[input], " with cache '", a.cache, "'");
  for (const size_t output : {Out::kPresentLatent, Out::kPresentKRope, Out::kPresentLatentScale})
    DF_REFUSE_IF(asked(output) && !latent, kMlaOutputNames[output], " with cache '", a.cache, "'");
  for (const size_t output : {Out::kPresentKey, Out::kPresentValue})
    DF_REFUSE_IF(asked(output) && !expanded, kMlaOutputNames[output], " with cache '", a.cache, "'");
  DF_REFUSE_IF(has(In::kPastKey) != has(In::kPastValue), "past_key and past_value must both be there, or neither");
  const bool past = has(In::kPastLatent) || has(In::kPastKey);
  DF_REFUSE_IF(has(In::kPastKRope) && (!has(In::kPastLatent) || !rotary), "past_k_rope without ",
               rotary ? "past_latent" : "a rotary part");
  DF_REFUSE_IF(has(In::kCacheLengths) && !past, "cache_lengths without a past cache");
  DF_REFUSE_IF(has(In::kBlockTable) && !(has(In::kCacheLengths) && latent),
               "block_table needs cache_lengths and a cache of latents");
  const bool codes = p.cache_type != mla::CacheType::kSame;
  DF_REFUSE_IF(codes && !(latent && past && !p.packed_cache), "cache_type '", a.cache_type,
               "' needs past_latent apart from the rotary keys");
  DF_REFUSE_IF(has(In::kPastLatentScale) != codes, "past_latent_scale ",
               codes ? "is missing for cache_type '" : "with cache_type '", a.cache_type, "'");
  DF_REFUSE_IF(asked(Out::kPresentLatentScale) && p.cache_type != mla::CacheType::kFloat8,
               "present_latent_scale with cache_type '", a.cache_type, "'");
  DF_REFUSE_IF(asked(Out::kPresentKRope) && (!rotary || p.packed_cache), "present_k_rope ",
               rotary ? "with a packed cache" : "with qk_rope_head_dim 0");
  return "";
}

std::string CheckTypes(const MlaOperands& operands, mla::Params* p) {
  const auto& in = operands.inputs;
  const ONNXTensorElementDataType type = in[In::kQ].type;
  DF_REFUSE_IF(!ToDType(type, &p->dtype), "q is ", TypeName(type), ": expected float32, float16 or bfloat16");
  for (const size_t input :
       {In::kLatent, In::kKRope, In::kKvBWeight, In::kPastKRope, In::kPastKey, In::kPastValue, In::kGate})
    DF_TRY(CheckType(input, operands, type));
  for (const size_t input : {In::kKvNormWeight, In::kQScale, In::kPastLatentScale})
    DF_TRY(CheckType(input, operands, kFloat));
  DF_TRY(CheckType(In::kPositionIds, operands, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64));
  DF_TRY(CheckType(In::kBlockTable, operands, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32));
  const ONNXTensorElementDataType codes = p->cache_type == mla::CacheType::kInt8 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8
                                          : p->cache_type == mla::CacheType::kFloat8
                                              ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN
                                              : type;
  DF_TRY(CheckType(In::kPastLatent, operands, codes));
  if (in[In::kCos].present) {
    const ONNXTensorElementDataType angle = in[In::kCos].type;
    DF_REFUSE_IF(angle != kFloat && angle != type, "cos is ", TypeName(angle), ": expected float32 or ",
                 TypeName(type));
    DF_TRY(CheckType(In::kSin, operands, angle));
    p->cos_float32 = angle == kFloat;
  }
  if (in[In::kCacheLengths].present) {
    const ONNXTensorElementDataType lengths = in[In::kCacheLengths].type;
    DF_REFUSE_IF(lengths != ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 && lengths != ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
                 "cache_lengths is ", TypeName(lengths), ": expected int32 or int64");
    p->lengths_int64 = lengths == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  }
  if (in[In::kAttnMask].present) {
    const ONNXTensorElementDataType mask = in[In::kAttnMask].type;
    if (mask == ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL)
      p->mask_type = mla::MaskType::kBool;
    else if (mask == type)
      p->mask_type = mla::MaskType::kT;
    else if (mask == kFloat)
      p->mask_type = mla::MaskType::kFloat32;
    else
      return Text("attn_mask is ", TypeName(mask), ": expected bool, float32 or ", TypeName(type));
  }
  return "";
}

std::string BindRope(const MlaOperands& operands, const Sizes& sizes, mla::Params* p) {
  const auto& in = operands.inputs;
  if (p->rope == mla::Rope::kNone) return "";
  const int64_t width = p->qk_rope_head_dim;
  const bool table = in[In::kPositionIds].present;
  const int64_t columns = FirstKnown(operands, {In::kCos, In::kSin}, table ? 1 : 2);
  DF_REFUSE_IF(columns != kUnknown && columns != width && columns != width / 2, "cos and sin have ", columns,
               " columns: expected ", width, " or ", width / 2);
  p->cos_width = static_cast<int32_t>(columns == kUnknown ? width : columns);
  const int64_t rows = FirstKnown(operands, {In::kCos, In::kSin}, 0);
  for (const size_t angle : {In::kCos, In::kSin}) {
    if (table) {
      DF_TRY(CheckShape(angle, operands, {rows, columns}));
    } else {
      DF_TRY(CheckShape(angle, operands, {rows == 1 ? 1 : sizes.batch, sizes.tokens, columns}));
    }
  }
  if (table) {
    const Operand& ids = in[In::kPositionIds];
    DF_TRY(CheckShape(In::kPositionIds, operands, {OneOr(ids, 0, sizes.batch), sizes.tokens}));
    p->position_batch_stride = ids.Dim(0) == 1 ? 0 : p->seq_len;
    p->cos_rows = rows == kUnknown ? 1 : rows;
  } else {
    p->cos_batch_stride = rows == 1 ? 0 : p->seq_len;
  }
  return "";
}

std::string BindCache(const MlaAttributes& a, const MlaOperands& operands, Sizes* sizes, mla::Params* p) {
  const auto& in = operands.inputs;
  const bool paged = in[In::kBlockTable].present, expanded = p->cache == mla::Cache::kExpanded;
  const int64_t rank = a.kv_lora_rank, rope = a.qk_rope_head_dim, heads = a.num_heads;
  const int64_t groups = (rank + kFloat8Group - 1) / kFloat8Group;
  p->static_cache = in[In::kCacheLengths].present;
  DF_TRY(CheckShape(In::kCacheLengths, operands, {sizes->batch}));
  const bool past = in[In::kPastLatent].present || in[In::kPastKey].present;
  const size_t scale = p->cache_type == mla::CacheType::kFloat8 ? In::kPastLatentScale : In::kPastLatent;
  const std::initializer_list<size_t> latents = {In::kPastLatent, In::kPastKRope, scale};
  int64_t rows = sizes->batch;
  if (paged) {
    rows = FirstKnown(operands, latents, 0);
    DF_TRY(CheckShape(In::kBlockTable, operands, {sizes->batch, kUnknown}));
    const int64_t blocks = in[In::kBlockTable].Dim(1);
    p->num_blocks = rows == kUnknown ? 1 : rows;
    p->max_blocks = blocks == kUnknown ? 1 : blocks;
  }
  sizes->past = !past      ? 0
                : expanded ? FirstKnown(operands, {In::kPastKey, In::kPastValue}, 2)
                           : FirstKnown(operands, latents, 1);
  DF_REFUSE_IF(paged && sizes->past == 0, "past_latent has blocks of 0 tokens");
  DF_TRY(CheckShape(In::kPastLatent, operands, {rows, sizes->past, rank + (p->packed_cache ? rope : 0)}));
  DF_TRY(CheckShape(In::kPastKRope, operands, {rows, sizes->past, rope}));
  if (p->cache_type == mla::CacheType::kInt8) {
    DF_TRY(CheckShape(In::kPastLatentScale, operands, {rank}));
  } else {
    DF_TRY(CheckShape(In::kPastLatentScale, operands, {rows, sizes->past, groups}));
  }
  DF_TRY(CheckShape(In::kPastKey, operands, {sizes->batch, heads, sizes->past, a.qk_nope_head_dim + rope}));
  DF_TRY(CheckShape(In::kPastValue, operands, {sizes->batch, heads, sizes->past, a.v_head_dim}));
  const int64_t known = sizes->past == kUnknown ? 1 : sizes->past;
  if (paged) {
    p->block_size = known;
    sizes->keys = Product(sizes->past, in[In::kBlockTable].Dim(1));
  } else {
    p->past_len = past ? known : 0;
    sizes->keys = p->static_cache ? sizes->past : Sum(sizes->past, sizes->tokens);
  }
  return "";
}

std::string BindMask(const MlaAttributes& a, const MlaOperands& operands, const Sizes& sizes, mla::Params* p) {
  const Operand& mask = operands.inputs[In::kAttnMask];
  if (!mask.present) return "";
  DF_TRY(
      CheckShape(In::kAttnMask, operands,
                 {OneOr(mask, 0, sizes.batch), OneOr(mask, 1, a.num_heads), OneOr(mask, 2, sizes.tokens), sizes.keys}));
  int64_t step = 1;
  for (size_t axis = kMaxRank; axis > 0; --axis) {
    const int64_t dim = mask.Dim(axis - 1);
    p->mask_strides[axis - 1] = dim == 1 ? 0 : step;
    step *= dim == kUnknown ? 1 : dim;
  }
  return "";
}

}  // namespace

const AttributeTypes& MlaAttributeTypes() {
  static const AttributeTypes types = {{"num_heads", ORT_OP_ATTR_INT},        {"qk_nope_head_dim", ORT_OP_ATTR_INT},
                                       {"qk_rope_head_dim", ORT_OP_ATTR_INT}, {"v_head_dim", ORT_OP_ATTR_INT},
                                       {"kv_lora_rank", ORT_OP_ATTR_INT},     {"scale", ORT_OP_ATTR_FLOAT},
                                       {"rope", ORT_OP_ATTR_STRING},          {"causal", ORT_OP_ATTR_INT},
                                       {"window", ORT_OP_ATTR_INT},           {"gate_activation", ORT_OP_ATTR_STRING},
                                       {"kv_norm_eps", ORT_OP_ATTR_FLOAT},    {"cache", ORT_OP_ATTR_STRING},
                                       {"cache_type", ORT_OP_ATTR_STRING}};
  return types;
}

std::string ReadAttributes(const AttributeSource& source, MlaAttributes* a) {
  const std::initializer_list<Choice<int64_t*>> geometry = {{"num_heads", &a->num_heads},
                                                            {"qk_nope_head_dim", &a->qk_nope_head_dim},
                                                            {"v_head_dim", &a->v_head_dim},
                                                            {"kv_lora_rank", &a->kv_lora_rank}};
  for (const auto& [name, value] : geometry) {
    DF_REFUSE_IF(!source.Int(name, value), "attribute ", name, " is missing");
    DF_REFUSE_IF(*value < 1 || *value > 65536, name, " ", *value, ": expected 1 to 65536");
  }
  DF_REFUSE_IF(!source.Int("qk_rope_head_dim", &a->qk_rope_head_dim), "attribute qk_rope_head_dim is missing");
  DF_REFUSE_IF(a->qk_rope_head_dim < 0 || a->qk_rope_head_dim > 65536, "qk_rope_head_dim ", a->qk_rope_head_dim,
               ": expected 0 to 65536");
  DF_REFUSE_IF(!source.Float("scale", &a->scale), "attribute scale is missing");
  source.String("rope", &a->rope);
  source.Int("causal", &a->causal);
  source.Int("window", &a->window);
  source.String("gate_activation", &a->gate_activation);
  source.Float("kv_norm_eps", &a->kv_norm_eps);
  source.String("cache", &a->cache);
  source.String("cache_type", &a->cache_type);
  DF_REFUSE_IF(!std::isfinite(a->scale), "scale is not finite");
  DF_REFUSE_IF(a->causal != 0 && a->causal != 1, "causal ", a->causal, ": expected 0 or 1");
  DF_REFUSE_IF(a->window < 0 || a->window > std::numeric_limits<int32_t>::max() || (a->window > 0 && !a->causal),
               "window ", a->window, ": 0 for none, or 1 or more with causal");
  DF_REFUSE_IF(a->rope != "none" && (a->qk_rope_head_dim < 2 || a->qk_rope_head_dim % 2), "rope '", a->rope,
               "' needs an even qk_rope_head_dim, not ", a->qk_rope_head_dim);
  return "";
}

std::string BindGeometry(const MlaAttributes& a, const MlaOperands& operands, mla::Params* p) {
  const auto& in = operands.inputs;
  const int64_t rank = a.kv_lora_rank, rope = a.qk_rope_head_dim;
  p->num_heads = static_cast<int32_t>(a.num_heads);
  p->qk_nope_head_dim = static_cast<int32_t>(a.qk_nope_head_dim);
  p->qk_rope_head_dim = static_cast<int32_t>(rope);
  p->v_head_dim = static_cast<int32_t>(a.v_head_dim);
  p->kv_lora_rank = static_cast<int32_t>(rank);
  p->scale = a.scale;
  p->causal = static_cast<int32_t>(a.causal);
  p->window = static_cast<int32_t>(a.window);
  p->kv_norm_eps = a.kv_norm_eps;
  DF_TRY(Choose("rope", a.rope,
                {{"none", mla::Rope::kNone},
                 {"half", mla::Rope::kHalf},
                 {"interleaved", mla::Rope::kInterleaved},
                 {"deinterleaved", mla::Rope::kDeinterleaved}},
                &p->rope));
  DF_TRY(Choose("gate_activation", a.gate_activation, {{"none", 0}, {"sigmoid", 1}}, &p->gate_sigmoid));
  DF_TRY(Choose("cache", a.cache,
                {{"none", mla::Cache::kNone}, {"latent", mla::Cache::kLatent}, {"expanded", mla::Cache::kExpanded}},
                &p->cache));
  DF_TRY(Choose("cache_type", a.cache_type,
                {{"same", mla::CacheType::kSame}, {"int8", mla::CacheType::kInt8}, {"float8", mla::CacheType::kFloat8}},
                &p->cache_type));
  const bool past = in[In::kPastLatent].present;
  p->packed_cache =
      p->cache == mla::Cache::kLatent && rope > 0 &&
      (past ? !in[In::kPastKRope].present
            : operands.outputs[Out::kPresentLatent].present && !operands.outputs[Out::kPresentKRope].present);
  DF_TRY(CheckPresence(a, operands, *p));
  DF_TRY(CheckTypes(operands, p));

  const std::initializer_list<size_t> token_rows = {In::kQ, In::kLatent, In::kKRope, In::kGate};
  Sizes sizes = {FirstKnown(operands, token_rows, 0), FirstKnown(operands, token_rows, 1), kUnknown, kUnknown};
  p->batch = sizes.batch == kUnknown ? 1 : sizes.batch;
  p->seq_len = sizes.tokens == kUnknown ? 1 : sizes.tokens;
  const bool packed = rope > 0 && !in[In::kKRope].present;
  const int64_t width = rank + (packed ? rope : 0);
  const auto rows = [&](size_t input, int64_t columns) {
    return CheckShape(input, operands, {sizes.batch, sizes.tokens, columns});
  };
  DF_TRY(rows(In::kQ, a.num_heads * (a.qk_nope_head_dim + rope)));
  DF_TRY(rows(In::kLatent, width));
  DF_TRY(rows(In::kKRope, rope));
  DF_TRY(rows(In::kGate, a.num_heads));
  DF_TRY(CheckShape(In::kKvBWeight, operands, {rank, a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)}));
  DF_TRY(CheckShape(In::kKvNormWeight, operands, {rank}));
  DF_TRY(CheckShape(In::kQScale, operands, {OneOr(in[In::kQScale], 0, sizes.batch), sizes.tokens}));
  p->q_scale_batch_stride = in[In::kQScale].Dim(0) == 1 ? 0 : p->seq_len;
  p->latent_row_stride = width;
  p->k_rope_row_stride = packed ? width : rope;
  DF_TRY(BindRope(operands, sizes, p));
  DF_TRY(BindCache(a, operands, &sizes, p));
  return BindMask(a, operands, sizes, p);
}

void BindInputs(const std::array<const void*, MlaInput::kCount>& data, mla::Params* p) {
  p->q = data[In::kQ];
  p->latent = data[In::kLatent];
  p->k_rope = data[In::kKRope];
  if (!p->k_rope && p->latent && p->qk_rope_head_dim > 0) {  // packed
    const size_t item = p->dtype == mla::DType::kFloat32 ? 4 : 2;
    p->k_rope = static_cast<const char*>(p->latent) + size_t(p->kv_lora_rank) * item;
  }
  p->kv_b_weight = data[In::kKvBWeight];
  p->kv_norm_weight = static_cast<const float*>(data[In::kKvNormWeight]);
  p->cos = data[In::kCos];
  p->sin = data[In::kSin];
  p->position_ids = static_cast<const int64_t*>(data[In::kPositionIds]);
  p->q_scale = static_cast<const float*>(data[In::kQScale]);
  p->past_latent = data[In::kPastLatent];
  p->past_k_rope = data[In::kPastKRope];
  p->past_latent_scale = static_cast<const float*>(data[In::kPastLatentScale]);
  p->past_key = data[In::kPastKey];
  p->past_value = data[In::kPastValue];
  p->cache_lengths = data[In::kCacheLengths];
  p->block_table = static_cast<const int32_t*>(data[In::kBlockTable]);
  p->attn_mask = data[In::kAttnMask];
  p->gate = data[In::kGate];
}

void BindOutputs(const std::array<void*, MlaOutput::kCount>& data, mla::Params* p) {
  p->o = data[Out::kO];
  p->present_latent = data[Out::kPresentLatent];
  p->present_k_rope = data[Out::kPresentKRope];
  p->present_latent_scale = static_cast<float*>(data[Out::kPresentLatentScale]);
  p->present_key = data[Out::kPresentKey];
  p->present_value = data[Out::kPresentValue];
}

void BindStandIns(const MlaOperands& operands, mla::Params* p) {
  alignas(256) static char in[256], out[256];  // two: a present is not its past's buffer
  std::array<const void*, In::kCount> inputs{};
  for (size_t i = 0; i < In::kCount; ++i) inputs[i] = operands.inputs[i].present ? in : nullptr;
  BindInputs(inputs, p);
  std::array<void*, Out::kCount> outputs{};
  for (size_t i = 0; i < Out::kCount; ++i) outputs[i] = operands.outputs[i].present ? out : nullptr;
  BindOutputs(outputs, p);
}

std::array<Shape, MlaOutput::kCount> OutputShapes(const mla::Params& p) {
  const int64_t rank = p.kv_lora_rank, rope = p.qk_rope_head_dim, heads = p.num_heads;
  const bool paged = p.block_size > 0;
  const int64_t rows = paged ? p.num_blocks : p.batch;
  const int64_t keys = paged ? p.block_size : p.past_len + (p.static_cache ? 0 : p.seq_len);
  std::array<Shape, MlaOutput::kCount> shapes;
  shapes[Out::kO] = {{p.batch, p.seq_len, heads * p.v_head_dim}, 3};
  shapes[Out::kPresentLatent] = {{rows, keys, rank + (p.packed_cache ? rope : 0)}, 3};
  shapes[Out::kPresentKRope] = {{rows, keys, rope}, 3};
  shapes[Out::kPresentLatentScale] = {{rows, keys, (rank + kFloat8Group - 1) / kFloat8Group}, 3};
  shapes[Out::kPresentKey] = {{p.batch, heads, keys, p.qk_nope_head_dim + rope}, 4};
  shapes[Out::kPresentValue] = {{p.batch, heads, keys, p.v_head_dim}, 4};
  return shapes;
}

std::array<ONNXTensorElementDataType, MlaOutput::kCount> OutputTypes(const mla::Params& p) {
  constexpr ONNXTensorElementDataType kTypes[] = {kFloat, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
                                                  ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16};
  std::array<ONNXTensorElementDataType, MlaOutput::kCount> types;
  types.fill(kTypes[static_cast<int32_t>(p.dtype)]);
  if (p.cache_type == mla::CacheType::kInt8) types[Out::kPresentLatent] = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
  if (p.cache_type == mla::CacheType::kFloat8) types[Out::kPresentLatent] = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN;
  types[Out::kPresentLatentScale] = kFloat;
  return types;
}

}  // namespace deltafuse::ep
