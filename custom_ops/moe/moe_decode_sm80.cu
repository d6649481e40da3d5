// Which of the decode kernels a call takes.
#include "moe_decode.cuh"

namespace deltafuse::moe {

cudaError_t launch_decode_bf16(const DecodeArgs& args, const DeviceInfo& device, cudaStream_t stream);
cudaError_t launch_decode_f16(const DecodeArgs& args, const DeviceInfo& device, cudaStream_t stream);

size_t decode_shared_bytes(const DecodeArgs& args) {
  const size_t first = FirstShared::bytes(args, 5), second = SecondShared::bytes(args, 4);  // the deepest
  return first > second ? first : second;
}

cudaError_t launch_decode(const DecodeArgs& args, DType dtype, const DeviceInfo& device, cudaStream_t stream) {
  return dtype == DType::kFloat16 ? launch_decode_f16(args, device, stream) : launch_decode_bf16(args, device, stream);
}

}  // namespace deltafuse::moe
