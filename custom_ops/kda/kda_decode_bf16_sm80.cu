// The decode kernel for one element type; runs on sm_80 and newer, in clusters from sm_90 on.
#include "kda_decode.cuh"

namespace deltafuse::kda {

cudaError_t launch_decode_bf16(const DecodeArgs& args, int64_t blocks, cudaStream_t stream) {
  return launch_decode_for<__nv_bfloat16>(args, blocks, stream);
}

}  // namespace deltafuse::kda
