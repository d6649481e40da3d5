#include "moe_kernel.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cuda_backend.h"
#include "kernel_support.h"
#include "moe_binding.h"
#include "profiler.h"
#include "shared_weights.h"
#include "workspace.h"

namespace deltafuse::ep {
namespace {

using In = MoeInput;
using Out = MoeOutput;
using Inputs = std::array<const void*, In::kCount>;

// What the profile shows as the kernel's name.
const char* KernelName(const moe::Params& p) {
  return p.num_tokens <= 1 ? "deltafuse_moe_decode" : "deltafuse_moe_prefill";
}

// Null for a tensor that is not in the memory of a CUDA device.
OrtStatus* DeviceData(const Api& api, const OrtValue* tensor, const void** data) {
  const OrtMemoryInfo* memory = nullptr;
  DF_RETURN_IF_ERROR(api.ort->GetTensorMemoryInfo(tensor, &memory));
  OrtMemoryInfoDeviceType where = OrtMemoryInfoDeviceType_CPU;
  api.ort->MemoryInfoGetDeviceType(memory, &where);
  *data = nullptr;
  if (where != OrtMemoryInfoDeviceType_GPU) return nullptr;
  Operand unused;
  return DescribeValue(api, tensor, &unused, data);
}

// Layers of this process by what they were packed from. Sessions may outlive static objects, so it is never deleted.
SharedByContent<moe::CudaLayer>& Layers() {
  static auto* layers = new SharedByContent<moe::CudaLayer>;
  return *layers;
}

// Weights on a device are packed into a layer when the session is made: one matrix at a time, whose own copy ORT frees
// before the next. A matrix that ORT does not offer (prepacking is switched off) is packed in the first run. A layer
// whose matrices were all offered is exchanged for one that another session has packed from the same bytes. Calls only
// read a layer.
class MoeKernel final : public OrtKernelImpl {
 public:
  MoeKernel(std::shared_ptr<Session> session, std::string node, MoeAttributes attributes, MoeOperands operands)
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
      auto* kernel = static_cast<MoeKernel*>(self);
      return Guard(kernel->api_,
                   [&] { return WithNode(kernel->api_, kMoeOpType, kernel->node_, kernel->Run(context)); });
    };
    Release = [](OrtKernelImpl* self) noexcept { delete static_cast<MoeKernel*>(self); };
    if (!device_.cuda) return;
    PrePackWeight = [](OrtKernelImpl* self, const OrtValue* tensor, int input, OrtAllocator*,
                       OrtSharedPrePackedWeightCache*, bool* packed) noexcept -> OrtStatus* {
      auto* kernel = static_cast<MoeKernel*>(self);
      *packed = false;
      return Guard(kernel->api_, [&] {
        return WithNode(kernel->api_, kMoeOpType, kernel->node_,
                        kernel->Offer(tensor, static_cast<size_t>(input), packed));
      });
    };
  }
  ~MoeKernel() {
    layer_.reset();
    session_->KernelGone();
  }

  // Makes the layer, and takes the memory for the node's workspace where its shapes are known already.
  OrtStatus* Prepare(const OrtKernelInfo* info) {
    moe::Params params;
    const std::string reason = BindGeometry(attributes_, operands_, &params);
    if (device_.cuda) {
      if (!reason.empty()) return Fail(reason);
      DF_RETURN_IF_ERROR(UseCudaDevice(api_, device_));
      moe::CudaLayer* layer = nullptr;
      if (const char* failure = moe::cuda_create(params, session_->options().stream, &layer)) return Fail(failure);
      layer_ = Held(layer);
      DF_RETURN_IF_ERROR(FindConstants(info));
    }
    for (const size_t tokens : {size_t{In::kX}, size_t{In::kRouterLogits}})
      if (operands_.inputs[tokens].present && !operands_.inputs[tokens].Known()) return nullptr;
    // What is wrong with the node by now, its run reports.
    if (!reason.empty()) return nullptr;
    // Which operands there are decides as well. Nobody reads them yet.
    alignas(256) static const char kStandIn[256] = {};
    Inputs data{};
    for (size_t i = 0; i < In::kCount; ++i) data[i] = operands_.inputs[i].present ? kStandIn : nullptr;
    BindInputs(data, &params);
    if (device_.cuda) return session_->workspace().Grow(info, moe::cuda_workspace_bytes(layer_.get(), params));
    return moe::cpu_refusal(params) ? nullptr : WarmArena(api_, info, moe::cpu_workspace_bytes(params));
  }

 private:
  OrtStatus* Fail(const std::string& reason) const { return MakeStatus(api_, ORT_INVALID_ARGUMENT, reason); }

