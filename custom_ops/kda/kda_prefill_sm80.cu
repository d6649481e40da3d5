// Launches of the prefill kernels: arguments, and the number format by the element type.
#include "kda_prepare.cuh"
#include "kda_scan.cuh"

namespace deltafuse::kda {
namespace {

__global__ void any_kernel() {}

}  // namespace

cudaError_t compiled_capability(int* capability) {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, any_kernel);
  if (status == cudaSuccess) *capability = attributes.ptxVersion;
  return status;
}

cudaError_t launch_prepare_bf16(const PrepareArgs& args, const DeviceInfo& device, cudaStream_t stream);
cudaError_t launch_prepare_f16(const PrepareArgs& args, const DeviceInfo& device, cudaStream_t stream);
cudaError_t launch_prepare_f32(const PrepareArgs& args, const DeviceInfo& device, cudaStream_t stream);
cudaError_t launch_scan_bf16(const ScanArgs& args, int k, const DeviceInfo& device, cudaStream_t stream);
cudaError_t launch_scan_f16(const ScanArgs& args, int k, const DeviceInfo& device, cudaStream_t stream);
cudaError_t launch_scan_f32(const ScanArgs& args, int k, const DeviceInfo& device, cudaStream_t stream);

cudaError_t launch_prepare(const Params& p, const Sequences& seqs, const Rows& rows, void* units, void* u,
                           cudaStream_t stream) {
  DeviceInfo device;
  const cudaError_t status = device_info(&device);
  if (status != cudaSuccess) return status;
  PrepareArgs args;
  args.seqs = seqs;
  args.rows = rows;
  args.g = p.g, args.beta = p.beta, args.A_log = p.A_log, args.dt_bias = p.dt_bias;
  args.units = static_cast<unsigned char*>(units), args.u = static_cast<unsigned char*>(u);
  args.heads = p.num_heads, args.v_heads = p.num_v_heads, args.k = p.head_dim, args.v = p.head_v_dim;
  args.scale = p.scale, args.l2norm_eps = p.l2norm_eps, args.lower_bound = p.lower_bound;
  args.beta_scale = p.beta_scale, args.beta_sigmoid = p.beta_sigmoid;
  args.l2norm = p.qk_l2norm, args.gate = p.gate_activation, args.staged = 0;
  switch (p.dtype) {
    case DType::kBFloat16:
      return launch_prepare_bf16(args, device, stream);
    case DType::kFloat16:
      return launch_prepare_f16(args, device, stream);
    case DType::kFloat32:
      return launch_prepare_f32(args, device, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_scan(const Params& p, const Sequences& seqs, const void* units, const void* u, cudaStream_t stream) {
  DeviceInfo device;
  const cudaError_t status = device_info(&device);
  if (status != cudaSuccess) return status;
  ScanArgs args;
  args.seqs = seqs;
  args.units = static_cast<const unsigned char*>(units), args.u = static_cast<const unsigned char*>(u);
  args.initial_state = p.initial_state, args.final_state = p.final_state, args.o = p.o;
  args.v_heads = p.num_v_heads, args.v = p.head_v_dim;
  args.state_dtype = p.state_dtype, args.state_v_first = p.state_v_first, args.stages = 0;
  switch (p.dtype) {
    case DType::kBFloat16:
      return launch_scan_bf16(args, p.head_dim, device, stream);
    case DType::kFloat16:
      return launch_scan_f16(args, p.head_dim, device, stream);
    case DType::kFloat32:
      return launch_scan_f32(args, p.head_dim, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace deltafuse::kda
