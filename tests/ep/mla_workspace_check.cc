// Which way a CUDA call of LatentAttention goes, and how large its workspace is said to be when a session is made: the
// same as when it runs. Needs no GPU: what the device files (.cu) decide is stood in for here.
#include <cstdio>
#include <cstring>

#include "custom_ops/mla/mla_plan_cuda.h"
#include "plugin/ep/mla_binding.h"

namespace deltafuse::mla {

bool fast_projections(const Params& p) { return p.kv_lora_rank == 512; }
DecodePlan plan_decode(const Params&, int64_t, int) { return {}; }
const char* decode_refusal(const Params&, const View&) { return nullptr; }

}  // namespace deltafuse::mla

namespace {

using namespace deltafuse;
using In = ep::MlaInput;
using Out = ep::MlaOutput;

constexpr ONNXTensorElementDataType kHalf = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
constexpr int64_t kTokens = 300, kCapacity = 40000;

ep::Operand operand(std::initializer_list<int64_t> dims, ONNXTensorElementDataType type = kHalf) {
  ep::Operand made;
  made.present = true, made.type = type, made.rank = static_cast<int64_t>(dims.size());
  int64_t at = 0;
  for (const int64_t dim : dims) made.dims[at++] = dim;
  return made;
}

int failures = 0;
void expect(bool right, const char* what) {
  if (!right) std::printf("wrong: %s\n", what), ++failures;
}

struct Call {
  ep::MlaAttributes attributes;
  ep::MlaOperands operands;
  mla::Params params() const {
    mla::Params p;
    const std::string reason = ep::BindGeometry(attributes, operands, &p);
    if (!reason.empty()) std::printf("refused: %s\n", reason.c_str()), ++failures;
    return p;
  }
};

Call call(const char* cache, int64_t tokens) {
  Call made;
  ep::MlaAttributes& a = made.attributes;
  a.num_heads = 4, a.qk_nope_head_dim = 128, a.qk_rope_head_dim = 64, a.v_head_dim = 128, a.kv_lora_rank = 512;
  a.cache = cache;
  auto& in = made.operands.inputs;
  auto& out = made.operands.outputs;
  in[In::kQ] = operand({2, tokens, 4 * 192});
  in[In::kLatent] = operand({2, tokens, 512});
  in[In::kKRope] = operand({2, tokens, 64});
  in[In::kKvBWeight] = operand({512, 4 * 256});
  in[In::kCacheLengths] = operand({2}, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
  out[Out::kO] = operand({});
  if (!std::strcmp(cache, "latent")) {
    in[In::kPastLatent] = operand({2, kCapacity, 512});
    in[In::kPastKRope] = operand({2, kCapacity, 64});
    out[Out::kPresentLatent] = out[Out::kPresentKRope] = operand({});
  } else {
    in[In::kPastKey] = operand({2, 4, kCapacity, 192});
    in[In::kPastValue] = operand({2, 4, kCapacity, 128});
    out[Out::kPresentKey] = out[Out::kPresentValue] = operand({});
  }
  return made;
}

void check_size(const char* cache, int64_t tokens, int64_t cache_bytes) {
  const mla::DeviceInfo device{90, 232448, 132, true};
  Call made = call(cache, tokens);
  mla::Params early = made.params(), bare = early, late = early;
  ep::BindStandIns(made.operands, &early);
  const int64_t said = mla::host::workspace_of(early, device).total;
  // as a run binds them
  static char data[Out::kCount];
  std::array<void*, Out::kCount> results{};
  for (size_t i = 0; i < Out::kCount; ++i) results[i] = made.operands.outputs[i].present ? data + i : nullptr;
  ep::BindOutputs(results, &late);
  expect(said == mla::host::workspace_of(late, device).total, "the size before the run is that of the run");
  const int64_t alone = mla::host::workspace_of(bare, device).total;
  expect(alone - said >= cache_bytes, "caches that are asked for are no part of the workspace");
  // and with presents that are not asked for, they are
  for (size_t i = Out::kO + 1; i < Out::kCount; ++i) made.operands.outputs[i].present = false;
  mla::Params unasked = made.params();
  ep::BindStandIns(made.operands, &unasked);
  expect(mla::host::workspace_of(unasked, device).total == alone, "caches that are not are a part of it");
}

void check_paths() {
  const mla::DeviceInfo hopper{90, 232448, 132, true}, ampere{80, 166912, 108, false};
  mla::Params p = call("latent", kTokens).params();
  using mla::host::Path;
  expect(mla::host::path_of(p, hopper) == Path::kPrompt, "a prompt goes to the prompt kernel");
  expect(mla::host::path_of(p, ampere) == Path::kAny, "but not on other devices");
  for (const mla::MaskType type : {mla::MaskType::kT, mla::MaskType::kFloat32, mla::MaskType::kBool}) {
    p.mask_type = type;
    expect(mla::host::path_of(p, hopper) == Path::kPrompt, "a masked prompt goes to the prompt kernel");
    mla::host::masked_prompts = false;
    expect(mla::host::path_of(p, hopper) == Path::kAny, "or to the plain kernels where that is switched off");
    mla::host::masked_prompts = true;
    mla::Params step = call("latent", 1).params();
    step.mask_type = type;
    expect(mla::host::path_of(step, hopper) == Path::kDecode, "masked decode stays");
  }
}

}  // namespace

int main() {
  check_size("latent", kTokens, 2 * kCapacity * 576 * 2);
  check_size("latent", 1, 2 * kCapacity * 576 * 2);
  check_size("expanded", kTokens, 2 * 4 * kCapacity * 320 * 2);
  check_paths();
  return failures;
}
