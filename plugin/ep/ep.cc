#include "ep.h"

#include <string_view>
#include <utility>
#include <vector>

#include "arena_allocator.h"
#include "build_info.h"
#include "cuda_backend.h"
#include "kernels.h"
#include "profiler.h"
#include "refusals.h"

namespace deltafuse::ep {

Ep::Ep(std::shared_ptr<Session> session, const OrtKernelRegistry* registry, const OrtLogger* logger)
    : OrtEp{},
      session_(std::move(session)),
      api_(session_->api()),
      device_(session_->device()),
      registry_(registry),
      logger_(logger) {
  ort_version_supported = kOrtApiVersion;
  OrtEp::GetName = [](const OrtEp*) noexcept { return kEpName; };
  OrtEp::GetCapability = [](OrtEp* self, const OrtGraph* graph, OrtEpGraphSupportInfo* support) noexcept {
    auto* ep = static_cast<Ep*>(self);
    return Guard(ep->api_, [&] { return ep->FindNodes(graph, support); });
  };
  OrtEp::GetKernelRegistry = [](OrtEp* self, const OrtKernelRegistry** registry) noexcept -> OrtStatus* {
    *registry = static_cast<Ep*>(self)->registry_;
    return nullptr;
  };
  // Runs of one session in parallel would share device memory over several streams, which its allocator does not order.
  OrtEp::IsConcurrentRunSupported = [](OrtEp* self, bool* supported) noexcept -> OrtStatus* {
    *supported = !static_cast<Ep*>(self)->device_.cuda;
    return nullptr;
  };
  OrtEp::CreateProfiler = [](OrtEp* self, OrtEpProfilerImpl** profiler) noexcept {
    auto* ep = static_cast<Ep*>(self);
    return Guard(ep->api_, [&] { return deltafuse::ep::CreateProfiler(ep->session_, profiler); });
  };
  if (!device_.cuda) return;
  // Used where no CUDA EP stands before this one: the first EP of a device supplies its memory.
  OrtEp::CreateAllocator = [](OrtEp* self, const OrtMemoryInfo*, OrtAllocator** allocator) noexcept {
    auto* ep = static_cast<Ep*>(self);
    return Guard(ep->api_, [&]() -> OrtStatus* {
      OrtMemoryInfo* info = nullptr;
      DF_RETURN_IF_ERROR(CreateCudaMemoryInfo(ep->api_, ep->device_.ordinal, &info));
      const Options& options = ep->session_->options();
      return CreateArenaAllocator(ep->api_, Own(info, ep->api_.ort->ReleaseMemoryInfo), CudaMemory(ep->device_.ordinal),
                                  options.memory_limit, /*keep=*/true, options.session_tag, allocator);
    });
  };
  OrtEp::Sync = [](OrtEp* self) noexcept {
    auto* ep = static_cast<Ep*>(self);
    return Guard(ep->api_, [&] { return ep->session_->Synchronize(); });
  };
  // What a device found wrong after the run before this one was over.
  OrtEp::OnRunStart = [](OrtEp* self, const OrtRunOptions*) noexcept {
    auto* ep = static_cast<Ep*>(self);
    return Guard(ep->api_, [&] { return ep->session_->FaultStatus("an earlier run: "); });
  };
  // The CUDA EP waits for its own stream, but perhaps later than this.
  OrtEp::OnRunEnd = [](OrtEp* self, const OrtRunOptions*, bool sync_stream) noexcept {
    auto* ep = static_cast<Ep*>(self);
    return Guard(ep->api_, [&]() -> OrtStatus* { return ep->session_->RunEnded(sync_stream); });
  };
}

Ep::~Ep() { ForgetRefusals(this); }

OrtStatus* Ep::FindNodes(const OrtGraph* graph, OrtEpGraphSupportInfo* support) {
  size_t count = 0;
  DF_RETURN_IF_ERROR(api_.ort->Graph_GetNumNodes(graph, &count));
  std::vector<const OrtNode*> nodes(count);
  if (count) DF_RETURN_IF_ERROR(api_.ort->Graph_GetNodes(graph, nodes.data(), count));
  for (const OrtNode* node : nodes) DF_RETURN_IF_ERROR(ConsiderNode(node, support));
  return nullptr;
}

OrtStatus* Ep::ConsiderNode(const OrtNode* node, OrtEpGraphSupportInfo* support) {
  const char* domain = nullptr;
  const char* op_type = nullptr;
  const char* taken_by = nullptr;
  DF_RETURN_IF_ERROR(api_.ort->Node_GetDomain(node, &domain));
  if (std::string_view(domain) != kDomain) return nullptr;
  DF_RETURN_IF_ERROR(api_.ort->Node_GetEpName(node, &taken_by));
  if (taken_by && *taken_by && std::string_view(taken_by) != kEpName) return nullptr;
  DF_RETURN_IF_ERROR(api_.ort->Node_GetOperatorType(node, &op_type));

  const FusedOp* fused = FindFusedOp(op_type);
  const OrtKernelDef* kernel = nullptr;
  DF_RETURN_IF_ERROR(api_.ep->EpGraphSupportInfo_LookUpKernel(support, node, &kernel));
  if (!kernel || !fused) {
    int version = 0;
    DF_RETURN_IF_ERROR(api_.ort->Node_GetSinceVersion(node, &version));
    const std::string op = std::string(domain) + "::" + op_type + " version " + std::to_string(version);
    if (!fused) return Refuse(node, "this version of deltafuse has no kernel for " + op);
    return Refuse(node, "the model has " + op + ", deltafuse " + kVersion + " has kernels for version " +
                            std::to_string(fused->version) +
                            ": fuse the original model again, or install the deltafuse that fused it");
  }
  std::string reason;
  DF_RETURN_IF_ERROR(fused->refusal(api_, device_, node, &reason));
  if (!reason.empty()) return Refuse(node, reason);
  return api_.ep->EpGraphSupportInfo_AddSingleNode(support, node);
}

OrtStatus* Ep::Refuse(const OrtNode* node, const std::string& reason) {
  NodeRefusal refusal;
  refusal.reason = reason;
  const char* text = nullptr;
  DF_RETURN_IF_ERROR(api_.ort->Node_GetDomain(node, &text));
  refusal.domain = text;
  DF_RETURN_IF_ERROR(api_.ort->Node_GetOperatorType(node, &text));
  refusal.op_type = text;
  DF_RETURN_IF_ERROR(api_.ort->Node_GetName(node, &text));
  refusal.node = text;
  size_t outputs = 0;
  DF_RETURN_IF_ERROR(api_.ort->Node_GetNumOutputs(node, &outputs));
  std::vector<const OrtValueInfo*> values(outputs);
  if (outputs) DF_RETURN_IF_ERROR(api_.ort->Node_GetOutputs(node, values.data(), outputs));
  if (outputs && values[0]) {
    DF_RETURN_IF_ERROR(api_.ort->GetValueInfoName(values[0], &text));
    refusal.output = text;
  }
  if (!RecordRefusal(this, session_->options().session_tag, refusal)) return nullptr;
  const std::string message = "deltafuse does not take node '" + refusal.node + "' (" + refusal.domain +
                              "::" + refusal.op_type + ", output '" + refusal.output + "') on " + device_.name + ": " +
                              reason;
  return api_.ort->Logger_LogMessage(logger_, ORT_LOGGING_LEVEL_WARNING, message.c_str(), ORT_FILE, __LINE__, __func__);
}

}  // namespace deltafuse::ep
