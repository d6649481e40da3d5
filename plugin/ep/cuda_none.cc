// Stands in for cuda_backend.cc and the CUDA kernels where a build has no CUDA: no device is found, nothing is taken.
#include "../../custom_ops/kda/kda.h"
#include "cuda_backend.h"
#include "session.h"

namespace deltafuse {
namespace {
constexpr const char* kNoCuda = "this build of deltafuse has no CUDA kernels";
}

namespace kda {
const char* cuda_refusal(const Params&, int) { return kNoCuda; }
size_t cuda_workspace_bytes(const Params&) { return 0; }
const char* cuda_forward(const Params&, void*, void*) { return kNoCuda; }
}  // namespace kda

namespace ep {
namespace {
OrtStatus* NoCuda(const Api& api) { return MakeStatus(api, ORT_NOT_IMPLEMENTED, kNoCuda); }
}  // namespace

const char* CudaArchs() { return ""; }
std::string CudaStatus() { return kNoCuda; }
std::string FindCudaDevice(const std::string&, Device*) { return kNoCuda; }
std::string MissingCode(const Device&) { return kNoCuda; }
OrtStatus* UseCudaDevice(const Api& api, const Device&) { return NoCuda(api); }
OrtStatus* SynchronizeCuda(const Api& api, const Device&, void*) { return NoCuda(api); }
std::string CudaStreamRefusal(const Device&, void*) { return kNoCuda; }
void AddUserStream(const Device&, void*) {}
void RemoveUserStream(const Device&, void*) {}
Arena::Backend CudaMemory(int) {
  return {nullptr, [](void*, size_t) -> void* { return nullptr; }, [](void*, void*) {}};
}
OrtStatus* CreateCudaMemoryInfo(const Api& api, int, OrtMemoryInfo**) { return NoCuda(api); }
OrtStatus* HashCudaMemory(const Api& api, const Device&, void*, const void*, size_t, ContentHash*) {
  return NoCuda(api);
}
void* AllocateMappedMemory(size_t) { return nullptr; }
void FreeMappedMemory(void*) {}
OrtStatus* CreateCudaDataTransfer(const Api&, OrtDataTransferImpl** transfer) {
  *transfer = nullptr;
  return nullptr;
}
OrtStatus* CreateCudaCopyKernel(std::shared_ptr<Session> session, bool, OrtKernelImpl**) {
  return NoCuda(session->api());
}
CudaMark MarkCuda(const Device&, void*) { return nullptr; }
double CudaMillisecondsBetween(const CudaMark&, const CudaMark&) { return -1; }
const char* NvtxMissing() { return kNoCuda; }
void PushNvtxRange(const char*) {}
void PopNvtxRange() {}
}  // namespace ep
}  // namespace deltafuse