  // A layer that goes with its last user, of whatever session.
  std::shared_ptr<moe::CudaLayer> Held(moe::CudaLayer* layer) const {
    return {layer, [api = api_, device = device_](moe::CudaLayer* gone) {
              OrtStatus* status = UseCudaDevice(api, device);
              if (!status) return moe::cuda_destroy(gone);
              api.ort->ReleaseStatus(status);  // the device is gone, with its memory
            }};
  }

  // Takes a matrix into the hash of the layer's contents.
  void Hash(size_t weight, const Inputs& data) {
    content_.Add(&weight, sizeof(weight));
    for (size_t i = weight; i < weight + 3 && hashed_; ++i) {
      const Operand& operand = operands_.inputs[i];
      if (!operand.present) continue;
      hashed_ = operand.Known();
      if (!hashed_) return;
      size_t bytes = BytesOf(operand.type);
      for (int64_t axis = 0; axis < operand.rank; ++axis) bytes *= static_cast<size_t>(operand.dims[axis]);
      OrtStatus* status = HashCudaMemory(api_, device_, session_->options().stream, data[i], bytes, &content_);
      if (!status) continue;
      api_.ort->ReleaseStatus(status);  // nothing is shared then
      hashed_ = false;
    }
  }

  // Takes the layer of another session that has the same contents, or offers this one.
  OrtStatus* Share() {
    moe::Params p;
    if (const std::string reason = BindGeometry(attributes_, operands_, &p); !reason.empty()) return Fail(reason);
    std::string form = Text(device_.ordinal, ' ', static_cast<int>(p.dtype), ' ', p.num_experts, ' ', p.hidden_size,
                            ' ', p.intermediate_size, ' ', p.shared_intermediate_size, ' ', p.gated);
    for (const MoeMatrix& matrix : kMoeMatrices) {
      const moe::Matrix& m = p.*matrix.field;
      form += Text(' ', static_cast<int>(m.format), ' ', m.has_zero_point, ' ', m.scale_float32, ' ', m.block_size, ' ',
                   m.block_rows);
    }
    content_.Add(form.data(), form.size());
    layer_ = Layers().Share(content_.Get(), layer_);
    return nullptr;
  }

  // Scales and zero points that are there when the kernel is made. ORT offers them after their weights.
  OrtStatus* FindConstants(const OrtKernelInfo* info) {
    for (const MoeMatrix& matrix : kMoeMatrices) {
      for (const size_t input : {matrix.weight + 1, matrix.weight + 2}) {
        if (!operands_.inputs[input].present) continue;
        int constant = 0;
        const OrtValue* value = nullptr;
        DF_RETURN_IF_ERROR(api_.ort->KernelInfoGetConstantInput_tensor(info, input, &constant, &value));
        if (constant && value) DF_RETURN_IF_ERROR(DeviceData(api_, value, &constants_[input]));
      }
    }
    return nullptr;
  }

  // Packs the matrix whose weight is `data[matrix.weight]` into the layer.
  OrtStatus* Pack(const MoeMatrix& matrix, const Inputs& data, void* stream) {
    moe::Params params;
    if (const std::string reason = BindGeometry(attributes_, operands_, &params); !reason.empty()) return Fail(reason);
    moe::Matrix& m = params.*matrix.field;
    m.data = data[matrix.weight];
    m.scale = data[matrix.weight + 1];
    m.zero_point = data[matrix.weight + 2];
    DF_RETURN_IF_ERROR(UseCudaDevice(api_, device_));
    if (const char* failure = moe::cuda_pack(layer_.get(), params, stream)) return Fail(failure);
    // The weights may be freed when this returns.
    DF_RETURN_IF_ERROR(SynchronizeCuda(api_, device_, stream));
    packed_[matrix.weight] = true;
    return nullptr;
  }

  // A constant input: a weight goes into the layer with its scales and zero points. ORT frees what is packed.
  OrtStatus* Offer(const OrtValue* tensor, size_t input, bool* packed) {
    for (const MoeMatrix& matrix : kMoeMatrices) {
      if (input < matrix.weight || input > matrix.weight + 2) continue;
      if (input != matrix.weight) {
        *packed = packed_[matrix.weight];
        return nullptr;
      }
      Inputs data = constants_;
      DF_RETURN_IF_ERROR(DeviceData(api_, tensor, &data[input]));
      bool complete = data[input] != nullptr;
      for (const size_t part : {input + 1, input + 2})
        if (operands_.inputs[part].present && !data[part]) complete = false;
      if (!complete) return nullptr;
      if (session_->options().share_weights && hashed_) Hash(input, data);
      DF_RETURN_IF_ERROR(Pack(matrix, data, session_->options().stream));
      *packed = true;
      if (session_->options().share_weights && hashed_ && AllPacked()) return Share();
    }
    return nullptr;
  }

