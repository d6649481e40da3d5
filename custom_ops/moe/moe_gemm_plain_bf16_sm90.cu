#include "moe_gemm_sm90.cuh"

namespace deltafuse::moe {

cudaError_t launch_gemm_plain_bf16(const GemmPair& args, const DeviceInfo& device, cudaStream_t stream) {
  return sm90::launch<__nv_bfloat16, Pack::kPlain>(args, device, stream);
}

}  // namespace deltafuse::moe
