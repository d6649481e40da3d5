// A call of a few tokens: its workspace and its launches.
#include "moe_cuda_layer.h"

namespace deltafuse::moe {
namespace {

// A small call's parts.
struct FewParts {
  float* logits;
  unsigned char* x;  // padded rows, where they are not wide enough already
  unsigned char* h;
  int h_stride;
  int64_t used;
};
FewParts few_parts(const CudaLayer& layer, const Params& p, void* base) {
  Parts parts(base);
  FewParts f{};
  const int64_t tokens = p.num_tokens, size = size_of(p.dtype);
  f.logits = parts.take<float>(tokens * p.num_experts);
  const int cols = wide_cols(p.hidden_size, p.dtype);
  f.x = parts.take<unsigned char>(cols == p.hidden_size ? 0 : tokens * cols * size);
  f.h_stride = hidden_stride(layer.gate_up, layer.down);
  if (layer.shared_gate_up.count) {
    f.h_stride = std::max(f.h_stride, hidden_stride(layer.shared_gate_up, layer.shared_down));
  }
  f.h = parts.take<unsigned char>(tokens * (p.top_k + 1) * f.h_stride * size);
  f.used = parts.used();
  return f;
}

DecodeArgs decode_args(const CudaLayer& layer, const Params& p, const FewParts& f) {
  DecodeArgs a{};
  a.router = router_args(p, 0, static_cast<int>(p.num_tokens));
  if (p.router_weight) a.router.logits = f.logits;
  a.gate_up = layer.gate_up, a.down = layer.down;
  a.shared_gate_up = layer.shared_gate_up, a.shared_down = layer.shared_down;
  a.activity = activity(p);
  a.shared_gate = p.shared_gate_weight;
  a.shared_gate_type = p.shared_gate_float32 ? DType::kFloat32 : p.dtype;
  a.x_cols = wide_cols(p.hidden_size, p.dtype);
  a.x = a.x_cols == p.hidden_size ? p.x : f.x;
  a.h = f.h, a.h_stride = f.h_stride, a.y = p.y;
  return a;
}

}  // namespace

bool is_few(const CudaLayer& layer, const Params& p, const DeviceInfo& device) {
  if (p.dtype == DType::kFloat32 || p.num_tokens > kDecodeTokens || p.num_tokens * p.top_k > kDecodePairs) return false;
  if (layer.shared_gate_up.count) {
    // Two formats in one kernel: the experts' own, and the activations'.
    const Packed &a = layer.shared_gate_up, &b = layer.shared_down;
    if (a.pack != b.pack || (a.pack != Pack::kPlain && a.pack != layer.gate_up.pack)) return false;
  }
  if (layer.gate_up.pack != layer.down.pack) return false;
  return decode_shared_bytes(decode_args(layer, p, few_parts(layer, p, nullptr))) + 1024 <=
         static_cast<size_t>(device.shared_bytes);
}

int64_t few_bytes(const CudaLayer& layer, const Params& p) { return few_parts(layer, p, nullptr).used; }

const char* run_few(const CudaLayer& layer, const Params& p, const DeviceInfo& device, void* workspace,
                    cudaStream_t stream) {
  const FewParts f = few_parts(layer, p, workspace);
  const DecodeArgs a = decode_args(layer, p, f);
  cudaError_t status = cudaSuccess;
  if (a.x != p.x) {
    status = launch_pad(p.x, f.x, p.num_tokens, p.hidden_size, a.x_cols, size_of(p.dtype), stream);
    if (status != cudaSuccess) return failed("launching the tokens' padding", status);
  }
  if (a.router.logits) {
    status = launch_logits(a.router, device, stream);
    if (status != cudaSuccess) return failed("launching the router's logits", status);
  }
  status = launch_decode(a, p.dtype, device, stream);
  return status == cudaSuccess ? nullptr : failed("launching the experts", status);
}

}  // namespace deltafuse::moe
