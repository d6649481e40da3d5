// Which of the Hopper kernels a product takes.
#include "moe_gemm_sm90.cuh"

namespace deltafuse::moe {

#define DF_DECLARE(name) cudaError_t name(const GemmPair& args, const DeviceInfo& device, cudaStream_t stream);
DF_DECLARE(launch_gemm_plain_bf16)
DF_DECLARE(launch_gemm_int4_bf16)
DF_DECLARE(launch_gemm_int8_bf16)
DF_DECLARE(launch_gemm_float8_bf16)
DF_DECLARE(launch_gemm_plain_f16)
DF_DECLARE(launch_gemm_int4_f16)
DF_DECLARE(launch_gemm_int8_f16)
DF_DECLARE(launch_gemm_float8_f16)
#undef DF_DECLARE

namespace {

// Has static shared memory only where the compiler may use Hopper's own instructions.
__global__ void probe_kernel(int* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ int there[32];
  there[threadIdx.x % 32] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = there[(threadIdx.x + 1) % 32];
#endif
}

}  // namespace

bool gemm_sm90_compiled() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, probe_kernel) == cudaSuccess && attributes.sharedSizeBytes > 0;
}

PromptTuning& prompt_tuning() {
  static PromptTuning tuning;
  return tuning;
}

int gemm_sm90_tokens(Pack pack, int64_t tokens, int64_t average) {
  const bool few = (pack == Pack::kInt4 || pack == Pack::kInt8) && average <= prompt_tuning().few;
  int most = few ? sm90::kFewTokens : sm90::most_tokens(pack);
  const int wanted = prompt_tuning().tokens / 16 * 16;
  if (wanted >= 32 && wanted < most) most = wanted;
  return tokens < most ? sm90::tile_columns(pack, static_cast<int>(tokens)) : most;
}

cudaError_t launch_gemm_sm90(const GemmPair& args, DType dtype, const DeviceInfo& device, cudaStream_t stream) {
  const bool half = dtype == DType::kFloat16;
  switch (args.product[0].weights.pack) {
    case Pack::kPlain:
      return half ? launch_gemm_plain_f16(args, device, stream) : launch_gemm_plain_bf16(args, device, stream);
    case Pack::kInt4:
      return half ? launch_gemm_int4_f16(args, device, stream) : launch_gemm_int4_bf16(args, device, stream);
    case Pack::kInt8:
      return half ? launch_gemm_int8_f16(args, device, stream) : launch_gemm_int8_bf16(args, device, stream);
    case Pack::kFloat8:
      return half ? launch_gemm_float8_f16(args, device, stream) : launch_gemm_float8_bf16(args, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace deltafuse::moe
