// The layer of the CUDA kernels of GroupedQMoE: how weights are packed, what a call needs, who runs it.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <new>

#include "moe_cuda_layer.h"

namespace deltafuse::moe {
namespace {

const char* missing_operand(const Params& p) {
  if (p.num_tokens == 0) return nullptr;  // an empty tensor may have no address
  if (!p.x || !p.y) return "x and y are required";
  if (!p.router_weight && !p.router_logits) return "router_weight or router_logits is required";
  if (misaligned(p.x) || misaligned(p.y) || misaligned(p.router_weight)) {
    return "x, y and router_weight must lie on 16-byte addresses";
  }
  return nullptr;
}

}  // namespace

void describe(const Params& p, CudaLayer* layer) {
  const int joined = p.gated ? 2 : 1;
  layer->gate_up = packed_form(p.gate_up, p.dtype, p.num_experts, joined * p.intermediate_size, p.hidden_size, p.gated);
  layer->down = packed_form(p.down, p.dtype, p.num_experts, p.hidden_size, p.intermediate_size, false);
  if (p.shared_intermediate_size > 0) {
    layer->shared_gate_up =
        packed_form(p.shared_gate_up, p.dtype, 1, joined * p.shared_intermediate_size, p.hidden_size, p.gated);
    layer->shared_down = packed_form(p.shared_down, p.dtype, 1, p.hidden_size, p.shared_intermediate_size, false);
  }
}

size_t cuda_layer_bytes(const Params& p) {
  CudaLayer layer;
  describe(p, &layer);
  const Packed packed[] = {layer.gate_up, layer.down, layer.shared_gate_up, layer.shared_down};
  const Matrix* matrices[] = {&p.gate_up, &p.down, &p.shared_gate_up, &p.shared_down};
  int64_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    bytes += aligned(static_cast<int64_t>(packed[i].bytes()));
    if (has_multiplier(*matrices[i], p.dtype)) bytes += aligned(4 * packed[i].count);
  }
  return static_cast<size_t>(bytes);
}

const char* cuda_create(const Params& p, void* stream, CudaLayer** result) {
  *result = nullptr;
  DeviceInfo device;
  const cudaError_t status = device_info(&device);
  if (status != cudaSuccess) return failed("reading the device's properties", status);
  if (const char* refused = cuda_refusal(p, device.capability)) return refused;
  auto* layer = new (std::nothrow) CudaLayer;
  if (!layer) return "out of memory";
  layer->dtype = p.dtype;
  describe(p, layer);
  if (const char* bad = cuda_pack(layer, p, stream)) {
    cuda_destroy(layer);
    return bad;
  }
  *result = layer;
  return nullptr;
}

const char* cuda_pack(CudaLayer* layer, const Params& p, void* stream) {
  const struct {
    const Matrix* matrix;
    Packed* packed;
    const char* name;
  } pieces[] = {{&p.gate_up, &layer->gate_up, "gate_up"},
                {&p.down, &layer->down, "down"},
                {&p.shared_gate_up, &layer->shared_gate_up, "shared_gate_up"},
                {&p.shared_down, &layer->shared_down, "shared_down"}};
  for (int i = 0; i < 4; ++i) {
    const Matrix& m = *pieces[i].matrix;
    Packed& packed = *pieces[i].packed;
    if (!packed.count || !m.data) continue;
    const bool plain = m.format == Format::kFloat || m.format == Format::kBFloat16;
    if (!plain && !m.scale) return reason("%s_scale is required", pieces[i].name);
    if (m.has_zero_point && !m.zero_point) return reason("%s_zero_point is required", pieces[i].name);
    const int64_t bytes = aligned(static_cast<int64_t>(packed.bytes()));
    const bool multiplied = has_multiplier(m, p.dtype);
    if (!layer->memory[i]) {
      const cudaError_t status =
          cudaMalloc(&layer->memory[i], static_cast<size_t>(bytes + (multiplied ? aligned(4 * packed.count) : 0)));
      if (status != cudaSuccess) return failed("allocating the packed weights", status);
    }
    auto* base = static_cast<unsigned char*>(layer->memory[i]);
    auto* multiplier = multiplied ? reinterpret_cast<float*>(base + bytes) : nullptr;
    packed.data = base, packed.multiplier = multiplier;
    const cudaError_t status = launch_pack(m, packed, multiplier, p.dtype, static_cast<cudaStream_t>(stream));
    if (status != cudaSuccess) return failed("launching the packing of weights", status);
  }
  return nullptr;
}

void cuda_destroy(CudaLayer* layer) {
  if (!layer) return;
  for (void* memory : layer->memory) {
    if (memory) static_cast<void>(cudaFree(memory));
  }
  delete layer;
}

size_t cuda_workspace_bytes(const CudaLayer* layer, const Params& p) {
  DeviceInfo device;
  if (p.num_tokens <= 0 || device_info(&device) != cudaSuccess) return 0;
  if (is_few(*layer, p, device)) return static_cast<size_t>(few_bytes(*layer, p));
  return static_cast<size_t>(many_bytes(*layer, p, std::min(p.num_tokens, chunk_tokens(*layer, p)), device));
}

const char* cuda_forward(CudaLayer* layer, const Params& p, void* workspace, void* stream_handle) {
  DeviceInfo device;
  cudaError_t status = device_info(&device);
  if (status != cudaSuccess) return failed("reading the device's properties", status);
  if (p.num_tokens < 0) return "num_tokens must not be negative";
  if (const char* missing = missing_operand(p)) return missing;
  if (p.num_tokens == 0) return nullptr;
  const Packed* matrices[] = {&layer->gate_up, &layer->down, &layer->shared_gate_up, &layer->shared_down};
  for (const Packed* packed : matrices) {
    if (packed->count && !packed->data) return "weights are missing: the layer has not been given all of its matrices";
  }
  if (!workspace || misaligned(workspace)) return "the workspace is missing or not on a 16-byte address";
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (is_few(*layer, p, device)) return run_few(*layer, p, device, workspace, stream);
  const int64_t chunk = chunk_tokens(*layer, p);
  for (int64_t begin = 0; begin < p.num_tokens; begin += chunk) {
    const int tokens = static_cast<int>(std::min(chunk, p.num_tokens - begin));
    if (const char* bad = run_many(*layer, p, begin, tokens, device, workspace, stream)) return bad;
  }
  return nullptr;
}

}  // namespace deltafuse::moe
