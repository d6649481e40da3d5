#include "kernels.h"

#include <initializer_list>
#include <limits>
#include <memory>
#include <utility>

#include "cuda_backend.h"
#include "kda_binding.h"
#include "kda_kernel.h"
#include "mla_binding.h"
#include "mla_kernel.h"
#include "moe_binding.h"
#include "moe_kernel.h"
#include "session.h"

namespace deltafuse::ep {
namespace {

const KernelState& State(void* state) { return *static_cast<const KernelState*>(state); }

template <OrtStatus* (*create)(std::shared_ptr<Session>, const OrtKernelInfo*, OrtKernelImpl**)>
OrtStatus* ORT_API_CALL CreateFused(void* state, const OrtKernelInfo* info, OrtKernelImpl** kernel) noexcept {
  const Api& api = *State(state).api;
  return Guard(api, [&]() -> OrtStatus* {
    std::shared_ptr<Session> session;
    DF_RETURN_IF_ERROR(FindSession(api, info, &session));
    return create(std::move(session), info, kernel);
  });
}

const std::vector<FusedOp>& FusedOps() {
  static const std::vector<FusedOp> ops = {
      {kKdaOpType,
       kKdaVersion,
       KdaRefusal,
       CreateFused<CreateKdaKernel>,
       {kConvState, kInitialState},
       {kPresentConvState, kFinalState}},
      {kMlaOpType,
       kMlaVersion,
       MlaRefusal,
       CreateFused<CreateMlaKernel>,
       {MlaInput::kPastLatent, MlaInput::kPastKRope, MlaInput::kPastLatentScale, MlaInput::kPastKey,
        MlaInput::kPastValue},
       {MlaOutput::kPresentLatent, MlaOutput::kPresentKRope, MlaOutput::kPresentLatentScale, MlaOutput::kPresentKey,
        MlaOutput::kPresentValue}},
      {kMoeOpType, kMoeVersion, MoeRefusal, CreateFused<CreateMoeKernel>, {}, {}},
  };
  return ops;
}

template <bool to_host>
OrtStatus* ORT_API_CALL CreateCopy(void* state, const OrtKernelInfo* info, OrtKernelImpl** kernel) noexcept {
  const Api& api = *State(state).api;
  return Guard(api, [&]() -> OrtStatus* {
    std::shared_ptr<Session> session;
    DF_RETURN_IF_ERROR(FindSession(api, info, &session));
    return CreateCudaCopyKernel(std::move(session), to_host, kernel);
  });
}

struct KernelEntry {
  const char* domain;
  const char* op_type;
  int since_version;
  int until_version;
  OrtKernelCreateFunc create;
};

class Builder {
 public:
  Builder(const KernelState& state, OrtKernelRegistry* registry)
      : state_(state), api_(*state.api), registry_(registry), def_(nullptr, api_.ep->ReleaseKernelDefBuilder) {}

  OrtStatus* Start(const KernelEntry& entry) {
    create_ = entry.create;
    OrtKernelDefBuilder* def = nullptr;
    DF_RETURN_IF_ERROR(api_.ep->CreateKernelDefBuilder(&def));
    def_.reset(def);
    DF_RETURN_IF_ERROR(api_.ep->KernelDefBuilder_SetOperatorType(def, entry.op_type));
    DF_RETURN_IF_ERROR(api_.ep->KernelDefBuilder_SetDomain(def, entry.domain));
    DF_RETURN_IF_ERROR(api_.ep->KernelDefBuilder_SetSinceVersion(def, entry.since_version, entry.until_version));
    return api_.ep->KernelDefBuilder_SetExecutionProvider(def, kEpName);
  }

  OrtKernelDefBuilder* def() { return def_.get(); }

  OrtStatus* Add() {
    OrtKernelDef* built = nullptr;
    DF_RETURN_IF_ERROR(api_.ep->KernelDefBuilder_Build(def_.get(), &built));
    const Owned<OrtKernelDef> owned = Own(built, api_.ep->ReleaseKernelDef);
    return api_.ep->KernelRegistry_AddKernel(registry_, built, create_, const_cast<KernelState*>(&state_));
  }

 private:
  const KernelState& state_;
  const Api& api_;
  OrtKernelRegistry* registry_;
  Owned<OrtKernelDefBuilder> def_;
  OrtKernelCreateFunc create_ = nullptr;
};

OrtStatus* AddFused(const KernelState& state, const FusedOp& op, OrtKernelRegistry* registry) {
  Builder builder(state, registry);
  DF_RETURN_IF_ERROR(builder.Start({kDomain, op.op_type, op.version, op.version, op.create}));
  // Types are not constrained here: the schema that ORT makes for a call of a function has no type parameters to
  // constrain, so the op's refusal checks them.
  if (!op.inputs.empty())
    DF_RETURN_IF_ERROR(state.api->ep->KernelDefBuilder_AddInputOutputMutableAliases(
        builder.def(), op.inputs.data(), op.outputs.data(), op.inputs.size()));
  return builder.Add();
}

// ORT puts these two at borders with the CPU. Without ours it would run its CPU copy on device pointers.
OrtStatus* AddCopies(const KernelState& state, OrtKernelRegistry* registry) {
  constexpr int kAnyVersion = std::numeric_limits<int>::max();
  Builder builder(state, registry);
  DF_RETURN_IF_ERROR(builder.Start({"", "MemcpyFromHost", 1, kAnyVersion, CreateCopy<false>}));
  DF_RETURN_IF_ERROR(state.api->ep->KernelDefBuilder_SetInputMemType(builder.def(), 0, OrtMemTypeCPUInput));
  DF_RETURN_IF_ERROR(builder.Add());
  DF_RETURN_IF_ERROR(builder.Start({"", "MemcpyToHost", 1, kAnyVersion, CreateCopy<true>}));
  DF_RETURN_IF_ERROR(state.api->ep->KernelDefBuilder_SetOutputMemType(builder.def(), 0, OrtMemTypeCPUOutput));
  return builder.Add();
}

}  // namespace

const FusedOp* FindFusedOp(std::string_view op_type) {
  for (const FusedOp& op : FusedOps())
    if (op_type == op.op_type) return &op;
  return nullptr;
}

OrtStatus* CreateKernelRegistry(const KernelState& state, OrtKernelRegistry** registry) {
  const Api& api = *state.api;
  OrtKernelRegistry* created = nullptr;
  DF_RETURN_IF_ERROR(api.ep->CreateKernelRegistry(&created));
  Owned<OrtKernelRegistry> owned = Own(created, api.ep->ReleaseKernelRegistry);
  for (const FusedOp& op : FusedOps()) DF_RETURN_IF_ERROR(AddFused(state, op, created));
  if (state.device->cuda) DF_RETURN_IF_ERROR(AddCopies(state, created));
  *registry = owned.release();
  return nullptr;
}

}  // namespace deltafuse::ep
