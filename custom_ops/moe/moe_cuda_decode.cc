// A call of a few tokens: its workspace and its launches.
#include <cstring>

#include "moe_cuda_layer.h"
#include "moe_decode.h"

namespace deltafuse::moe {
namespace {

constexpr int kMostTiles = 256;  // of the first product: tasks are counted in 32 bits

bool of_integers(const Packed& w) { return w.pack == Pack::kInt4 || w.pack == Pack::kInt8; }
// A right operand for a matrix's products, and another's if that takes the same.
Operand operand_for(const Packed& w, const Packed& other, Parts* parts, int64_t tokens) {
  Operand x;
  x.cols = w.blocks() * 128, x.pack = w.pack;
  x.data = parts->take<uint16_t>(tokens * x.cols);
  if (x.digits()) x.scales = parts->take<float>(tokens * w.blocks());
  if (x.digits() && (w.zeros || (other.count && other.zeros))) x.sums = parts->take<float>(tokens * w.blocks() * 4);
  return x;
}
bool takes(const Packed& w, const Operand& x) { return of_integers(w) ? x.digits() : x.pack == w.pack; }

// The arguments with their places in the workspace at `base`, and its size.
DecodeArgs decode_args(const CudaLayer& layer, const Params& p, void* base, int64_t* bytes) {
  DecodeArgs a{};
  Parts parts(base);
  const int64_t tokens = p.num_tokens, pairs = tokens * p.top_k;
  a.router = router_args(p, 0, static_cast<int>(tokens));
  float* logits = parts.take<float>(tokens * p.num_experts);
  if (p.router_weight) a.router.logits = logits;
  a.scored = parts.take<float>(tokens * 2 * kScored);
  a.each = scored_each(a.router);
  a.gate_up = layer.gate_up, a.down = layer.down;
  a.shared_gate_up = layer.shared_gate_up, a.shared_down = layer.shared_down;
  a.activity = activity(p);
  a.x = operand_for(layer.gate_up, layer.shared_gate_up, &parts, tokens);
  a.h_stride = hidden_stride(layer.gate_up, layer.down);
  if (layer.shared_gate_up.count) {
    if (!takes(layer.shared_gate_up, a.x)) {
      a.shared_x = operand_for(layer.shared_gate_up, Packed{}, &parts, tokens);
    }
    a.h_stride = std::max(a.h_stride, hidden_stride(layer.shared_gate_up, layer.shared_down));
    a.shared_gate = p.shared_gate_weight;
    a.shared_gate_type = p.shared_gate_float32 ? DType::kFloat32 : p.dtype;
    float* gates = parts.take<float>(tokens);
    if (a.shared_gate) a.gates = gates;
  }
  a.routed = parts.take<int32_t>(1 + 2 * pairs);
  a.flag_count = static_cast<int>((tokens + 7) / 8) * kManyBlocks;
  a.flags = parts.take<int32_t>(a.flag_count);
  a.parts = parts.take<float>(a.flag_count * 128);
  a.h = parts.take<uint16_t>((pairs + tokens) * a.h_stride);
  const Packed &down = layer.down, &shared = layer.shared_down;
  const bool digits = of_integers(down) || (shared.count && of_integers(shared));
  const bool zeros = (of_integers(down) && down.zeros) || (shared.count && of_integers(shared) && shared.zeros);
  if (digits) a.h_scales = parts.take<float>((pairs + tokens) * (a.h_stride / 8));
  if (zeros) a.h_sums = parts.take<float>((pairs + tokens) * (a.h_stride / 8));
  a.has_scales = digits, a.has_sums = zeros;
  a.y = p.y;
  a.by_slabs = Divider(layer.gate_up.tiles * 16), a.by_top_k = Divider(p.top_k);
  a.by_stages = Divider(layer.down.stages);
  if (layer.shared_gate_up.count) a.by_shared_slabs = Divider(layer.shared_gate_up.tiles * 16);
  a.tuning = decode_tuning();
  a.one = second_of_one(a);
  a.polled = keys_polled(a);
  if (a.polled) a.choice = ExpertParts(a.router);
  *bytes = parts.used();
  return a;
}

}  // namespace

bool is_few(const CudaLayer& layer, const Params& p, const DeviceInfo& device) {
  const int tuned = decode_tuning().tokens, tokens = tuned < 0 ? decode_tokens(layer.gate_up.pack) : tuned;
  if (p.dtype == DType::kFloat32 || p.num_tokens > tokens || p.num_tokens * p.top_k > kDecodePairs) return false;
  if (layer.shared_gate_up.count) {
    // Two formats in one kernel: the experts' own, and the activations'.
    const Packed &a = layer.shared_gate_up, &b = layer.shared_down;
    if (a.pack != b.pack || (a.pack != Pack::kPlain && a.pack != layer.gate_up.pack)) return false;
  }
  if (layer.gate_up.pack != layer.down.pack || layer.gate_up.tiles > kMostTiles) return false;
  int64_t bytes = 0;
  return decode_shared_bytes(decode_args(layer, p, nullptr, &bytes)) + 1024 <= static_cast<size_t>(device.shared_bytes);
}

int64_t few_bytes(const CudaLayer& layer, const Params& p) {
  int64_t bytes = 0;
  static_cast<void>(decode_args(layer, p, nullptr, &bytes));
  return bytes;
}

const char* run_few(const CudaLayer& layer, const Params& p, const DeviceInfo& device, void* workspace,
                    cudaStream_t stream) {
  int64_t bytes = 0;
  const DecodeArgs a = decode_args(layer, p, workspace, &bytes);
  cudaError_t status = launch_prepare(a, p.dtype, device, stream);
  if (status != cudaSuccess) return failed("launching the router's logits", status);
  status = launch_decode(a, p.dtype, device, stream);
  return status == cudaSuccess ? nullptr : failed("launching the experts", status);
}

DecodeTuning& decode_tuning() {
  static DecodeTuning tuning;
  return tuning;
}

bool tune_decode(const char* name, int value) {
  DecodeTuning& tuning = decode_tuning();
  const struct {
    const char* name;
    int32_t* value;
    int least, most;
    bool power;  // of two
  } known[] = {{"tokens", &tuning.tokens, -1, kDecodeTokens, false},
               {"first_threads", &tuning.first_threads, 256, 512, true},
               {"first_blocks", &tuning.first_blocks, 0, 8, false},
               {"split", &tuning.split, 1, 8, true},
               {"second_threads", &tuning.second_threads, 64, 256, true},
               {"many_threads", &tuning.many_threads, 64, 384, false},
               {"dependent", &tuning.dependent, 0, 1, false},
               {"prefetch", &tuning.prefetch, 0, 3, false}};
  for (const auto& one : known) {
    if (std::strcmp(name, one.name) != 0) continue;
    if (value < one.least || value > one.most || (one.power && (value & (value - 1)) != 0)) return false;
    if (one.value == &tuning.many_threads && value % 32 != 0) return false;
    *one.value = value;
    return true;
  }
  return false;
}

}  // namespace deltafuse::moe
