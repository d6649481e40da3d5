#include "moe_gemm_sm90.cuh"

namespace deltafuse::moe {

cudaError_t launch_gemm_float8_f16(const GemmPair& args, const DeviceInfo& device, cudaStream_t stream) {
  return sm90::launch<__half, Pack::kFloat8>(args, device, stream);
}

}  // namespace deltafuse::moe
