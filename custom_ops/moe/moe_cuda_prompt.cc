// Prompts: their workspace and their launches.
#include "moe_cuda_layer.h"
#include "moe_logits_fast.h"

namespace deltafuse::moe {
namespace {

// Which kernel multiplies, and how many tokens its tiles may have.
bool on_hopper(const Params& p, bool activate, const DeviceInfo& device) {
  return device.wgmma && p.dtype != DType::kFloat32 && !(activate && p.activation == Activation::kGelu);
}
int product_tokens(const Packed& w, bool hopper, int64_t tokens, int64_t pairs) {
  return hopper ? gemm_sm90_tokens(w.pack, tokens, pairs / w.count) : kGemmTokens;
}
bool packed_alike(const Packed& a, const Packed& b) {
  return a.pack == b.pack && a.sub == b.sub && a.zeros == b.zeros && a.gated == b.gated;
}

// An expert chain's buffers. Rows of all of them are tokens in the order by expert; then the shared expert's, where it
// goes with them.
struct ChainParts {
  unsigned char* h;  // between the products
  uint8_t* h8;       // the same in float8, where the second product takes that
  float* h8_scale;
  unsigned char* out;  // [rows, hidden size]
  TokenTile* tiles;
  int32_t* num_tiles;
  uint32_t* counters;  // one a product
  uint32_t* stored;    // GemmPair's
  int64_t stored_count;
  int h_stride, tile_tokens;
  int64_t rows, own_rows, max_tiles;
  bool first_hopper, second_hopper;
  bool together;  // both products go in one launch
};
ChainParts chain_parts(Parts& parts, const Packed& first, const Packed& second, const Packed* shared_first,
                       const Params& p, int64_t tokens, int64_t pairs, const DeviceInfo& device) {
  ChainParts c{};
  const int64_t size = size_of(p.dtype);
  c.own_rows = pairs + 8 * std::min<int64_t>(pairs, first.count);  // experts begin at multiples of 8
  c.rows = c.own_rows + (shared_first ? tokens : 0);
  c.first_hopper = on_hopper(p, true, device), c.second_hopper = on_hopper(p, false, device);
  const bool second8 = c.second_hopper && second.pack == Pack::kFloat8;
  c.h_stride = hidden_stride(first, second);
  if (shared_first) c.h_stride = std::max(c.h_stride, shared_first->padded_channels());
  c.h = parts.take<unsigned char>(c.rows * c.h_stride * size);
  if (second8) {
    c.h8 = parts.take<uint8_t>(c.rows * c.h_stride);
    c.h8_scale = parts.take<float>(c.rows);
  }
  c.out = parts.take<unsigned char>(c.rows * wide_cols(p.hidden_size, p.dtype) * size);
  c.tile_tokens = std::min(product_tokens(first, c.first_hopper, tokens, pairs),
                           product_tokens(second, c.second_hopper, tokens, pairs));
  c.max_tiles = pairs / c.tile_tokens + std::min<int64_t>(pairs, first.count);
  c.together = c.first_hopper && c.second_hopper && !second8 && first.pack == second.pack && first.sub == second.sub &&
               first.zeros == second.zeros;
  if (c.together) c.stored_count = c.max_tiles + (shared_first ? (tokens + c.tile_tokens - 1) / c.tile_tokens : 0);
  c.tiles = parts.take<TokenTile>(c.max_tiles);
  c.num_tiles = parts.take<int32_t>(1);
  return c;
}

// A prompt chunk's parts.
struct ManyParts {
  float *logits, *weights;
  int32_t *ids, *positions, *sorted, *histogram, *totals;
  uint32_t *barrier, *zeros;
  int64_t zero_count;  // two counters a chain, and what is done of each
  unsigned char* x;    // padded rows, where they are not wide enough already
  uint8_t* x8;         // tokens in float8
  float* x8_scale;
  bool fast;  // the router's logits by way of these
  FastLogits logits_by;
  ChainParts experts, shared;
  bool merged;  // the shared expert's rows are among the experts'
  int64_t used;
};
ManyParts many_parts(const CudaLayer& layer, const Params& p, int64_t tokens, const DeviceInfo& device, void* base) {
  Parts parts(base);
  ManyParts m{};
  const int64_t pairs = tokens * p.top_k;
  m.logits = parts.take<float>(tokens * p.num_experts);
  const RouterArgs r = router_args(p, 0, static_cast<int>(tokens));
  m.fast = logits_fast(r, device);
  if (m.fast) {
    FastLogits& f = m.logits_by = fast_form(r);
    f.weights = parts.take<unsigned char>(fast_weight_bytes(f));
    f.norms = parts.take<float>(p.num_experts);
    f.counts = parts.take<int32_t>(p.num_experts);
    f.lists = parts.take<int32_t>(p.num_experts * tokens);
    f.few = parts.take<uint16_t>(tokens * kFew);
  }
  m.ids = parts.take<int32_t>(pairs);
  m.weights = parts.take<float>(pairs);
  m.positions = parts.take<int32_t>(pairs);
  m.sorted = parts.take<int32_t>(pairs + 8 * std::min<int64_t>(pairs, p.num_experts));
  m.histogram = parts.take<int32_t>(int64_t(p.num_experts) * device.multiprocessors);
  m.totals = parts.take<int32_t>(p.num_experts);
  m.barrier = parts.take<uint32_t>(1);
  m.logits_by.barrier = m.barrier;
  const int cols = wide_cols(p.hidden_size, p.dtype);
  m.x = parts.take<unsigned char>(cols == p.hidden_size ? 0 : tokens * cols * size_of(p.dtype));
  const bool has_shared = layer.shared_gate_up.count != 0;
  const bool float8 = layer.gate_up.pack == Pack::kFloat8 || (has_shared && layer.shared_gate_up.pack == Pack::kFloat8);
  if (float8 && on_hopper(p, true, device)) {
    m.x8 = parts.take<uint8_t>(tokens * layer.gate_up.blocks() * 128);
    m.x8_scale = parts.take<float>(tokens);
  }
  m.merged = has_shared && prompt_tuning().merge && on_hopper(p, true, device) && on_hopper(p, false, device) &&
             packed_alike(layer.gate_up, layer.shared_gate_up) && packed_alike(layer.down, layer.shared_down);
  m.experts = chain_parts(parts, layer.gate_up, layer.down, m.merged ? &layer.shared_gate_up : nullptr, p, tokens,
                          pairs, device);
  if (has_shared && !m.merged) {
    m.shared = chain_parts(parts, layer.shared_gate_up, layer.shared_down, nullptr, p, tokens, tokens, device);
  }
  m.zero_count = kCounters + m.experts.stored_count + m.shared.stored_count;
  m.zeros = parts.take<uint32_t>(m.zero_count);
  if (m.zeros) {
    m.experts.counters = m.zeros, m.shared.counters = m.zeros + kCounters / 2;
    m.experts.stored = m.zeros + kCounters, m.shared.stored = m.experts.stored + m.experts.stored_count;
  }
  m.used = parts.used();
  return m;
}

// A chain of products: the right operand of the first is tokens, in the order given.
struct Chain {
  const Packed &first, &second;
  const Packed *shared_first, *shared_second;  // in the same launches; or null
  const void* x;
  int cols;  // and stride
  const uint8_t* x8;
  const float* x8_scale;
  const int32_t* order;  // token of each sorted row, or null: the same
  int tokens;
};

const char* run_chain(const Chain& chain, const ChainParts& c, const Params& p, const DeviceInfo& device,
                      cudaStream_t stream) {
  const int size = size_of(p.dtype);
  // One of them, or both where they go together.
  auto multiply = [&](const GemmArgs* g, int count, bool hopper, uint32_t* counter) {
    if (!hopper) return launch_gemm_sm80(*g, p.dtype, c.max_tiles, stream);
    GemmPair pair{};
    std::copy(g, g + count, pair.product);
    pair.count = count, pair.stored = c.stored;
    for (GemmArgs& one : pair.product) {
      one.tuning = prompt_tuning();
      one.counter = one.tuning.dynamic ? counter : nullptr;
    }
    return launch_gemm_sm90(pair, p.dtype, device, stream);
  };
  GemmArgs both[2] = {};
  GemmArgs &g = both[0], &h = both[1];
  g.weights = chain.first;
  g.tiles = c.tiles, g.num_tiles = c.num_tiles, g.tile_tokens = c.tile_tokens;
  g.activity = activity(p);
  if (chain.shared_first) g.shared_rows = chain.tokens;
  h = g;
  g.activate = 1;
  g.rows = chain.order;
  if (c.first_hopper && chain.first.pack == Pack::kFloat8) {
    g.x = chain.x8, g.x_scale = chain.x8_scale;
    g.x_cols = chain.first.blocks() * 128, g.x_stride = g.x_cols;
  } else {
    g.x = chain.x, g.x_stride = int64_t(chain.cols) * size, g.x_cols = chain.cols;
  }
  if (chain.shared_first) g.shared = *chain.shared_first, g.shared_x = 0, g.shared_out = static_cast<int>(c.own_rows);
  g.out = c.h, g.out_stride = c.h_stride, g.out_cols = c.h_stride;

  h.weights = chain.second;
  h.x_cols = c.h_stride;
  if (c.h8) {
    h.x = c.h8, h.x_stride = c.h_stride, h.x_scale = c.h8_scale;
  } else {
    h.x = c.h, h.x_stride = int64_t(c.h_stride) * size;
  }
  if (chain.shared_second) h.shared = *chain.shared_second, h.shared_x = h.shared_out = g.shared_out;
  h.out = c.out, h.out_stride = wide_cols(p.hidden_size, p.dtype), h.out_cols = static_cast<int>(h.out_stride);

  cudaError_t status = multiply(both, c.together ? 2 : 1, c.first_hopper, c.counters);
  if (status != cudaSuccess) return failed("launching the first product", status);
  if (c.together) return nullptr;
  if (c.h8) {  // only columns that have been stored: a row has one scale
    Float8Args a{c.h, c.h_stride, chain.second.blocks() * 128, c.h_stride / 128, c.own_rows, c.h8, c.h8_scale};
    status = launch_float8(a, p.dtype, device, stream);
    if (status == cudaSuccess && chain.shared_second) {
      a = {c.h + c.own_rows * c.h_stride * size,
           c.h_stride,
           chain.shared_second->blocks() * 128,
           a.blocks,
           c.rows - c.own_rows,
           c.h8 + c.own_rows * c.h_stride,
           c.h8_scale + c.own_rows};
      status = launch_float8(a, p.dtype, device, stream);
    }
    if (status != cudaSuccess) return failed("launching the activations' conversion", status);
  }
  status = multiply(both + 1, 1, c.second_hopper, c.counters ? c.counters + 1 : nullptr);
  return status == cudaSuccess ? nullptr : failed("launching the second product", status);
}

cudaError_t launch_router_logits(const ManyParts& m, const RouterArgs& r, const Float8Args& float8,
                                 const DeviceInfo& device, cudaStream_t stream) {
  return m.fast ? launch_logits_fast(r, m.logits_by, float8, device, stream) : launch_logits(r, device, stream);
}

PermuteArgs permute_args(const CudaLayer& layer, const ManyParts& m, const DeviceInfo& device, int tokens) {
  PermuteArgs a{};
  a.ids = m.ids, a.weights = m.weights, a.positions = m.positions, a.sorted = m.sorted;
  a.histogram = m.histogram, a.totals = m.totals, a.barrier = m.barrier;
  a.tiles = m.experts.tiles, a.num_tiles = m.experts.num_tiles, a.tile_tokens = m.experts.tile_tokens;
  a.blocks = select_blocks(tokens, device);
  a.by_size = prompt_tuning().by_size && layer.gate_up.pack != Pack::kPlain;
  a.zeros = m.zeros, a.zero_count = static_cast<int32_t>(m.zero_count);
  return a;
}

}  // namespace

int64_t chunk_tokens(const CudaLayer& layer, const Params& p) {
  // Hopper's products count the operand's 16-byte pieces in 32 bits.
  int64_t widest = std::max(wide_cols(p.hidden_size, p.dtype), hidden_stride(layer.gate_up, layer.down));
  if (layer.shared_gate_up.count) {
    widest = std::max<int64_t>(widest, hidden_stride(layer.shared_gate_up, layer.shared_down));
  }
  const int64_t rows = (int64_t(1) << 32) / (widest * size_of(p.dtype) / 16 + 1) - 8 * p.num_experts;
  return std::max<int64_t>(1, std::min(kChunkTokens, rows / (p.top_k + 1)));
}

int64_t many_bytes(const CudaLayer& layer, const Params& p, int64_t tokens, const DeviceInfo& device) {
  return many_parts(layer, p, tokens, device, nullptr).used;
}

const char* run_many(const CudaLayer& layer, const Params& p, int64_t begin, int tokens, const DeviceInfo& device,
                     void* workspace, cudaStream_t stream) {
  const ManyParts m = many_parts(layer, p, tokens, device, workspace);
  RouterArgs r = router_args(p, begin, tokens);
  cudaError_t status = cudaSuccess;
  const int cols = wide_cols(p.hidden_size, p.dtype);
  Float8Args float8{r.x, cols, cols, layer.gate_up.blocks(), m.x8 ? tokens : 0, m.x8, m.x8_scale};
  if (p.router_weight) {
    r.logits = m.logits;
    status = launch_router_logits(m, r, float8, device, stream);
    if (status != cudaSuccess) return failed("launching the router's logits", status);
  }
  PermuteArgs permute = permute_args(layer, m, device, tokens);
  permute.few = m.logits_by.few, permute.barrier_set = m.fast;
  status = launch_select(r, permute, device, stream);
  if (status != cudaSuccess) return failed("launching the router", status);

  const void* x = r.x;
  if (cols != p.hidden_size) {
    status = launch_pad(r.x, m.x, tokens, p.hidden_size, cols, size_of(p.dtype), stream);
    if (status != cudaSuccess) return failed("launching the tokens' padding", status);
    x = m.x;
  }
  if (m.x8 && !m.fast) {
    float8.x = x;
    status = launch_float8(float8, p.dtype, device, stream);
    if (status != cudaSuccess) return failed("launching the tokens' conversion", status);
  }
  const bool has_shared = layer.shared_gate_up.count != 0;
  const Chain chain{layer.gate_up,
                    layer.down,
                    m.merged ? &layer.shared_gate_up : nullptr,
                    m.merged ? &layer.shared_down : nullptr,
                    x,
                    cols,
                    m.x8,
                    m.x8_scale,
                    m.sorted,
                    tokens};
  if (const char* bad = run_chain(chain, m.experts, p, device, stream)) return bad;
  if (has_shared && !m.merged) {
    status = launch_shared_tiles(m.shared.tiles, m.shared.num_tiles, tokens, m.shared.tile_tokens, stream);
    if (status != cudaSuccess) return failed("launching the shared expert's tiles", status);
    const Chain other{layer.shared_gate_up, layer.shared_down, nullptr, nullptr, x, cols, m.x8,
                      m.x8_scale,           nullptr,           tokens};
    if (const char* bad = run_chain(other, m.shared, p, device, stream)) return bad;
  }
  CombineArgs c{};
  c.out = m.experts.out, c.out_stride = cols, c.positions = m.positions, c.weights = m.weights;
  if (has_shared) {
    c.shared = m.merged ? m.experts.out + m.experts.own_rows * cols * size_of(p.dtype) : m.shared.out;
    c.shared_stride = cols, c.shared_gate = p.shared_gate_weight;
  }
  c.shared_gate_type = p.shared_gate_float32 ? DType::kFloat32 : p.dtype;
  c.x = r.x;
  c.y = static_cast<char*>(p.y) + begin * p.hidden_size * size_of(p.dtype);
  c.tokens = tokens, c.top_k = p.top_k, c.hidden = p.hidden_size;
  status = launch_combine(c, p.dtype, device, stream);
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
  if (p.router_weight && (steps & 1)) status = launch_router_logits(m, r, {}, device, stream);
  if (m.fast && (steps & 4)) {
    status = launch_split(r, m.logits_by, {}, device, stream);
    if (status == cudaSuccess) status = launch_sums_sm90(r, m.logits_by, device, stream);
  }
  if (status == cudaSuccess && (steps & 2)) {
    PermuteArgs permute = permute_args(layer, m, device, tokens);
    if ((steps & 1) && m.fast) permute.few = m.logits_by.few;  // else the logits' memory may hold anything
    status = launch_select(r, permute, device, stream);
  }
  return status == cudaSuccess ? nullptr : failed("launching the router", status);
}

}  // namespace deltafuse::moe
