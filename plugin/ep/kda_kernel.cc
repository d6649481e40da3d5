#include "kda_kernel.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attributes.h"
#include "cuda_backend.h"
#include "kda_binding.h"
#include "kernel_support.h"
#include "profiler.h"
#include "workspace.h"

namespace deltafuse::ep {
namespace {

constexpr const char* kOutputNames[kKdaOutputs] = {"o", "present_conv_state", "final_state"};

// The prefix sums must be in order and cover the tokens, or the kernel would reach outside of its operands.
std::string CheckSequences(const kda::Params& p) {
  int64_t previous = 0;
  for (int64_t i = 0; i <= p.num_seqs; ++i) {
    const int64_t at = p.cu_seqlens_int64 ? static_cast<const int64_t*>(p.cu_seqlens)[i]
                                          : static_cast<const int32_t*>(p.cu_seqlens)[i];
    if (at < previous || (i == 0 && at != 0) || at > p.seq_len || (i == p.num_seqs && at != p.seq_len))
      return "cu_seqlens[" + std::to_string(i) + "] is " + std::to_string(at) + ": expected prefix sums from 0 to " +
             std::to_string(p.seq_len);
    previous = at;
  }
  return "";
}

size_t BytesOf(kda::DType type) { return type == kda::DType::kFloat32 ? 4 : 2; }

const char* NameOf(kda::DType type) {
  return type == kda::DType::kFloat32 ? "float32" : type == kda::DType::kFloat16 ? "float16" : "bfloat16";
}

// What the profile shows as the kernel's name.
const char* KernelName(const kda::Params& p) {
  const bool one_token_each = p.cu_seqlens ? p.seq_len <= p.num_seqs : p.seq_len <= 1;
  return one_token_each ? "deltafuse_kda_decode" : "deltafuse_kda_prefill";
}

void BindInputs(const std::array<const void*, kKdaInputs>& data, kda::Params* p) {
  p->q = data[kQ];
  p->k = data[kK];
  p->v = data[kV];
  if (!p->k) {  // packed q | k | v: three pointers into one buffer
    const size_t width = size_t(p->num_heads) * p->head_dim * BytesOf(p->dtype);
    p->k = static_cast<const char*>(p->q) + width;
    p->v = static_cast<const char*>(p->q) + 2 * width;
  }
  p->g = data[kG];
  p->beta = data[kBeta];
  p->A_log = static_cast<const float*>(data[kALog]);
  p->dt_bias = static_cast<const float*>(data[kDtBias]);
  p->conv_weight = static_cast<const float*>(data[kConvWeight]);
  p->conv_bias = static_cast<const float*>(data[kConvBias]);
  p->conv_state = data[kConvState];
  p->initial_state = data[kInitialState];
  p->norm_weight = static_cast<const float*>(data[kNormWeight]);
  p->gate = data[kGate];
  p->cu_seqlens = data[kCuSeqlens];
}

class KdaKernel final : public OrtKernelImpl {
 public:
  KdaKernel(std::shared_ptr<Session> session, std::string node, KdaAttributes attributes)
      : OrtKernelImpl{},
        session_(std::move(session)),
        api_(session_->api()),
        device_(session_->device()),
        node_(std::move(node)),
        attributes_(std::move(attributes)) {
    session_->KernelCreated();
    ort_version_supported = kOrtApiVersion;
    Compute = [](OrtKernelImpl* self, OrtKernelContext* context) noexcept -> OrtStatus* {
      auto* kernel = static_cast<KdaKernel*>(self);
      return Guard(kernel->api_,
                   [&] { return WithNode(kernel->api_, kKdaOpType, kernel->node_, kernel->Run(context)); });
    };
    Release = [](OrtKernelImpl* self) noexcept { delete static_cast<KdaKernel*>(self); };
  }
  ~KdaKernel() { session_->KernelGone(); }

 private:
  OrtStatus* Fail(const std::string& reason) const { return MakeStatus(api_, ORT_INVALID_ARGUMENT, reason); }

