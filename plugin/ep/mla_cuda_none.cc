// Stands in for LatentAttention's CUDA kernels where a build has none.
#include "../../custom_ops/mla/mla.h"

namespace deltafuse::mla {
namespace {
constexpr const char* kNone = "this build of deltafuse has no CUDA kernels for LatentAttention";
}

const char* cuda_refusal(const Params&, int) { return kNone; }
const char* cuda_create(const Params&, void*, CudaLayer**) { return kNone; }
void cuda_destroy(CudaLayer*) {}
size_t cuda_workspace_bytes(const CudaLayer*, const Params&) { return 0; }
const char* cuda_forward(CudaLayer*, const Params&, void*, void*) { return kNone; }

}  // namespace deltafuse::mla
