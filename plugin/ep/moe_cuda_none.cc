// Stands in for GroupedQMoE's CUDA kernels where a build has none.
#include "../../custom_ops/moe/moe.h"

namespace deltafuse::moe {
namespace {
constexpr const char* kNone = "this build of deltafuse has no CUDA kernels for GroupedQMoE";
}

const char* cuda_refusal(const Params&, int) { return kNone; }
const char* cuda_create(const Params&, void*, CudaLayer**) { return kNone; }
const char* cuda_pack(CudaLayer*, const Params&, void*) { return kNone; }
void cuda_destroy(CudaLayer*) {}
size_t cuda_layer_bytes(const Params&) { return 0; }
size_t cuda_workspace_bytes(const CudaLayer*, const Params&) { return 0; }
const char* cuda_forward(CudaLayer*, const Params&, void*, void*) { return kNone; }

}  // namespace deltafuse::moe
