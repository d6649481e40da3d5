// Prefill's surroundings: the short convolution before it, its state after it, and RMS norm and output gate at the end.
#include "kda_device.cuh"

namespace deltafuse::kda {
namespace {

struct ConvArgs {
  Sequences seqs;
  Rows rows;
  const float *weight, *bias;
  const void* state;  // [N, C, state_width] or null
  void* out;          // dense rows [tokens, C]
  void* present;      // [N, C, state_width]
  int32_t width, state_width, silu;
  int64_t q_channels, v_channels;
  __device__ int64_t channels() const { return 2 * q_channels + v_channels; }
};

template <typename T>
__device__ __forceinline__ const T* input_row(const ConvArgs& args, int64_t channel, int64_t token) {
  if (channel < args.q_channels) return static_cast<const T*>(args.rows.q) + token * args.rows.q_stride + channel;
  channel -= args.q_channels;
  if (channel < args.q_channels) return static_cast<const T*>(args.rows.k) + token * args.rows.k_stride + channel;
  return static_cast<const T*>(args.rows.v) + token * args.rows.v_stride + channel - args.q_channels;
}

// One thread makes a channel's outputs of one chunk; neighbouring threads take neighbouring channels. The taps slide
// through registers.
template <typename T>
__global__ void __launch_bounds__(256) conv_kernel(const ConvArgs args) {
  const int64_t blocks = (args.channels() + 255) / 256;
  const int64_t channel = blockIdx.x % blocks * 256 + threadIdx.x, slot = blockIdx.x / blocks;
  const int64_t seq = sequence_of_slot(args.seqs, slot);
  const Span span = span_of(args.seqs, seq);
  const int64_t start = (slot - span.slot) * kChunk, length = span.end - span.begin;
  if (channel >= args.channels() || start >= length) return;
  const int64_t stop = length - start < kChunk ? length : start + kChunk;

  constexpr int kTaps = 8;  // spec.MAX_CONV_WIDTH; taps before the convolution's own are zero
  float weight[kTaps], x[kTaps];
  const int missing = kTaps - args.width;
#pragma unroll
  for (int i = 0; i < kTaps; ++i) {
    weight[i] = args.width == 0 ? (i == kTaps - 1 ? 1.f : 0.f)
                : i >= missing  ? args.weight[channel * args.width + i - missing]
                                : 0.f;
    const int64_t local = start + i - kTaps;  // taps of the token before the first
    x[i] = 0.f;
    if (i > missing && args.width > 1) {
      if (local >= 0) {
        x[i] = to_float(*input_row<T>(args, channel, span.begin + local));
      } else if (args.state) {
        x[i] = to_float(static_cast<const T*>(
            args.state)[(seq * args.channels() + channel) * args.state_width + args.state_width + local]);
      }
    }
  }
  const float bias = args.bias ? args.bias[channel] : 0.f;
  for (int64_t local = start; local < stop; ++local) {
#pragma unroll
    for (int i = 0; i + 1 < kTaps; ++i) x[i] = x[i + 1];
    x[kTaps - 1] = to_float(*input_row<T>(args, channel, span.begin + local));
    float sum = bias;
#pragma unroll
    for (int i = 0; i < kTaps; ++i) sum = fmaf(weight[i], x[i], sum);
    if (args.silu) sum = silu(sum);
    static_cast<T*>(args.out)[(span.begin + local) * args.channels() + channel] = from_float<T>(sum);
  }
}

// The last columns of (old state, inputs). A thread moves one channel's columns in ascending order, so that present may
// be the old state itself.
template <typename T>
__global__ void __launch_bounds__(256) conv_state_kernel(const ConvArgs args) {
  const int64_t blocks = (args.channels() + 255) / 256;
  const int64_t channel = blockIdx.x % blocks * 256 + threadIdx.x, seq = blockIdx.x / blocks;
  if (channel >= args.channels()) return;
  const Span span = span_of(args.seqs, seq);
  const int64_t length = span.end - span.begin, base = (seq * args.channels() + channel) * args.state_width;
  for (int column = 0; column < args.state_width; ++column) {
    const int64_t local = length - args.state_width + column;
    T x = from_float<T>(0.f);
    if (local >= 0) {
      x = *input_row<T>(args, channel, span.begin + local);
    } else if (args.state) {
      x = static_cast<const T*>(args.state)[base + args.state_width + local];
    }
    static_cast<T*>(args.present)[base + column] = x;
  }
}

struct EpilogueArgs {
  void* o;
  const void* gate;
  const float* norm_weight;
  int64_t rows;
  int32_t v;
  OutputGate output_gate;
  float eps;
};

// One warp for a token's head.
template <typename T>
__global__ void __launch_bounds__(256) epilogue_kernel(const EpilogueArgs args) {
  const int64_t row = int64_t(blockIdx.x) * 8 + threadIdx.x / 32;
  if (row >= args.rows) return;
  const int lane = threadIdx.x % 32;
  T* o = static_cast<T*>(args.o) + row * args.v;
  const T* gate = args.gate ? static_cast<const T*>(args.gate) + row * args.v : nullptr;
  float x[2][4], sum = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int c = i * 128 + lane * 4;
    if (c >= args.v) continue;
    load4(o + c, x[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum = fmaf(x[i][j], x[i][j], sum);
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  const float factor = args.norm_weight ? rsqrtf(sum / args.v + args.eps) : 1.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int c = i * 128 + lane * 4;
    if (c >= args.v) continue;
    float w[4] = {1.f, 1.f, 1.f, 1.f}, z[4];
    if (args.norm_weight) load4(args.norm_weight + c, w);
    if (gate) load4(gate + c, z);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[i][j] *= factor * w[j];
      if (args.output_gate == OutputGate::kSigmoid) x[i][j] *= sigmoid(z[j]);
      if (args.output_gate == OutputGate::kSilu) x[i][j] *= silu(z[j]);
    }
    store4(o + c, x[i]);
  }
}

ConvArgs conv_args(const Params& p, const Sequences& seqs) {
  ConvArgs args;
  args.seqs = seqs;
  args.rows = {p.q, p.k, p.v, p.q_row_stride, p.k_row_stride, p.v_row_stride};
  args.weight = p.conv_weight, args.bias = p.conv_bias, args.state = p.conv_state;
  args.out = nullptr, args.present = p.present_conv_state;
  args.width = p.conv_width, args.state_width = p.conv_state_width, args.silu = p.conv_silu;
  args.q_channels = int64_t(p.num_heads) * p.head_dim, args.v_channels = int64_t(p.num_v_heads) * p.head_v_dim;
  return args;
}

// Calls f with a null pointer of the element type.
template <typename F>
cudaError_t for_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32:
      f(static_cast<float*>(nullptr));
      break;
    case DType::kFloat16:
      f(static_cast<__half*>(nullptr));
      break;
    case DType::kBFloat16:
      f(static_cast<__nv_bfloat16*>(nullptr));
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

unsigned channel_blocks(const ConvArgs& args, int64_t times) {
  return static_cast<unsigned>((2 * args.q_channels + args.v_channels + 255) / 256 * times);
}

}  // namespace

cudaError_t launch_conv(const Params& params, const Sequences& seqs, void* out, cudaStream_t stream) {
  ConvArgs args = conv_args(params, seqs);
  args.out = out;
  if (seqs.slots() == 0) return cudaSuccess;
  return for_type(params.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    conv_kernel<T><<<channel_blocks(args, seqs.slots()), 256, 0, stream>>>(args);
  });
}

cudaError_t launch_conv_state(const Params& params, const Sequences& seqs, cudaStream_t stream) {
  const ConvArgs args = conv_args(params, seqs);
  if (seqs.num_seqs == 0) return cudaSuccess;
  return for_type(params.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    conv_state_kernel<T><<<channel_blocks(args, seqs.num_seqs), 256, 0, stream>>>(args);
  });
}

cudaError_t launch_epilogue(const Params& params, int64_t tokens, cudaStream_t stream) {
  const EpilogueArgs args{params.o,           params.output_gate == OutputGate::kNone ? nullptr : params.gate,
                          params.norm_weight, tokens * params.num_v_heads,
                          params.head_v_dim,  params.output_gate,
                          params.norm_eps};
  if (args.rows == 0) return cudaSuccess;
  return for_type(params.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    epilogue_kernel<T><<<static_cast<unsigned>((args.rows + 7) / 8), 256, 0, stream>>>(args);
  });
}

}  // namespace deltafuse::kda
