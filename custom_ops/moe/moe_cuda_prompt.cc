// Prompts: their workspace and their launches.
#include "moe_cuda_layer.h"

namespace deltafuse::moe {
namespace {

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

}  // namespace

int64_t many_bytes(const CudaLayer& layer, const Params& p, int64_t tokens, const DeviceInfo& device) {
  return many_parts(layer, p, tokens, device, nullptr).used;
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

size_t route_workspace_bytes(const Params& p) {
  DeviceInfo device;
  if (p.num_tokens <= 0 || device_info(&device) != cudaSuccess) return 0;
  CudaLayer layer;
  describe(p, &layer);
  return static_cast<size_t>(many_parts(layer, p, p.num_tokens, device, nullptr).used);
}

const char* cuda_route(const Params& p, int steps, void* workspace, void* stream_handle) {
  DeviceInfo device;
  cudaError_t status = device_info(&device);
  if (status != cudaSuccess) return failed("reading the device's properties", status);
  CudaLayer layer;
  describe(p, &layer);
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
