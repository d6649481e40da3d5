#include "kernels.h"

#include <initializer_list>
#include <limits>
#include <memory>
#include <utility>

#include "cuda_backend.h"
#include "kda_binding.h"
#include "kda_kernel.h"
#include "session.h"

namespace deltafuse::ep {
namespace {

const KernelState& State(void* state) { return *static_cast<const KernelState*>(state); }

OrtStatus* ORT_API_CALL CreateKda(void* state, const OrtKernelInfo* info, OrtKernelImpl** kernel) noexcept {
  const Api& api = *State(state).api;
  return Guard(api, [&]() -> OrtStatus* {
    std::shared_ptr<Session> session;
    DF_RETURN_IF_ERROR(FindSession(api, info, &session));
    return CreateKdaKernel(std::move(session), info, kernel);
  });
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

OrtStatus* AddKda(const KernelState& state, OrtKernelRegistry* registry) {
  Builder builder(state, registry);
  DF_RETURN_IF_ERROR(builder.Start({kKdaDomain, kKdaOpType, kKdaVersion, kKdaVersion, CreateKda}));
  // The states may be updated in place. Types are not constrained here: the schema that ORT makes for a call of a
  // function has no type parameters to constrain, so KdaRefusal checks them.
  const int inputs[] = {kConvState, kInitialState};
  const int outputs[] = {kPresentConvState, kFinalState};
  DF_RETURN_IF_ERROR(state.api->ep->KernelDefBuilder_AddInputOutputMutableAliases(builder.def(), inputs, outputs, 2));
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

OrtStatus* CreateKernelRegistry(const KernelState& state, OrtKernelRegistry** registry) {
  const Api& api = *state.api;
  OrtKernelRegistry* created = nullptr;
  DF_RETURN_IF_ERROR(api.ep->CreateKernelRegistry(&created));
  Owned<OrtKernelRegistry> owned = Own(created, api.ep->ReleaseKernelRegistry);
  DF_RETURN_IF_ERROR(AddKda(state, created));
  if (state.device->cuda) DF_RETURN_IF_ERROR(AddCopies(state, created));
  *registry = owned.release();
  return nullptr;
}

}  // namespace deltafuse::ep
