#include "mla_kernel.h"

#include <algorithm>
#include <utility>

#include "cuda_backend.h"
#include "kernel_support.h"
#include "mla_binding.h"
#include "profiler.h"
#include "workspace.h"

namespace deltafuse::ep {
namespace {

using In = MlaInput;
using Out = MlaOutput;

// What the profile shows as the kernel's name.
const char* KernelName(const mla::Params& p) {
  return p.seq_len <= 1 ? "deltafuse_mla_decode" : "deltafuse_mla_prefill";
}

class MlaKernel final : public OrtKernelImpl {
 public:
  MlaKernel(std::shared_ptr<Session> session, std::string node, MlaAttributes attributes, MlaOperands operands)
      : OrtKernelImpl{},
        session_(std::move(session)),
        api_(session_->api()),
        device_(session_->device()),
        node_(std::move(node)),
        attributes_(std::move(attributes)),
        operands_(std::move(operands)) {
    session_->KernelCreated();
    ort_version_supported = kOrtApiVersion;
    Compute = [](OrtKernelImpl* self, OrtKernelContext* context) noexcept -> OrtStatus* {
      auto* kernel = static_cast<MlaKernel*>(self);
      return Guard(kernel->api_,
                   [&] { return WithNode(kernel->api_, kMlaOpType, kernel->node_, kernel->Run(context)); });
    };
    Release = [](OrtKernelImpl* self) noexcept { delete static_cast<MlaKernel*>(self); };
    if (!device_.cuda) return;
    PrePackWeight = [](OrtKernelImpl* self, const OrtValue* tensor, int input, OrtAllocator*,
                       OrtSharedPrePackedWeightCache*, bool* packed) noexcept -> OrtStatus* {
      auto* kernel = static_cast<MlaKernel*>(self);
      *packed = false;
      if (input != static_cast<int>(In::kKvBWeight)) return nullptr;
      return Guard(kernel->api_,
                   [&] { return WithNode(kernel->api_, kMlaOpType, kernel->node_, kernel->Pack(tensor, packed)); });
    };
  }
  ~MlaKernel() {
    if (layer_ && CudaIsThere()) mla::cuda_destroy(layer_);
    session_->faults().Remove(fault_);
    session_->KernelGone();
  }

  // Takes the memory for the node's workspace where its shapes are known already.
  OrtStatus* Prepare(const OrtKernelInfo* info) {
    mla::Params params;
    const std::string reason = BindGeometry(attributes_, operands_, &params);
    if (device_.cuda) {
      if (!reason.empty()) return Fail(reason);
      fault_ = session_->faults().Add(NodeText(kMlaOpType, node_), mla::fault_text);
      DF_RETURN_IF_ERROR(MakeLayer(params, session_->options().stream));
    }
    for (const Operand& operand : operands_.inputs)
      if (operand.present && !operand.Known()) return nullptr;
    // What is wrong with the node by now, its run reports.
    if (!reason.empty()) return nullptr;
    BindStandIns(operands_, &params);
    if (device_.cuda) return session_->workspace().Grow(info, mla::cuda_workspace_bytes(layer_, params));
    return mla::cpu_refusal(params) ? nullptr : WarmArena(api_, info, mla::cpu_workspace_bytes(params));
  }

 private:
  OrtStatus* Fail(const std::string& reason) const { return MakeStatus(api_, ORT_INVALID_ARGUMENT, reason); }

  // Makes the device current. False: the device is gone, with its memory.
  bool CudaIsThere() const {
    OrtStatus* status = UseCudaDevice(api_, device_);
    if (status) api_.ort->ReleaseStatus(status);
    return status == nullptr;
  }

  // Makes the layer anew: with `params.kv_b_weight` packed, if it is not null.
  OrtStatus* MakeLayer(const mla::Params& params, void* stream) {
    DF_RETURN_IF_ERROR(UseCudaDevice(api_, device_));
    mla::CudaLayer* made = nullptr;
    if (const char* failure = mla::cuda_create(params, stream, &made)) return Fail(failure);
    if (layer_) mla::cuda_destroy(layer_);
    layer_ = made;
    return nullptr;
  }