  bool AllPacked() const {
    for (const MoeMatrix& matrix : kMoeMatrices)
      if (operands_.inputs[matrix.weight].present && !packed_[matrix.weight]) return false;
    return true;
  }

  OrtStatus* Run(OrtKernelContext* context) {
    MoeOperands operands;
    Inputs data{};
    size_t count = 0;
    DF_RETURN_IF_ERROR(api_.ort->KernelContext_GetInputCount(context, &count));
    for (size_t i = 0; i < std::min<size_t>(count, In::kCount); ++i) {
      if (InLayer(i)) {  // ORT may have freed it
        operands.inputs[i] = operands_.inputs[i];
        continue;
      }
      const OrtValue* value = nullptr;
      DF_RETURN_IF_ERROR(api_.ort->KernelContext_GetInput(context, i, &value));
      DF_RETURN_IF_ERROR(DescribeValue(api_, value, &operands.inputs[i], &data[i]));
    }
    moe::Params params;
    if (const std::string reason = BindGeometry(attributes_, operands, &params); !reason.empty()) return Fail(reason);
    BindInputs(data, &params);

    DF_RETURN_IF_ERROR(api_.ort->KernelContext_GetOutputCount(context, &count));
    const std::array<Shape, Out::kCount> shapes = OutputShapes(params, operands.inputs[In::kX]);
    const auto types = OutputTypes(operands.inputs[In::kX]);
    std::array<void*, Out::kCount> results{};
    for (size_t i = 0; i < std::min<size_t>(count, Out::kCount); ++i) {
      if (!operands_.outputs[i].present) continue;
      const std::string what = std::string("output ") + kMoeOutputNames[i];
      const size_t bytes = shapes[i].Elements() * BytesOf(types[i]);
      OrtValue* value = nullptr;
      if (OrtStatus* status =
              api_.ort->KernelContext_GetOutput(context, i, shapes[i].dims.data(), shapes[i].rank, &value))
        return NoMemory(api_, context, device_.memory, what, bytes, status);
      if (!value) continue;
      Operand made;
      const void* unused = nullptr;
      DF_RETURN_IF_ERROR(DescribeValue(api_, value, &made, &unused));
      if (made.type != types[i])
        return Fail(Text(kMoeOutputNames[i], " is ", TypeName(made.type), ": expected ", TypeName(types[i])));
      DF_RETURN_IF_ERROR(api_.ort->GetTensorMutableData(value, &results[i]));
      if (!results[i] && bytes != 0) return NoMemory(api_, context, device_.memory, what, bytes, nullptr);
    }
    params.y = results[Out::kY];
    params.expert_ids = static_cast<int64_t*>(results[Out::kExpertIds]);
    params.expert_weights = static_cast<float*>(results[Out::kExpertWeights]);
    if (params.num_tokens == 0) return nullptr;
    return device_.cuda ? RunOnCuda(context, data, params) : RunOnCpu(context, params);
  }

  // Whether an input is part of a matrix that the layer holds.
  bool InLayer(size_t input) const {
    for (const MoeMatrix& matrix : kMoeMatrices)
      if (input >= matrix.weight && input <= matrix.weight + 2) return packed_[matrix.weight];
    return false;
  }

  OrtStatus* RunOnCpu(const OrtKernelContext* context, const moe::Params& params) const {
    if (const char* reason = moe::cpu_refusal(params)) return Fail(reason);
    Workspace workspace(api_);
    DF_RETURN_IF_ERROR(workspace.Take(context, device_.memory, moe::cpu_workspace_bytes(params)));
    KernelScope scope(*session_, KernelName(params), node_, nullptr);
    DescribeCall(params, &scope);
    Pool pool{&api_, context, nullptr};
    const char* failure = moe::cpu_forward(params, workspace.data(), RunOnPool, &pool);
    if (pool.status) return pool.status;
    return failure ? Fail(failure) : nullptr;
  }

  OrtStatus* RunOnCuda(const OrtKernelContext* context, const Inputs& data, moe::Params params) {
    DF_RETURN_IF_ERROR(UseCudaDevice(api_, device_));
    if (const char* reason = moe::cuda_refusal(params, device_.compute_capability)) return Fail(reason);
    void* stream = nullptr;
    DF_RETURN_IF_ERROR(session_->ComputeStream(context, &stream));
    for (const MoeMatrix& matrix : kMoeMatrices) {
      if (operands_.inputs[matrix.weight].present && !packed_[matrix.weight])
        DF_RETURN_IF_ERROR(Pack(matrix, data, stream));
      params.*matrix.field = WithoutData(params.*matrix.field);
    }
    Workspace workspace(api_);
    DF_RETURN_IF_ERROR(workspace.Take(context, device_.memory, moe::cuda_workspace_bytes(layer_.get(), params),
                                      &session_->workspace(), stream));
    KernelScope scope(*session_, KernelName(params), node_, stream);
    DescribeCall(params, &scope);
    const char* failure = moe::cuda_forward(layer_.get(), params, workspace.data(), stream);
    return failure ? Fail(failure) : nullptr;
  }

