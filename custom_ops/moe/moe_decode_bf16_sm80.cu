// The decode kernels for bfloat16.
#include "moe_decode.cuh"

namespace deltafuse::moe {

cudaError_t launch_decode_bf16(const DecodeArgs& args, const DeviceInfo& device, cudaStream_t stream) {
  return launch_decode_type<__nv_bfloat16>(args, device, stream);
}

}  // namespace deltafuse::moe
