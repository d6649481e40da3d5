// Dispatch of the CUDA kernels of GroupedQMoE: what a layer and a call need, and which kernels are launched.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <new>

#include "moe.h"
#include "moe_cuda_plan.h"

namespace deltafuse::moe {

struct CudaLayer {
  DType dtype = DType::kFloat32;
  Packed gate_up, down, shared_gate_up, shared_down;
  void* memory[4] = {};  // of each matrix
};

namespace {

const char* failed(const char* what, cudaError_t status) { return reason("%s: %s", what, cudaGetErrorString(status)); }

bool misaligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; }

void describe(const Params& p, Packed* gate_up, Packed* down, Packed* shared_gate_up, Packed* shared_down) {
  const int joined = p.gated ? 2 : 1;
  *gate_up = packed_form(p.gate_up, p.dtype, p.num_experts, joined * p.intermediate_size, p.hidden_size, p.gated);
  *down = packed_form(p.down, p.dtype, p.num_experts, p.hidden_size, p.intermediate_size, false);
  if (p.shared_intermediate_size > 0) {
    *shared_gate_up =
        packed_form(p.shared_gate_up, p.dtype, 1, joined * p.shared_intermediate_size, p.hidden_size, p.gated);
    *shared_down = packed_form(p.shared_down, p.dtype, 1, p.hidden_size, p.shared_intermediate_size, false);
  }
}

RouterArgs router_args(const Params& p, int64_t first, int tokens) {
  RouterArgs r{};
  const int size = size_of(p.dtype);
  r.x_type = p.dtype;
  r.weight_type = p.router_weight_float32 ? DType::kFloat32 : p.dtype;
  r.given_type = p.router_logits_float32 ? DType::kFloat32 : p.dtype;
  r.x = static_cast<const char*>(p.x) + first * p.hidden_size * size;
  r.weight = p.router_weight;
  if (!p.router_weight && p.router_logits) {
    r.given = static_cast<const char*>(p.router_logits) + first * p.num_experts * size_of(r.given_type);
  }
  r.router_bias = p.router_bias, r.expert_bias = p.expert_bias;
  r.tokens = tokens, r.experts = p.num_experts, r.top_k = p.top_k, r.hidden = p.hidden_size;
  r.n_group = p.n_group, r.topk_group = p.topk_group, r.group_top = p.group_top;
  r.masked_score_zero = p.masked_score_zero, r.masked_weights = p.masked_weights;
  r.softmax = p.score == Score::kSoftmax, r.norm_topk_prob = p.norm_topk_prob;
  r.norm_eps = p.norm_eps, r.scaling = p.routed_scaling_factor;
  r.ids_out = p.expert_ids ? p.expert_ids + first * p.top_k : nullptr;
  r.weights_out = p.expert_weights ? p.expert_weights + first * p.top_k : nullptr;
  return r;
}

Activity activity(const Params& p) { return {p.activation, p.gated, p.clamp, p.gate_limit, p.up_limit}; }

int wide_cols(int cols, DType dtype) { return rounded(cols, 16 / size_of(dtype)); }

int hidden_stride(const Packed& first, const Packed& second) {
  return std::max(first.padded_channels(), second.blocks() * 128);
}

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

// Which kernel multiplies, and how many tokens its tiles may have.
bool on_hopper(const Params& p, bool activate, const DeviceInfo& device) {
  return device.wgmma && p.dtype != DType::kFloat32 && !(activate && p.activation == Activation::kGelu);
}
int chain_tokens(const Packed& first, const Packed& second, const Params& p, const DeviceInfo& device) {
  const int one = on_hopper(p, true, device) ? gemm_sm90_tokens(first.pack) : kGemmTokens;
  const int two = on_hopper(p, false, device) ? gemm_sm90_tokens(second.pack) : kGemmTokens;
  return std::min(one, two);
}
// 128-byte blocks of a row of the right operand that Hopper's kernel wants.
int operand_blocks(const Packed& w) { return w.blocks() * (w.pack == Pack::kFloat8 ? 1 : 2); }

// An expert chain's buffers.
struct ChainParts {
  uint8_t *x, *h;            // arranged operands of the two products, where Hopper's kernel takes them
  float *x_scale, *h_scale;  // float8
  unsigned char* h_rows;     // natural rows between the products, where the first cannot leave the second's operand
  unsigned char* out;        // [rows, hidden size]
  TokenTile* tiles;
  int32_t* num_tiles;
  int h_stride, tile_tokens;
  int64_t max_tiles;
  bool first_hopper, second_hopper, direct;
};
ChainParts chain_parts(Parts& parts, const Packed& first, const Packed& second, const Params& p, int64_t pairs,
                       const DeviceInfo& device) {
  ChainParts c{};
  const int64_t size = size_of(p.dtype);
  const int64_t rows = pairs + 8 * std::min<int64_t>(pairs, first.count);  // experts begin at multiples of 8
  c.first_hopper = on_hopper(p, true, device), c.second_hopper = on_hopper(p, false, device);
  c.direct =
      c.first_hopper && c.second_hopper && p.gated && (second.pack != Pack::kFloat8 || first.pack == Pack::kFloat8);
  c.h_stride = hidden_stride(first, second);
  if (c.first_hopper) {
    c.x = parts.take<uint8_t>(rows * operand_blocks(first) * 128);
    if (first.pack == Pack::kFloat8) c.x_scale = parts.take<float>(rows * operand_blocks(first));
  }
  if (c.second_hopper) {
    c.h = parts.take<uint8_t>(rows * operand_blocks(second) * 128);
    if (second.pack == Pack::kFloat8) c.h_scale = parts.take<float>(rows * operand_blocks(second));
  }
  if (!c.direct) c.h_rows = parts.take<unsigned char>(rows * c.h_stride * size);
  c.out = parts.take<unsigned char>(rows * wide_cols(p.hidden_size, p.dtype) * size);
  c.tile_tokens = chain_tokens(first, second, p, device);
  c.max_tiles = pairs / c.tile_tokens + std::min<int64_t>(pairs, first.count);
  c.tiles = parts.take<TokenTile>(c.max_tiles);
  c.num_tiles = parts.take<int32_t>(1);
  return c;
}

// A prompt chunk's parts.
struct ManyParts {
  float *logits, *weights;
  int32_t *ids, *positions, *sorted, *histogram, *totals;
  uint32_t* barrier;
  unsigned char* x;
  ChainParts experts, shared;
  int64_t used;
};
ManyParts many_parts(const CudaLayer& layer, const Params& p, int64_t tokens, const DeviceInfo& device, void* base) {
  Parts parts(base);
  ManyParts m{};
  const int64_t pairs = tokens * p.top_k;
  m.logits = parts.take<float>(tokens * p.num_experts);
  m.ids = parts.take<int32_t>(pairs);
  m.weights = parts.take<float>(pairs);
  m.positions = parts.take<int32_t>(pairs);
  m.sorted = parts.take<int32_t>(pairs + 8 * std::min<int64_t>(pairs, p.num_experts));
  m.histogram = parts.take<int32_t>(int64_t(p.num_experts) * device.multiprocessors);
  m.totals = parts.take<int32_t>(p.num_experts);
  m.barrier = parts.take<uint32_t>(1);
  const int cols = wide_cols(p.hidden_size, p.dtype);
  m.x = parts.take<unsigned char>(cols == p.hidden_size ? 0 : tokens * cols * size_of(p.dtype));
  m.experts = chain_parts(parts, layer.gate_up, layer.down, p, pairs, device);
  if (layer.shared_gate_up.count)
    m.shared = chain_parts(parts, layer.shared_gate_up, layer.shared_down, p, tokens, device);
  m.used = parts.used();
  return m;
}

struct Rows {  // tokens
  const void* x;
  int cols;              // and stride
  const int32_t* order;  // token of each sorted row, or null: the same
};

const char* run_chain(const Packed& first, const Packed& second, const ChainParts& c, const Rows& rows, const Params& p,
                      const DeviceInfo& device, cudaStream_t stream) {
  const int size = size_of(p.dtype);
  cudaError_t status = cudaSuccess;
  auto arrange = [&](const void* x, int64_t stride, int cols, const int32_t* order, const Packed& w, void* out,
                     float* scale) {
    ArrangeArgs a{};
    a.x = x, a.x_stride = stride, a.cols = cols, a.rows = order, a.tiles = c.tiles, a.num_tiles = c.num_tiles;
    a.out = out, a.out_blocks = operand_blocks(w), a.scale = scale;
    return launch_arrange(a, p.dtype, c.max_tiles, stream);
  };
  GemmArgs g{};
  g.weights = first;
  g.tiles = c.tiles, g.num_tiles = c.num_tiles;
  g.activate = 1, g.activity = activity(p);
  if (c.first_hopper) {
    status = arrange(rows.x, rows.cols, rows.cols, rows.order, first, c.x, c.x_scale);
    if (status != cudaSuccess) return failed("launching the tokens' arrangement", status);
    g.x = c.x, g.x_scale = c.x_scale, g.x_blocks = operand_blocks(first);
  } else {
    g.x = rows.x, g.x_stride = int64_t(rows.cols) * size, g.x_cols = rows.cols, g.rows = rows.order;
  }
  g.out = c.direct ? static_cast<void*>(c.h) : c.h_rows;
  g.out_stride = c.h_stride, g.out_cols = std::min(first.padded_channels(), c.h_stride);
  if (c.direct) g.out_blocks = operand_blocks(second), g.out_scale = c.h_scale;
  status =
      c.first_hopper ? launch_gemm_sm90(g, p.dtype, device, stream) : launch_gemm_sm80(g, p.dtype, c.max_tiles, stream);
  if (status != cudaSuccess) return failed("launching the first product", status);

  if (c.second_hopper && !c.direct) {
    status = arrange(c.h_rows, c.h_stride, g.out_cols, nullptr, second, c.h, c.h_scale);
    if (status != cudaSuccess) return failed("launching the activations' arrangement", status);
  }
  g.weights = second, g.rows = nullptr, g.activate = 0;
  if (c.second_hopper) {
    g.x = c.h, g.x_scale = c.h_scale, g.x_blocks = operand_blocks(second);
  } else {
    g.x = c.h_rows, g.x_stride = int64_t(c.h_stride) * size, g.x_cols = g.out_cols;
  }
  g.out = c.out, g.out_stride = wide_cols(p.hidden_size, p.dtype), g.out_cols = static_cast<int>(g.out_stride);
  g.out_blocks = 0, g.out_scale = nullptr;
  status = c.second_hopper ? launch_gemm_sm90(g, p.dtype, device, stream)
                           : launch_gemm_sm80(g, p.dtype, c.max_tiles, stream);
  return status == cudaSuccess ? nullptr : failed("launching the second product", status);
}

PermuteArgs permute_args(const ManyParts& m, const DeviceInfo& device, int tokens) {
  PermuteArgs a{};
  a.ids = m.ids, a.weights = m.weights, a.positions = m.positions, a.sorted = m.sorted;
  a.histogram = m.histogram, a.totals = m.totals, a.barrier = m.barrier;
  a.tiles = m.experts.tiles, a.num_tiles = m.experts.num_tiles, a.tile_tokens = m.experts.tile_tokens;
  a.blocks = select_blocks(tokens, device);
  return a;
}

const char* run_many(const CudaLayer& layer, const Params& p, int64_t begin, int tokens, const DeviceInfo& device,
                     void* workspace, cudaStream_t stream) {
  const ManyParts m = many_parts(layer, p, tokens, device, workspace);
  RouterArgs r = router_args(p, begin, tokens);
  cudaError_t status = cudaSuccess;
  if (p.router_weight) {
    r.logits = m.logits;
    status = launch_logits(r, device, stream);
    if (status != cudaSuccess) return failed("launching the router's logits", status);
  }
  status = launch_select(r, permute_args(m, device, tokens), stream);
  if (status != cudaSuccess) return failed("launching the router", status);

  Rows rows{r.x, wide_cols(p.hidden_size, p.dtype), m.sorted};
  if (rows.cols != p.hidden_size) {
    status = launch_pad(r.x, m.x, tokens, p.hidden_size, rows.cols, size_of(p.dtype), stream);
    if (status != cudaSuccess) return failed("launching the tokens' padding", status);
    rows.x = m.x;
  }
  if (const char* bad = run_chain(layer.gate_up, layer.down, m.experts, rows, p, device, stream)) return bad;
  if (layer.shared_gate_up.count) {
    status = launch_shared_tiles(m.shared.tiles, m.shared.num_tiles, tokens, m.shared.tile_tokens, stream);
    if (status != cudaSuccess) return failed("launching the shared expert's tiles", status);
    rows.order = nullptr;
    if (const char* bad = run_chain(layer.shared_gate_up, layer.shared_down, m.shared, rows, p, device, stream)) {
      return bad;
    }
  }
  CombineArgs c{};
  c.out = m.experts.out, c.out_stride = rows.cols, c.positions = m.positions, c.weights = m.weights;
  if (layer.shared_gate_up.count) {
    c.shared = m.shared.out, c.shared_stride = rows.cols;
    c.shared_gate = p.shared_gate_weight;
  }
  c.shared_gate_type = p.shared_gate_float32 ? DType::kFloat32 : p.dtype;
  c.x = r.x;
  c.y = static_cast<char*>(p.y) + begin * p.hidden_size * size_of(p.dtype);
  c.tokens = tokens, c.top_k = p.top_k, c.hidden = p.hidden_size;
  status = launch_combine(c, p.dtype, stream);
  return status == cudaSuccess ? nullptr : failed("launching the weighted sum", status);
}

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

size_t cuda_layer_bytes(const Params& p) {
  Packed packed[4];
  describe(p, &packed[0], &packed[1], &packed[2], &packed[3]);
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
  describe(p, &layer->gate_up, &layer->down, &layer->shared_gate_up, &layer->shared_down);
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
  if (is_few(*layer, p, device)) return static_cast<size_t>(few_parts(*layer, p, nullptr).used);
  return static_cast<size_t>(many_parts(*layer, p, std::min(p.num_tokens, kChunkTokens), device, nullptr).used);
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
  if (is_few(*layer, p, device)) {
    const FewParts f = few_parts(*layer, p, workspace);
    const DecodeArgs a = decode_args(*layer, p, f);
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
  for (int64_t begin = 0; begin < p.num_tokens; begin += kChunkTokens) {
    const int tokens = static_cast<int>(std::min(kChunkTokens, p.num_tokens - begin));
    if (const char* bad = run_many(*layer, p, begin, tokens, device, workspace, stream)) return bad;
  }
  return nullptr;
}

size_t route_workspace_bytes(const Params& p) {
  DeviceInfo device;
  if (p.num_tokens <= 0 || device_info(&device) != cudaSuccess) return 0;
  CudaLayer layer;
  describe(p, &layer.gate_up, &layer.down, &layer.shared_gate_up, &layer.shared_down);
  return static_cast<size_t>(many_parts(layer, p, p.num_tokens, device, nullptr).used);
}

const char* cuda_route(const Params& p, int steps, void* workspace, void* stream_handle) {
  DeviceInfo device;
  cudaError_t status = device_info(&device);
  if (status != cudaSuccess) return failed("reading the device's properties", status);
  CudaLayer layer;
  describe(p, &layer.gate_up, &layer.down, &layer.shared_gate_up, &layer.shared_down);
  const int tokens = static_cast<int>(p.num_tokens);
  const ManyParts m = many_parts(layer, p, tokens, device, workspace);
  RouterArgs r = router_args(p, 0, tokens);
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (p.router_weight) r.logits = m.logits;
  if (p.router_weight && (steps & 1)) status = launch_logits(r, device, stream);
  if (status == cudaSuccess && (steps & 2)) status = launch_select(r, permute_args(m, device, tokens), stream);
  return status == cudaSuccess ? nullptr : failed("launching the router", status);
}

}  // namespace deltafuse::moe
