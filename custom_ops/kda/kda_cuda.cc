// Dispatch of the CUDA kernels of KDA: what is refused, how much workspace a call needs, and which kernels it launches.
#include <cuda_runtime_api.h>

#include <cstdio>

#include "../common/device_info.h"
#include "kda.h"
#include "kda_launch.h"

namespace deltafuse::kda {
namespace {

constexpr int kMaxConvWidth = 8;
constexpr int64_t kAlignment = 256;

template <typename... Values>
const char* reason(const char* format, Values... values) {
  thread_local char text[256];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

bool kernels_take(int dim) { return dim == 64 || dim == 128 || dim == 192 || dim == 256; }
bool known(DType dtype) { return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16; }
int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
int64_t channels(const Params& p) {
  return 2 * int64_t(p.num_heads) * p.head_dim + int64_t(p.num_v_heads) * p.head_v_dim;
}

Sequences sequences(const Params& p) {
  Sequences s;
  s.cu_seqlens = p.cu_seqlens;
  s.seq_len = p.seq_len;
  s.num_seqs = p.num_seqs;
  s.is_int64 = p.cu_seqlens_int64;
  return s;
}

// A call whose cu_seqlens pointer is not known yet looks like a batch of one row with several sequences.
bool ragged(const Params& p) { return p.cu_seqlens || p.num_seqs != p.batch; }
// One token a sequence; ragged calls of as many tokens as sequences may still hold empty ones and are prefill.
bool is_decode(const Params& p) { return p.seq_len == 1 && !ragged(p); }
int64_t tokens(const Params& p) { return p.batch * p.seq_len; }

// Rows that 16-byte loads can take as they lie.
bool rows_are_wide(const Params& p) {
  const int64_t elements = 16 / size_of(p.dtype);
  return p.q_row_stride % elements == 0 && p.k_row_stride % elements == 0 && p.v_row_stride % elements == 0;
}
// The convolution by itself, into dense rows: for prompts; for a token only where value heads share a query head, since
// the decode kernel's clusters then do not cover all readers of a state updated in place. Prompts' rows that no wide
// load can take are copied the same way.
bool convolves_apart(const Params& p) {
  if (is_decode(p)) return p.conv_width > 0 && p.num_heads != p.num_v_heads;
  return p.conv_width > 0 || !rows_are_wide(p);
}

struct Workspace {
  int64_t rows = 0, units = 0, u = 0, total = 0;  // offsets of the parts
};
Workspace workspace_of(const Params& p) {
  Workspace w;
  if (convolves_apart(p)) w.total += aligned(tokens(p) * channels(p) * size_of(p.dtype));
  w.units = w.total;
  if (!is_decode(p)) {
    const UnitLayout unit{terms_of(p.dtype), p.head_dim, p.head_v_dim};
    int64_t slots = sequences(p).slots();
    if (ragged(p)) slots = p.seq_len / kChunk + p.num_seqs;
    w.total += aligned(slots * p.num_v_heads * unit.bytes());
    w.u = w.total;
    w.total += aligned(slots * p.num_v_heads * unit.u_bytes());
  }
  return w;
}

bool misaligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; }

const char* missing_operand(const Params& p) {
  if (tokens(p) > 0) {  // an empty tensor may have no address
    if (!p.q || !p.k || !p.v) return "q, k and v are required";
    if (!p.g || !p.beta) return "g and beta are required";
    if (!p.o) return "o is required";
    if (p.output_gate != OutputGate::kNone && !p.gate) return "gate is required with an output gate";
  }
  if (p.gate_activation != GateActivation::kNone && !p.A_log) return "A_log is required with a gate activation";
  if (p.conv_width > 0 && !p.conv_weight) return "conv_weight is required with a convolution";
  if (p.num_seqs != p.batch && !p.cu_seqlens) return "cu_seqlens is required where sequences are not rows of the batch";
  const void* wide[] = {p.g, p.o, p.gate, p.dt_bias, p.norm_weight, p.initial_state, p.final_state};
  for (const void* pointer : wide) {
    if (misaligned(pointer)) return "g, o, gate, dt_bias, norm_weight and the states must lie on 16-byte addresses";
  }
  if (!is_decode(p) && !convolves_apart(p) && (misaligned(p.q) || misaligned(p.k) || misaligned(p.v))) {
    return "q, k and v must lie on 16-byte addresses";
  }
  return nullptr;
}

const char* failed(const char* what, cudaError_t status) { return reason("%s: %s", what, cudaGetErrorString(status)); }

}  // namespace

cudaError_t device_info(DeviceInfo* info) {
  return read_device_info(info, compiled_capability, [](DeviceInfo*, int, int) { return cudaSuccess; });
}

const char* cuda_refusal(const Params& p, int compute_capability) {
  if (compute_capability < 80) {
    return reason("compute capability %d.%d: kernels need 8.0 or newer", compute_capability / 10,
                  compute_capability % 10);
  }
  if (p.num_heads < 1 || p.num_v_heads < 1) {
    return reason("num_heads %d, num_v_heads %d: both must be 1 or more", p.num_heads, p.num_v_heads);
  }
  if (p.num_v_heads % p.num_heads != 0) {
    return reason("num_v_heads %d is not a multiple of num_heads %d", p.num_v_heads, p.num_heads);
  }
  if (!kernels_take(p.head_dim)) return reason("head_dim %d: kernels take 64, 128, 192, 256", p.head_dim);
  if (!kernels_take(p.head_v_dim)) return reason("head_v_dim %d: kernels take 64, 128, 192, 256", p.head_v_dim);
  if (!known(p.dtype)) return reason("element type %d: kernels take float32, float16, bfloat16", int(p.dtype));
  if (!known(p.state_dtype))
    return reason("state type %d: kernels take float32, float16, bfloat16", int(p.state_dtype));
  if (p.conv_width < 0 || p.conv_width > kMaxConvWidth) {
    return reason("conv_width %d: expected 1 to %d, or 0 for none", p.conv_width, kMaxConvWidth);
  }
  if (p.conv_width > 0 && p.conv_state_width != 0 && p.conv_state_width != p.conv_width &&
      p.conv_state_width != p.conv_width - 1) {
    return reason("conv_state has %d columns: expected %d or %d", p.conv_state_width, p.conv_width - 1, p.conv_width);
  }
  return nullptr;
}

size_t cuda_workspace_bytes(const Params& p) { return static_cast<size_t>(workspace_of(p).total); }

const char* cuda_forward(const Params& p, void* workspace, void* stream_handle) {
  DeviceInfo device;
  cudaError_t status = device_info(&device);
  if (status != cudaSuccess) return failed("reading the device's properties", status);
  if (const char* refused = cuda_refusal(p, device.capability)) return refused;
  if (p.batch < 0 || p.seq_len < 0 || p.num_seqs < 0) return "batch, seq_len and num_seqs must not be negative";
  if (const char* missing = missing_operand(p)) return missing;
  const Workspace parts = workspace_of(p);
  if (parts.total > 0 && (!workspace || misaligned(workspace)))
    return "the workspace is missing or not on a 16-byte address";

  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const Sequences seqs = sequences(p);
  unsigned char* base = static_cast<unsigned char*>(workspace);
  Rows rows{p.q, p.k, p.v, p.q_row_stride, p.k_row_stride, p.v_row_stride};
  const bool apart = convolves_apart(p);
  const bool empty = tokens(p) == 0;  // states are handed on as they are
  if (apart && !empty) {
    unsigned char* dense = base + parts.rows;
    status = launch_conv(p, seqs, dense, stream);
    if (status != cudaSuccess) return failed("launching the convolution", status);
    const int64_t q_bytes = int64_t(p.num_heads) * p.head_dim * size_of(p.dtype);
    rows = {dense, dense + q_bytes, dense + 2 * q_bytes, channels(p), channels(p), channels(p)};
  }
  if (p.conv_width > 0 && p.present_conv_state && p.conv_state_width > 0 && apart) {
    status = launch_conv_state(p, seqs, stream);
    if (status != cudaSuccess) return failed("launching the convolution's state", status);
  }
  if (is_decode(p)) {
    status = launch_decode(p, rows, p.conv_width > 0 && !apart, stream);
    return status == cudaSuccess ? nullptr : failed("launching the decode kernel", status);
  }
  if (!empty) {
    status = launch_prepare(p, seqs, rows, base + parts.units, base + parts.u, stream);
    if (status != cudaSuccess) return failed("launching the chunks' preparation", status);
  }
  status = launch_scan(p, seqs, base + parts.units, base + parts.u, stream);
  if (status != cudaSuccess) return failed("launching the scan over chunks", status);
  if (!empty && (p.norm_weight || p.output_gate != OutputGate::kNone)) {
    status = launch_epilogue(p, tokens(p), stream);
    if (status != cudaSuccess) return failed("launching norm and gate", status);
  }
  return nullptr;
}

}  // namespace deltafuse::kda
