// The decode kernels for float16.
#include "moe_decode.cuh"

namespace deltafuse::moe {

cudaError_t launch_decode_f16(const DecodeArgs& args, const DeviceInfo& device, cudaStream_t stream) {
  return launch_decode_type<__half>(args, device, stream);
}

}  // namespace deltafuse::moe
