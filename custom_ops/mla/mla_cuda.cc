// Dispatch of LatentAttention's CUDA kernels: what is refused, and the functions of mla.h.
#include <cuda_runtime_api.h>

#include <memory>
#include <new>

#include "../common/device_info.h"
#include "mla.h"
#include "mla_run_cuda.h"

namespace deltafuse::mla {

using host::capacity;
using host::failed;
using host::Path;
using host::path_of;
using host::reason;
using host::Run;
using host::workspace_of;

namespace {

int64_t weight_bytes(const Params& p) {
  return int64_t(p.kv_lora_rank) * p.num_heads * (p.qk_nope_head_dim + p.v_head_dim) * size_of(p.dtype);
}

}  // namespace

cudaError_t device_info(DeviceInfo* info) {
  return read_device_info(info, compiled_capability,
                          [](DeviceInfo* read, int, int) { return has_sm90a(&read->sm90a); });
}

const char* cuda_refusal(const Params& p, int compute_capability) {
  if (compute_capability < 80) {
    return reason("compute capability %d.%d: kernels need 8.0 or newer", compute_capability / 10,
                  compute_capability % 10);
  }
  if (p.num_heads < 1 || p.qk_nope_head_dim < 1 || p.v_head_dim < 1 || p.kv_lora_rank < 1 || p.qk_rope_head_dim < 0) {
    return reason("num_heads %d, qk_nope_head_dim %d, v_head_dim %d, kv_lora_rank %d: all must be 1 or more",
                  p.num_heads, p.qk_nope_head_dim, p.v_head_dim, p.kv_lora_rank);
  }
  if (int(p.dtype) < 0 || int(p.dtype) > 2) {
    return reason("element type %d: kernels take float32, float16, bfloat16", int(p.dtype));
  }
  if (int(p.rope) < 0 || int(p.rope) > 3) return reason("rope %d: expected 0 to 3", int(p.rope));
  if (p.rope != Rope::kNone && (p.qk_rope_head_dim < 2 || p.qk_rope_head_dim % 2 != 0)) {
    return reason("qk_rope_head_dim %d: the rotation needs an even number", p.qk_rope_head_dim);
  }
  if (p.rope != Rope::kNone && p.cos_width != p.qk_rope_head_dim && p.cos_width * 2 != p.qk_rope_head_dim) {
    return reason("cos has %d columns: expected %d or %d", p.cos_width, p.qk_rope_head_dim, p.qk_rope_head_dim / 2);
  }
  if (p.cache_type != CacheType::kSame && (p.cache != Cache::kLatent || p.packed_cache)) {
    return "an 8-bit cache holds latents, apart from the rotary keys";
  }
  if (p.max_blocks > 0 && (p.cache != Cache::kLatent || !p.static_cache || p.block_size < 1)) {
    return reason("a paged cache holds latents in blocks of 1 token or more, not %lld, and needs cache_lengths",
                  static_cast<long long>(p.block_size));
  }
  if (p.cache == Cache::kExpanded) {
    constexpr int kWidest = 256;
    if (p.qk_nope_head_dim + p.qk_rope_head_dim > kWidest || p.v_head_dim > kWidest) {
      return reason("heads of %d and %d channels in an expanded cache: kernels take up to %d",
                    p.qk_nope_head_dim + p.qk_rope_head_dim, p.v_head_dim, kWidest);
    }
  } else if (p.kv_lora_rank + p.qk_rope_head_dim > any_widest()) {
    return reason("kv_lora_rank + qk_rope_head_dim %d: kernels take up to %d", p.kv_lora_rank + p.qk_rope_head_dim,
                  any_widest());
  }
  return nullptr;
}

const char* cuda_create(const Params& p, void* stream_handle, CudaLayer** layer) {
  *layer = nullptr;
  std::unique_ptr<CudaLayer> made(new (std::nothrow) CudaLayer);
  if (!made) return "no memory for the layer";
  cudaError_t status = device_info(&made->device);
  if (status != cudaSuccess) return failed("reading the device's properties", status);
  if (const char* refused = cuda_refusal(p, made->device.capability)) return refused;
  if (p.kv_b_weight) {
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    status = cudaMalloc(&made->kv_b, weight_bytes(p));
    if (status != cudaSuccess) return failed("memory for the weights", status);
    status = cudaMemcpyAsync(made->kv_b, p.kv_b_weight, weight_bytes(p), cudaMemcpyDeviceToDevice, stream);
    if (status != cudaSuccess) {
      cudaFree(made->kv_b);
      return failed("copying the weights", status);
    }
  }
  *layer = made.release();
  return nullptr;
}

void cuda_destroy(CudaLayer* layer) {
  if (!layer) return;
  if (layer->kv_b) cudaFree(layer->kv_b);
  delete layer;
}

size_t cuda_workspace_bytes(const CudaLayer* layer, const Params& p) {
  return static_cast<size_t>(workspace_of(p, layer->device).total);
}

const char* cuda_core(CudaLayer* layer, const Params& p, void* workspace, void* stream) {
  if (path_of(p, layer->device) == Path::kAny) return "no attention of its own here";
  return Run(*layer, p, workspace, static_cast<cudaStream_t>(stream), true)();
}

const char* cuda_forward(CudaLayer* layer, const Params& p, void* workspace, void* stream) {
  if (const char* refused = cuda_refusal(p, layer->device.capability)) return refused;
  if (p.batch < 0 || p.seq_len < 0 || p.past_len < 0) return "batch, seq_len and past_len must not be negative";
  if (p.static_cache && p.batch > 0 && capacity(p) < p.seq_len) {
    return reason("%lld new tokens: the cache has room for %lld", static_cast<long long>(p.seq_len),
                  static_cast<long long>(capacity(p)));
  }
  return Run(*layer, p, workspace, static_cast<cudaStream_t>(stream))();
}

}  // namespace deltafuse::mla
