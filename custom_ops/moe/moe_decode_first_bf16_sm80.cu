// Decode's first product for bfloat16.
#include "moe_decode_first.cuh"

namespace deltafuse::moe {

cudaError_t launch_first_bf16(const DecodeArgs& args, const DeviceInfo& device, cudaStream_t stream) {
  return launch_first_type<__nv_bfloat16>(args, device, stream);
}

}  // namespace deltafuse::moe