  // A constant weight goes into the layer; ORT then frees its own copy.
  OrtStatus* Pack(const OrtValue* tensor, bool* packed) {
    const OrtMemoryInfo* memory = nullptr;
    DF_RETURN_IF_ERROR(api_.ort->GetTensorMemoryInfo(tensor, &memory));
    OrtMemoryInfoDeviceType where = OrtMemoryInfoDeviceType_CPU;
    api_.ort->MemoryInfoGetDeviceType(memory, &where);
    if (where != OrtMemoryInfoDeviceType_GPU) return nullptr;
    Operand weight;
    const void* data = nullptr;
    DF_RETURN_IF_ERROR(DescribeValue(api_, tensor, &weight, &data));
    mla::Params params;
    MlaOperands operands = operands_;
    operands.inputs[In::kKvBWeight] = weight;
    if (const std::string reason = BindGeometry(attributes_, operands, &params); !reason.empty()) return Fail(reason);
    params.kv_b_weight = data;
    void* const stream = session_->options().stream;
    DF_RETURN_IF_ERROR(MakeLayer(params, stream));
    // ORT frees the weight when this returns.
    DF_RETURN_IF_ERROR(SynchronizeCuda(api_, device_, stream));
    weight_ = weight;
    packed_ = *packed = true;
    return nullptr;
  }

  OrtStatus* Run(OrtKernelContext* context) {
    MlaOperands operands;
    std::array<const void*, In::kCount> data{};
    size_t count = 0;
    DF_RETURN_IF_ERROR(api_.ort->KernelContext_GetInputCount(context, &count));
    for (size_t i = 0; i < std::min<size_t>(count, In::kCount); ++i) {
      if (packed_ && i == In::kKvBWeight) {  // ORT may have freed it
        operands.inputs[i] = weight_;
        continue;
      }
      const OrtValue* value = nullptr;
      DF_RETURN_IF_ERROR(api_.ort->KernelContext_GetInput(context, i, &value));
      DF_RETURN_IF_ERROR(DescribeValue(api_, value, &operands.inputs[i], &data[i]));
    }
    // Outputs are made from the inputs' geometry; which of them there are is known since the kernel's creation.
    operands.outputs = operands_.outputs;
    mla::Params params;
    if (const std::string reason = BindGeometry(attributes_, operands, &params); !reason.empty()) return Fail(reason);
    BindInputs(data, &params);

    DF_RETURN_IF_ERROR(api_.ort->KernelContext_GetOutputCount(context, &count));
    const std::array<Shape, Out::kCount> shapes = OutputShapes(params);
    const auto types = OutputTypes(params);
    std::array<void*, Out::kCount> results{};
    for (size_t i = 0; i < std::min<size_t>(count, Out::kCount); ++i) {
      if (!operands.outputs[i].present) continue;
      const char* name = kMlaOutputNames[i];
      OrtValue* value = nullptr;
      const size_t bytes = shapes[i].Elements() * BytesOf(types[i]);
      if (OrtStatus* status =
              api_.ort->KernelContext_GetOutput(context, i, shapes[i].dims.data(), shapes[i].rank, &value))
        return NoMemory(api_, context, device_.memory, std::string("output ") + name, bytes, status);
      if (!value) continue;
      Operand made;
      const void* unused = nullptr;
      DF_RETURN_IF_ERROR(DescribeValue(api_, value, &made, &unused));
      if (made.type != types[i])
        return Fail(Text(name, " is ", TypeName(made.type), ": expected ", TypeName(types[i])));
      DF_RETURN_IF_ERROR(api_.ort->GetTensorMutableData(value, &results[i]));
      if (!results[i] && bytes != 0)
        return NoMemory(api_, context, device_.memory, std::string("output ") + name, bytes, nullptr);
    }
    BindOutputs(results, &params);
    return device_.cuda ? RunOnCuda(context, params) : RunOnCpu(context, params);
  }

  OrtStatus* RunOnCpu(const OrtKernelContext* context, const mla::Params& params) const {
    if (const char* reason = mla::cpu_refusal(params)) return Fail(reason);
    Workspace workspace(api_);
    DF_RETURN_IF_ERROR(workspace.Take(context, device_.memory, mla::cpu_workspace_bytes(params)));
    KernelScope scope(*session_, KernelName(params), node_, nullptr);
    DescribeCall(params, &scope);
    Pool pool{&api_, context, nullptr};
    const char* failure = mla::cpu_forward(params, workspace.data(), RunOnPool, &pool);
    if (pool.status) return pool.status;
    return failure ? Fail(failure) : nullptr;
  }

