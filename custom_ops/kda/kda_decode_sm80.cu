// Launch of the decode kernel: how a head's slices are spread over blocks, and the element type.
#include "kda_decode.cuh"

namespace deltafuse::kda {

cudaError_t launch_decode_bf16(const DecodeArgs& args, int64_t blocks, cudaStream_t stream);
cudaError_t launch_decode_f16(const DecodeArgs& args, int64_t blocks, cudaStream_t stream);
cudaError_t launch_decode_f32(const DecodeArgs& args, int64_t blocks, cudaStream_t stream);

cudaError_t launch_decode(const Params& params, const Rows& rows, bool convolve, cudaStream_t stream) {
  DeviceInfo device;
  const cudaError_t status = device_info(&device);
  if (status != cudaSuccess) return status;
  DecodeArgs args;
  args.p = params;
  args.rows = rows;
  args.convolve = convolve;
  const int slices = params.head_v_dim / kSlice;
  const bool in_place = convolve && params.present_conv_state && params.present_conv_state == params.conv_state;
  args.slices = 1, args.cluster = 1;
  if (params.norm_weight || in_place) {
    if (device.capability < 90) {
      args.slices = slices;
    } else {
      args.slices = slices == 6 ? 3 : 1;  // clusters of 2, 4 or 8
      args.cluster = slices / args.slices;
    }
  }
  const int64_t blocks = params.num_seqs * params.num_v_heads * (slices / args.slices);
  if (blocks == 0) return cudaSuccess;
  switch (params.dtype) {
    case DType::kBFloat16:
      return launch_decode_bf16(args, blocks, stream);
    case DType::kFloat16:
      return launch_decode_f16(args, blocks, stream);
    case DType::kFloat32:
      return launch_decode_f32(args, blocks, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace deltafuse::kda