  OrtStatus* Run(OrtKernelContext* context) const {
    KdaOperands operands;
    std::array<const void*, kKdaInputs> data{};
    size_t count = 0;
    DF_RETURN_IF_ERROR(api_.ort->KernelContext_GetInputCount(context, &count));
    for (size_t i = 0; i < std::min<size_t>(count, kKdaInputs); ++i) {
      const OrtValue* value = nullptr;
      DF_RETURN_IF_ERROR(api_.ort->KernelContext_GetInput(context, i, &value));
      DF_RETURN_IF_ERROR(DescribeValue(api_, value, &operands.inputs[i], &data[i]));
    }

    // Outputs are made from the inputs' geometry, so that is bound first, with o alone; their presence and types after.
    operands.outputs[kO].present = true;
    kda::Params params;
    if (const std::string reason = BindGeometry(attributes_, operands, &params); !reason.empty()) return Fail(reason);
    BindInputs(data, &params);
    if (!device_.cuda && params.cu_seqlens)
      if (const std::string reason = CheckSequences(params); !reason.empty()) return Fail(reason);

    DF_RETURN_IF_ERROR(api_.ort->KernelContext_GetOutputCount(context, &count));
    const std::array<Shape, kKdaOutputs> shapes = OutputShapes(params);
    std::array<void*, kKdaOutputs> results{};
    for (size_t i = 0; i < std::min<size_t>(count, kKdaOutputs); ++i) {
      OrtValue* value = nullptr;
      const size_t bytes = shapes[i].Elements() * BytesOf(i == kFinalState ? params.state_dtype : params.dtype);
      if (OrtStatus* status =
              api_.ort->KernelContext_GetOutput(context, i, shapes[i].dims.data(), shapes[i].rank, &value))
        return NoMemory(api_, context, device_.memory, std::string("output ") + kOutputNames[i], bytes, status);
      const void* unused = nullptr;
      DF_RETURN_IF_ERROR(DescribeValue(api_, value, &operands.outputs[i], &unused));
      if (value) DF_RETURN_IF_ERROR(api_.ort->GetTensorMutableData(value, &results[i]));
      if (value && !results[i] && bytes != 0)
        return NoMemory(api_, context, device_.memory, std::string("output ") + kOutputNames[i], bytes, nullptr);
    }
    if (const std::string reason = BindGeometry(attributes_, operands, &params); !reason.empty()) return Fail(reason);
    params.o = results[kO];
    params.present_conv_state = results[kPresentConvState];
    params.final_state = results[kFinalState];
    return device_.cuda ? RunOnCuda(context, params) : RunOnCpu(context, params);
  }

  OrtStatus* RunOnCpu(const OrtKernelContext* context, const kda::Params& params) const {
    if (const char* reason = kda::cpu_refusal(params)) return Fail(reason);
    Workspace workspace(api_);
    DF_RETURN_IF_ERROR(workspace.Take(context, device_.memory, kda::cpu_workspace_bytes(params)));
    KernelScope scope(*session_, KernelName(params), node_, nullptr);
    DescribeCall(params, &scope);
    Pool pool{&api_, context, nullptr};
    const char* failure = kda::cpu_forward(params, workspace.data(), RunOnPool, &pool);
    if (pool.status) return pool.status;
    return failure ? Fail(failure) : nullptr;
  }

  OrtStatus* RunOnCuda(const OrtKernelContext* context, const kda::Params& params) const {
    DF_RETURN_IF_ERROR(UseCudaDevice(api_, device_));
    if (const char* reason = kda::cuda_refusal(params, device_.compute_capability)) return Fail(reason);
    void* stream = nullptr;
    DF_RETURN_IF_ERROR(session_->ComputeStream(context, &stream));
    Workspace workspace(api_);
    DF_RETURN_IF_ERROR(
        workspace.Take(context, device_.memory, kda::cuda_workspace_bytes(params), &session_->workspace(), stream));
    KernelScope scope(*session_, KernelName(params), node_, stream);
    DescribeCall(params, &scope);
    const char* failure = kda::cuda_forward(params, workspace.data(), stream);
    return failure ? Fail(failure) : nullptr;
  }