  OrtStatus* RunOnCuda(const OrtKernelContext* context, mla::Params params) const {
    DF_RETURN_IF_ERROR(UseCudaDevice(api_, device_));
    if (const char* reason = mla::cuda_refusal(params, device_.compute_capability)) return Fail(reason);
    params.fault = fault_;
    void* stream = nullptr;
    DF_RETURN_IF_ERROR(session_->ComputeStream(context, &stream));
    Workspace workspace(api_);
    DF_RETURN_IF_ERROR(workspace.Take(context, device_.memory, mla::cuda_workspace_bytes(layer_, params),
                                      &session_->workspace(), stream));
    KernelScope scope(*session_, KernelName(params), node_, stream);
    DescribeCall(params, &scope);
    const char* failure = mla::cuda_forward(layer_, params, workspace.data(), stream);
    return failure ? Fail(failure) : nullptr;
  }

  void DescribeCall(const mla::Params& p, KernelScope* scope) const {
    if (!scope->profiled()) return;
    scope->SetArguments({{"op_name", kMlaOpType},
                         {"provider", kEpName},
                         {"device", device_.name},
                         {"dtype", TypeName(OutputTypes(p)[Out::kO])},
                         {"sequences", std::to_string(p.batch)},
                         {"tokens", std::to_string(p.batch * p.seq_len)}});
  }

  const std::shared_ptr<Session> session_;
  const Api& api_;
  const Device& device_;
  const std::string node_;
  const MlaAttributes attributes_;
  const MlaOperands operands_;  // as far as they are known when the kernel is created
  mla::CudaLayer* layer_ = nullptr;
  uint32_t* fault_ = nullptr;
  bool packed_ = false;  // the weight is in the layer
  Operand weight_;
};

}  // namespace

OrtStatus* MlaRefusal(const Api& api, const Device& device, const OrtNode* node, std::string* reason) {
  DF_RETURN_IF_ERROR(RefuseUnknownAttribute(api, node, MlaAttributeTypes(), reason));
  if (!reason->empty()) return nullptr;
  MlaAttributes attributes;
  *reason = ReadAttributes(NodeAttributes(api, node), &attributes);
  if (!reason->empty()) return nullptr;
  MlaOperands operands;
  DF_RETURN_IF_ERROR(
      DescribeNode(api, node, operands.inputs.data(), In::kCount, operands.outputs.data(), Out::kCount, reason));
  if (!reason->empty()) return nullptr;
  mla::Params params;
  *reason = BindGeometry(attributes, operands, &params);
  if (!reason->empty()) return nullptr;
  if (device.cuda) *reason = MissingCode(device);
  if (!reason->empty()) return nullptr;
  const char* refusal = device.cuda ? mla::cuda_refusal(params, device.compute_capability) : mla::cpu_refusal(params);
  if (refusal) *reason = refusal;
  return nullptr;
}

OrtStatus* CreateMlaKernel(std::shared_ptr<Session> session, const OrtKernelInfo* info, OrtKernelImpl** kernel) {
  const Api& api = session->api();
  std::string node;
  DF_RETURN_IF_ERROR(NodeName(api, info, &node));
  MlaAttributes attributes;
  const std::string reason = ReadAttributes(KernelAttributes(api, info), &attributes);
  if (!reason.empty()) return MakeStatus(api, ORT_INVALID_ARGUMENT, NodeText(kMlaOpType, node) + reason);
  MlaOperands operands;
  DF_RETURN_IF_ERROR(
      DescribeKernel(api, info, operands.inputs.data(), In::kCount, operands.outputs.data(), Out::kCount));
  auto* made = new MlaKernel(std::move(session), node, std::move(attributes), std::move(operands));
  Owned<OrtKernelImpl> owned(made, [](OrtKernelImpl* unused) noexcept { unused->Release(unused); });
  DF_RETURN_IF_ERROR(WithNode(api, kMlaOpType, node, made->Prepare(info)));
  *kernel = owned.release();
  return nullptr;
}

}  // namespace deltafuse::ep
