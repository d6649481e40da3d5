// What the CUDA kernels of GroupedQMoE do not take, and what the device is.
#include <cuda_runtime_api.h>

#include <cmath>

#include "../common/device_info.h"
#include "moe_cuda_plan.h"

namespace deltafuse::moe {
namespace {

bool known(DType dtype) { return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

const char* refuse_matrix(const char* name, const Matrix& m, int cols) {
  if (m.format < Format::kFloat || m.format > Format::kBFloat16)
    return reason("%s: unknown format %d", name, int(m.format));
  const bool plain = m.format == Format::kFloat || m.format == Format::kBFloat16;
  if (m.block_size < 0 || m.block_rows < 1) {
    return reason("%s: block_size %d, block_rows %d", name, m.block_size, m.block_rows);
  }
  if (plain && (m.block_size || m.block_rows != 1 || m.has_zero_point)) {
    return reason("%s: block_size %d: the weights are not quantized", name, m.block_size);
  }
  if (m.block_rows != 1 && m.format != Format::kFloat8) {
    return reason("%s: block_rows %d: integers have scales of their own for each row", name, m.block_rows);
  }
  if (m.has_zero_point && m.format == Format::kFloat8) return reason("%s: float8 has no zero points", name);
  if ((m.format == Format::kInt4 || m.format == Format::kUInt4) && cols % 2) {
    return reason("%s: rows of %d: 4-bit weights need an even number", name, cols);
  }
  return nullptr;
}

}  // namespace

cudaError_t device_info(DeviceInfo* info) {
  return read_device_info(info, compiled_capability, [](DeviceInfo* read, int major, int minor) {
    read->wgmma = major == 9 && minor == 0 && gemm_sm90_compiled();
    return cudaSuccess;
  });
}

const char* cuda_refusal(const Params& p, int compute_capability) {
  if (compute_capability < 80) {
    return reason("compute capability %d.%d: kernels need 8.0 or newer", compute_capability / 10,
                  compute_capability % 10);
  }
  if (p.num_experts < 1 || p.top_k < 1 || p.hidden_size < 1 || p.intermediate_size < 1 || p.n_group < 1 ||
      p.topk_group < 1 || p.group_top < 1) {
    return reason(
        "num_experts %d, top_k %d, hidden_size %d, intermediate_size %d, n_group %d, topk_group %d, group_top %d: all "
        "must be 1 or more",
        p.num_experts, p.top_k, p.hidden_size, p.intermediate_size, p.n_group, p.topk_group, p.group_top);
  }
  if (p.shared_intermediate_size < 0) return reason("shared_intermediate_size %d", p.shared_intermediate_size);
  if (p.num_experts > kMaxExperts) return reason("num_experts %d: kernels take up to %d", p.num_experts, kMaxExperts);
  if (p.top_k > kMaxTopK) return reason("top_k %d: kernels take up to %d", p.top_k, kMaxTopK);
  if (p.zero_experts || p.choose_by_logits || p.norm_min != 0.0f || p.activation_alpha != 1.0f || p.up_offset != 0.0f ||
      p.has_bias) {
    return reason(
        "zero_experts %d, choose_by_logits %d, norm_min %g, activation_alpha %g, up_offset %g%s: the kernels have none",
        p.zero_experts, p.choose_by_logits, double(p.norm_min), double(p.activation_alpha), double(p.up_offset),
        p.has_bias ? ", experts' biases" : "");
  }
  if (p.top_k > p.num_experts) return reason("top_k %d of num_experts %d", p.top_k, p.num_experts);
  if (p.num_experts % p.n_group || p.topk_group > p.n_group) {
    return reason("num_experts %d, n_group %d, topk_group %d", p.num_experts, p.n_group, p.topk_group);
  }
  if (p.group_top > p.num_experts / p.n_group) {
    return reason("group_top %d of %d experts a group", p.group_top, p.num_experts / p.n_group);
  }
  if (!known(p.dtype)) return reason("element type %d: kernels take float32, float16, bfloat16", int(p.dtype));
  if (p.score != Score::kSigmoid && p.score != Score::kSoftmax) return reason("score function %d", int(p.score));
  if (p.activation < Activation::kSilu || p.activation > Activation::kRelu2) {
    return reason("activation %d", int(p.activation));
  }
  if (p.clamp < Clamp::kNone || p.clamp > Clamp::kAfter) return reason("clamp %d", int(p.clamp));
  if (p.clamp != Clamp::kNone && !(p.gated && p.gate_limit > 0.0f && p.up_limit > 0.0f)) {
    return reason("gate_limit %g, up_limit %g, gated %d", double(p.gate_limit), double(p.up_limit), p.gated);
  }
  if (!std::isfinite(p.routed_scaling_factor) || !std::isfinite(p.norm_eps)) {
    return reason("routed_scaling_factor %g, norm_eps %g", double(p.routed_scaling_factor), double(p.norm_eps));
  }
  if (const char* bad = refuse_matrix("gate_up", p.gate_up, p.hidden_size)) return bad;
  if (const char* bad = refuse_matrix("down", p.down, p.intermediate_size)) return bad;
  if (p.shared_intermediate_size > 0) {
    if (const char* bad = refuse_matrix("shared_gate_up", p.shared_gate_up, p.hidden_size)) return bad;
    if (const char* bad = refuse_matrix("shared_down", p.shared_down, p.shared_intermediate_size)) return bad;
  }
  return nullptr;
}

}  // namespace deltafuse::moe
