// Stands in for cuda_backend.cc and the CUDA kernels where a build has no CUDA: no device is found, nothing is taken.
#include "../../custom_ops/kda/kda.h"
#include "cuda_backend.h"

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
OrtStatus* SynchronizeCuda(const Api& api, const Device&) { return NoCuda(api); }
OrtStatus* CreateCudaAllocator(const Api& api, int, bool, OrtAllocator**) { return NoCuda(api); }
OrtStatus* CreateCudaMemoryInfo(const Api& api, int, OrtMemoryInfo**) { return NoCuda(api); }
void ReleaseCudaAllocator(OrtAllocator*) {}
OrtStatus* CreateCudaDataTransfer(const Api&, OrtDataTransferImpl** transfer) {
  *transfer = nullptr;
  return nullptr;
}
OrtStatus* CreateCudaCopyKernel(const Api& api, const Device&, bool, OrtKernelImpl**) { return NoCuda(api); }
}  // namespace ep
}  // namespace deltafuse
