// Decode's first product for float16.
#include "moe_decode_first.cuh"

namespace deltafuse::moe {

cudaError_t launch_first_f16(const DecodeArgs& args, const DeviceInfo& device, cudaStream_t stream) {
  return launch_first_type<__half>(args, device, stream);
}

}  // namespace deltafuse::moe
