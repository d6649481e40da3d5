// Decode's second product for float16.
#include "moe_decode_many.cuh"
#include "moe_decode_second.cuh"

namespace deltafuse::moe {

cudaError_t launch_second_f16(const DecodeArgs& args, const DeviceInfo& device, cudaStream_t stream) {
  return SecondShared::one(args) ? launch_second_type<__half>(args, device, stream)
                                 : launch_many_type<__half>(args, device, stream);
}

}  // namespace deltafuse::moe