  static moe::Matrix WithoutData(moe::Matrix matrix) {
    matrix.data = matrix.scale = matrix.zero_point = nullptr;
    return matrix;
  }

  void DescribeCall(const moe::Params& p, KernelScope* scope) const {
    if (!scope->profiled()) return;
    scope->SetArguments({{"op_name", kMoeOpType},
                         {"provider", kEpName},
                         {"device", device_.name},
                         {"dtype", TypeName(operands_.inputs[In::kX].type)},
                         {"weights", attributes_.weight_format},
                         {"tokens", std::to_string(p.num_tokens)}});
  }

  const std::shared_ptr<Session> session_;
  const Api& api_;
  const Device& device_;
  const std::string node_;
  const MoeAttributes attributes_;
  const MoeOperands operands_;  // as far as they are known when the kernel is created
  std::shared_ptr<moe::CudaLayer> layer_;
  ContentHash content_;                    // of all matrices that were offered, in order
  bool hashed_ = true;                     // all of them are in it
  Inputs constants_{};                     // device pointers of scales and zero points
  std::array<bool, In::kCount> packed_{};  // by the matrix's weight
};

// On a device the weights must be constants: they are packed once.
OrtStatus* CheckConstants(const Api& api, const OrtNode* node, const MoeOperands& operands, std::string* reason) {
  size_t count = 0;
  DF_RETURN_IF_ERROR(api.ort->Node_GetNumInputs(node, &count));
  std::vector<const OrtValueInfo*> values(count);
  if (count) DF_RETURN_IF_ERROR(api.ort->Node_GetInputs(node, values.data(), count));
  for (const MoeMatrix& matrix : kMoeMatrices) {
    for (size_t i = matrix.weight; i < matrix.weight + 3 && i < count; ++i) {
      if (!operands.inputs[i].present || !values[i]) continue;
      bool constant = false;
      DF_RETURN_IF_ERROR(api.ort->ValueInfo_IsConstantInitializer(values[i], &constant));
      if (!constant) *reason = Text(kMoeInputNames[i], " is not a constant: the CUDA kernels pack weights once");
    }
  }
  return nullptr;
}

}  // namespace

OrtStatus* MoeRefusal(const Api& api, const Device& device, const OrtNode* node, std::string* reason) {
  DF_RETURN_IF_ERROR(RefuseUnknownAttribute(api, node, MoeAttributeTypes(), reason));
  if (!reason->empty()) return nullptr;
  MoeAttributes attributes;
  *reason = ReadAttributes(NodeAttributes(api, node), &attributes);
  if (!reason->empty()) return nullptr;
  MoeOperands operands;
  DF_RETURN_IF_ERROR(
      DescribeNode(api, node, operands.inputs.data(), In::kCount, operands.outputs.data(), Out::kCount, reason));
  if (!reason->empty()) return nullptr;
  moe::Params params;
  *reason = BindGeometry(attributes, operands, &params);
  if (!reason->empty()) return nullptr;
  if (device.cuda) *reason = MissingCode(device);
  if (!reason->empty()) return nullptr;
  const char* refusal = device.cuda ? moe::cuda_refusal(params, device.compute_capability) : moe::cpu_refusal(params);
  if (refusal) *reason = refusal;
  if (!reason->empty() || !device.cuda) return nullptr;
  return CheckConstants(api, node, operands, reason);
}

OrtStatus* CreateMoeKernel(std::shared_ptr<Session> session, const OrtKernelInfo* info, OrtKernelImpl** kernel) {
  const Api& api = session->api();
  std::string node;
  DF_RETURN_IF_ERROR(NodeName(api, info, &node));
  MoeAttributes attributes;
  const std::string reason = ReadAttributes(KernelAttributes(api, info), &attributes);
  if (!reason.empty()) return MakeStatus(api, ORT_INVALID_ARGUMENT, NodeText(kMoeOpType, node) + reason);
  MoeOperands operands;
  DF_RETURN_IF_ERROR(
      DescribeKernel(api, info, operands.inputs.data(), In::kCount, operands.outputs.data(), Out::kCount));
  auto* made = new MoeKernel(std::move(session), node, std::move(attributes), std::move(operands));
  Owned<OrtKernelImpl> owned(made, [](OrtKernelImpl* unused) noexcept { unused->Release(unused); });
  DF_RETURN_IF_ERROR(WithNode(api, kMoeOpType, node, made->Prepare(info)));
  *kernel = owned.release();
  return nullptr;
}

}  // namespace deltafuse::ep