  void DescribeCall(const kda::Params& p, KernelScope* scope) const {
    if (!scope->profiled()) return;
    scope->SetArguments({{"op_name", kKdaOpType},
                         {"provider", kEpName},
                         {"device", device_.name},
                         {"dtype", NameOf(p.dtype)},
                         {"sequences", std::to_string(p.num_seqs)},
                         {"tokens", std::to_string(p.batch * p.seq_len)}});
  }

  const std::shared_ptr<Session> session_;
  const Api& api_;
  const Device& device_;
  const std::string node_;
  const KdaAttributes attributes_;
};

// Takes the memory for the node's workspace where its shapes are known already.
OrtStatus* PrepareWorkspace(Session* session, const OrtKernelInfo* info, const KdaAttributes& attributes) {
  const Api& api = session->api();
  KdaOperands operands;
  DF_RETURN_IF_ERROR(DescribeKernel(api, info, operands.inputs.data(), kKdaInputs, operands.outputs.data(), 0));
  for (const Operand& operand : operands.inputs)
    if (operand.present && !operand.Known()) return nullptr;
  operands.outputs[kO].present = true;
  kda::Params params;
  // What is wrong with the node by now, its run reports.
  if (!BindGeometry(attributes, operands, &params).empty()) return nullptr;
  // Which operands there are decides as well. Nobody reads them yet.
  alignas(256) static const char kStandIn[256] = {};
  std::array<const void*, kKdaInputs> data{};
  for (size_t i = 0; i < kKdaInputs; ++i) data[i] = operands.inputs[i].present ? kStandIn : nullptr;
  BindInputs(data, &params);
  if (!session->device().cuda) {
    const size_t bytes = kda::cpu_refusal(params) ? 0 : kda::cpu_workspace_bytes(params);
    return bytes == 0 ? nullptr : WarmArena(api, info, bytes);
  }
  DF_RETURN_IF_ERROR(UseCudaDevice(api, session->device()));
  const bool refused = kda::cuda_refusal(params, session->device().compute_capability) != nullptr;
  return refused ? nullptr : session->workspace().Grow(info, kda::cuda_workspace_bytes(params));
}

}  // namespace

OrtStatus* KdaRefusal(const Api& api, const Device& device, const OrtNode* node, std::string* reason) {
  DF_RETURN_IF_ERROR(RefuseUnknownAttribute(api, node, KdaAttributeTypes(), reason));
  if (!reason->empty()) return nullptr;
  KdaAttributes attributes;
  *reason = ReadAttributes(NodeAttributes(api, node), &attributes);
  if (!reason->empty()) return nullptr;

  KdaOperands operands;
  DF_RETURN_IF_ERROR(
      DescribeNode(api, node, operands.inputs.data(), kKdaInputs, operands.outputs.data(), kKdaOutputs, reason));
  if (!reason->empty()) return nullptr;
  kda::Params params;
  *reason = BindGeometry(attributes, operands, &params);
  if (!reason->empty()) return nullptr;
  if (device.cuda) *reason = MissingCode(device);
  if (!reason->empty()) return nullptr;
  const char* refusal = device.cuda ? kda::cuda_refusal(params, device.compute_capability) : kda::cpu_refusal(params);
  if (refusal) *reason = refusal;
  return nullptr;
}

OrtStatus* CreateKdaKernel(std::shared_ptr<Session> session, const OrtKernelInfo* info, OrtKernelImpl** kernel) {
  const Api& api = session->api();
  std::string node;
  DF_RETURN_IF_ERROR(NodeName(api, info, &node));
  KdaAttributes attributes;
  const std::string reason = ReadAttributes(KernelAttributes(api, info), &attributes);
  if (!reason.empty()) return MakeStatus(api, ORT_INVALID_ARGUMENT, NodeText(kKdaOpType, node) + reason);
  Owned<OrtKernelImpl> made(new KdaKernel(session, node, attributes),
                            [](OrtKernelImpl* unused) noexcept { unused->Release(unused); });
  DF_RETURN_IF_ERROR(WithNode(api, kKdaOpType, node, PrepareWorkspace(session.get(), info, attributes)));
  *kernel = made.release();
  return nullptr;
}

}  // namespace deltafuse::ep
