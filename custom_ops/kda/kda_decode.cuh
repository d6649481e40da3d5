// Decode: one token a sequence, everything in one launch. A block of 128 threads takes a sequence, a value head and a
// slice of 32 value columns (or several, one after the other); its part of the state is read once into registers, both
// products with it are made in one pass, and it is written once:
//   x = S^T (d * k)   y = S^T (d * q)   u = beta (v - x)   S <- d S + k u^T   o = scale (y + (q . k) u)
// A head's slices meet only where RMS norm needs their sum, and where a convolution state updated in place must not be
// written before all have read it: they form a cluster then, or, without clusters (before sm_90), one block.
// A token takes a few microseconds, so latency is what counts: all loads are issued before the first is used.
#pragma once

#include <type_traits>

#include "kda_device.cuh"

namespace deltafuse::kda {

constexpr int kDecodeThreads = 128;

struct DecodeArgs {
  Params p;
  Rows rows;
  int32_t convolve;
  int32_t slices;   // of a block, one after the other
  int32_t cluster;  // blocks of a head that wait for each other; 1: none
};

// Sums of three numbers over the block; scratch [4][4].
__device__ __forceinline__ float3 block_sums(float x, float y, float z, float* scratch) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, i);
    y += __shfl_xor_sync(0xffffffffu, y, i);
    z += __shfl_xor_sync(0xffffffffu, z, i);
  }
  if (threadIdx.x % 32 == 0) {
    *reinterpret_cast<float4*>(scratch + threadIdx.x / 32 * 4) = make_float4(x, y, z, 0.f);
  }
  __syncthreads();
  float3 sum = make_float3(0.f, 0.f, 0.f);
#pragma unroll
  for (int i = 0; i < kDecodeThreads / 32; ++i) {
    const float4 part = *reinterpret_cast<const float4*>(scratch + i * 4);
    sum.x += part.x, sum.y += part.y, sum.z += part.z;
  }
  return sum;
}

// One channel of the token's q, k or v, loaded but not used yet: its row's value and, with kConvolve, the taps.
template <typename T, bool kConvolve>
struct Channel {
  T now;
};
template <typename T>
struct Channel<T, true> {
  T now, taps[7];
  float weights[8], bias;
};
// `which`: 0 q, 1 k, 2 v.
template <typename T, bool kConvolve>
__device__ __forceinline__ void load_channel(Channel<T, kConvolve>& x, const DecodeArgs& a, int64_t seq, int which,
                                             int64_t channel) {
  const Params& p = a.p;
  const void* rows = which == 0 ? a.rows.q : which == 1 ? a.rows.k : a.rows.v;
  const int64_t stride = which == 0 ? a.rows.q_stride : which == 1 ? a.rows.k_stride : a.rows.v_stride;
  x.now = static_cast<const T*>(rows)[seq * stride + channel];
  if constexpr (kConvolve) {
    const int64_t q_channels = int64_t(p.num_heads) * p.head_dim;
    const int64_t channels = 2 * q_channels + int64_t(p.num_v_heads) * p.head_v_dim;
    const int64_t c = which * q_channels + channel;
    const T* state = static_cast<const T*>(p.conv_state) + (seq * channels + c) * p.conv_state_width +
                     (p.conv_state_width - p.conv_width + 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x.weights[i] = i < p.conv_width ? p.conv_weight[c * p.conv_width + i] : 0.f;
      if (i < 7) x.taps[i] = i + 1 < p.conv_width && p.conv_state ? state[i] : from_float<T>(0.f);
    }
    x.bias = p.conv_bias ? p.conv_bias[c] : 0.f;
  }
}
template <typename T, bool kConvolve>
__device__ __forceinline__ float value_of(const Channel<T, kConvolve>& x, const DecodeArgs& a) {
  const float now = to_float(x.now);
  if constexpr (!kConvolve) {
    return now;
  } else {
    float sum = x.bias;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float tap = i + 1 == a.p.conv_width ? now : i < 7 ? to_float(x.taps[i < 7 ? i : 0]) : 0.f;
      sum = fmaf(x.weights[i], tap, sum);
    }
    return a.p.conv_silu ? silu(sum) : sum;
  }
}

// The convolution's state after this token, for one channel.
template <typename T>
__device__ __forceinline__ void shift_state(const DecodeArgs& a, int64_t seq, int which, int64_t channel) {
  const Params& p = a.p;
  const void* x = which == 0 ? a.rows.q : which == 1 ? a.rows.k : a.rows.v;
  const int64_t stride = which == 0 ? a.rows.q_stride : which == 1 ? a.rows.k_stride : a.rows.v_stride;
  const int64_t q_channels = int64_t(p.num_heads) * p.head_dim;
  const int64_t channels = 2 * q_channels + int64_t(p.num_v_heads) * p.head_v_dim;
  const int64_t base = (seq * channels + which * q_channels + channel) * p.conv_state_width;
  T columns[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    columns[i] = from_float<T>(0.f);
    if (i + 1 < p.conv_state_width && p.conv_state) columns[i] = static_cast<const T*>(p.conv_state)[base + i + 1];
    if (i + 1 == p.conv_state_width) columns[i] = static_cast<const T*>(x)[seq * stride + channel];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < p.conv_state_width) static_cast<T*>(p.present_conv_state)[base + i] = columns[i];
  }
}

__device__ __forceinline__ float4 load_state4(const void* p, int64_t i, DType dtype) {
  if (dtype == DType::kFloat32) return *reinterpret_cast<const float4*>(static_cast<const float*>(p) + i);
  float x[4];
  if (dtype == DType::kFloat16) {
    load4(static_cast<const __half*>(p) + i, x);
  } else {
    load4(static_cast<const __nv_bfloat16*>(p) + i, x);
  }
  return make_float4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void store_state4(void* p, int64_t i, DType dtype, float4 s) {
  if (dtype == DType::kFloat32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p) + i) = s;
    return;
  }
  const float x[4] = {s.x, s.y, s.z, s.w};
  if (dtype == DType::kFloat16) {
    store4(static_cast<__half*>(p) + i, x);
  } else {
    store4(static_cast<__nv_bfloat16*>(p) + i, x);
  }
}

// kVFirst: the state lies [V, K], else [K, V].
template <typename T, int K, bool kVFirst>
__global__ void __launch_bounds__(kDecodeThreads, K <= 128 ? 5 : 4)
    decode_kernel(const __grid_constant__ DecodeArgs args) {
  constexpr int kThreads = kDecodeThreads, kRounds = (K + kThreads - 1) / kThreads;
  const Params& p = args.p;
  // squares: of a cluster's blocks, from 9.0 on
  [[maybe_unused]] __shared__ __align__(16) float q_now[K], k_now[K], decay[K], scratch[16], squares[4];
  __shared__ float v_now[256], o_now[256];
  __shared__ __align__(16) float partial[4][2][kSlice];

  const int V = p.head_v_dim;
  const int parts = V / kSlice / args.slices;  // blocks of a head
  const int part = blockIdx.x % parts;
  const int head = blockIdx.x / parts % p.num_v_heads;
  const int64_t seq = blockIdx.x / parts / p.num_v_heads;
  const int q_head = head / (p.num_v_heads / p.num_heads);
  const int tid = threadIdx.x, first = part * args.slices * kSlice, width = args.slices * kSlice;

  // Where this thread's part of a slice's state lies.
  constexpr int kLoads = K * kSlice / 4 / kThreads;
  const int64_t base = (seq * p.num_v_heads + head) * int64_t(K) * V;
  const auto state_index = [&](int slice, int i) -> int64_t {
    if constexpr (kVFirst) {  // 8 threads along K, rows tid / 8 and tid / 8 + 16
      return base + int64_t(first + slice * kSlice + tid / 8 + (i & 1) * 16) * K + (i / 2) * 32 + tid % 8 * 4;
    } else {  // 8 threads along V, rows tid / 8 + 16 i
      return base + int64_t(tid / 8 + 16 * i) * V + first + slice * kSlice + tid % 8 * 4;
    }
  };
  const auto load_slice = [&](int slice, float4(&s)[kLoads]) {
    if (!p.initial_state) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) s[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    } else if (p.state_dtype == DType::kFloat32) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) s[i] = load_state4(p.initial_state, state_index(slice, i), DType::kFloat32);
    } else if (p.state_dtype == DType::kFloat16) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) s[i] = load_state4(p.initial_state, state_index(slice, i), DType::kFloat16);
    } else {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) s[i] = load_state4(p.initial_state, state_index(slice, i), DType::kBFloat16);
    }
  };
  // The token's vectors are asked for first and the state behind them. The convolution's taps take the registers that
  // the state would need, so with it the state is only called into the cache meanwhile.
  T beta_in;
  float4 s[kLoads];
  float q_sum = 0.f, k_sum = 0.f, qk_sum = 0.f;
  const auto make_vectors = [&](auto convolve) {
    constexpr bool kConvolve = decltype(convolve)::value;
    Channel<T, kConvolve> q_in[kRounds], k_in[kRounds], v_in[2];
    T g_in[kRounds];
    float g_bias[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int c = tid + i * kThreads;
      if (c < K) {
        load_channel<T, kConvolve>(q_in[i], args, seq, 0, int64_t(q_head) * K + c);
        load_channel<T, kConvolve>(k_in[i], args, seq, 1, int64_t(q_head) * K + c);
        g_in[i] = static_cast<const T*>(p.g)[(seq * p.num_v_heads + head) * K + c];
        g_bias[i] = p.dt_bias ? p.dt_bias[int64_t(head) * K + c] : 0.f;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = tid + i * kThreads;
      if (c < width) load_channel<T, kConvolve>(v_in[i], args, seq, 2, int64_t(head) * V + first + c);
    }
    beta_in = static_cast<const T*>(p.beta)[seq * p.num_v_heads + head];
    const float rate_in = p.gate_activation == GateActivation::kNone ? 0.f : p.A_log[head];
    if constexpr (!kConvolve) load_slice(0, s);
    const float gate_rate = __expf(rate_in);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int c = tid + i * kThreads;
      if (c < K) {
        const float q = value_of<T, kConvolve>(q_in[i], args), k = value_of<T, kConvolve>(k_in[i], args);
        q_now[c] = q, k_now[c] = k;
        decay[c] = decay_of(to_float(g_in[i]) + g_bias[i], p.gate_activation, gate_rate, p.lower_bound);
        q_sum = fmaf(q, q, q_sum), k_sum = fmaf(k, k, k_sum), qk_sum = fmaf(q, k, qk_sum);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (tid + i * kThreads < width) v_now[tid + i * kThreads] = value_of<T, kConvolve>(v_in[i], args);
    }
  };
  if (args.convolve) {
    if (p.initial_state) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        ptx::prefetch(static_cast<const char*>(p.initial_state) +
                      state_index(0, i) * (p.state_dtype == DType::kFloat32 ? 4 : 2));
      }
    }
    make_vectors(std::true_type());
    load_slice(0, s);
  } else {
    make_vectors(std::false_type());
  }
  float beta = to_float(beta_in);
  if (p.beta_sigmoid) beta = sigmoid(beta);
  beta *= p.beta_scale;
  const float3 sums = block_sums(q_sum, k_sum, qk_sum, scratch);  // its barrier also publishes the vectors
  const float q_factor = norm_factor(sums.x, p.qk_l2norm, p.l2norm_eps) * p.scale;
  const float k_factor = norm_factor(sums.y, p.qk_l2norm, p.l2norm_eps);
  const float qk = sums.z * q_factor * k_factor;

  float square = 0.f;
  for (int slice = 0; slice < args.slices; ++slice) {
    if (slice > 0) load_slice(slice, s);
    if constexpr (kVFirst) {
      float x[2] = {}, y[2] = {};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int c = (i / 2) * 32 + tid % 8 * 4;
        const float4 d = *reinterpret_cast<const float4*>(decay + c), k = *reinterpret_cast<const float4*>(k_now + c),
                     q = *reinterpret_cast<const float4*>(q_now + c);
        s[i].x *= d.x, s[i].y *= d.y, s[i].z *= d.z, s[i].w *= d.w;
        x[i & 1] += s[i].x * k.x + s[i].y * k.y + s[i].z * k.z + s[i].w * k.w;
        y[i & 1] += s[i].x * q.x + s[i].y * q.y + s[i].z * q.z + s[i].w * q.w;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 4; i > 0; i /= 2) {
          x[j] += __shfl_xor_sync(0xffffffffu, x[j], i);
          y[j] += __shfl_xor_sync(0xffffffffu, y[j], i);
        }
        const int v = slice * kSlice + tid / 8 + j * 16;
        const float u = beta * (v_now[v] - k_factor * x[j]);
        const float o = q_factor * y[j] + qk * u;
        x[j] = u * k_factor;
        if (tid % 8 == 0) o_now[v] = o, square = fmaf(o, o, square);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const float4 k = *reinterpret_cast<const float4*>(k_now + (i / 2) * 32 + tid % 8 * 4);
        s[i].x = fmaf(k.x, x[i & 1], s[i].x), s[i].y = fmaf(k.y, x[i & 1], s[i].y);
        s[i].z = fmaf(k.z, x[i & 1], s[i].z), s[i].w = fmaf(k.w, x[i & 1], s[i].w);
      }
    } else {
      float x[4] = {}, y[4] = {};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int c = tid / 8 + 16 * i;
        const float d = decay[c], k = k_now[c], q = q_now[c];
        s[i].x *= d, s[i].y *= d, s[i].z *= d, s[i].w *= d;
        x[0] = fmaf(s[i].x, k, x[0]), x[1] = fmaf(s[i].y, k, x[1]);
        x[2] = fmaf(s[i].z, k, x[2]), x[3] = fmaf(s[i].w, k, x[3]);
        y[0] = fmaf(s[i].x, q, y[0]), y[1] = fmaf(s[i].y, q, y[1]);
        y[2] = fmaf(s[i].z, q, y[2]), y[3] = fmaf(s[i].w, q, y[3]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 16; i > 4; i /= 2) {
          x[j] += __shfl_xor_sync(0xffffffffu, x[j], i);
          y[j] += __shfl_xor_sync(0xffffffffu, y[j], i);
        }
      }
      if (slice > 0) __syncthreads();  // the last slice's sums have been read
      if (tid % 32 < 8) {
        *reinterpret_cast<float4*>(&partial[tid / 32][0][tid % 8 * 4]) = make_float4(x[0], x[1], x[2], x[3]);
        *reinterpret_cast<float4*>(&partial[tid / 32][1][tid % 8 * 4]) = make_float4(y[0], y[1], y[2], y[3]);
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = tid % 8 * 4 + j, v = slice * kSlice + column;
        const float xs = partial[0][0][column] + partial[1][0][column] + partial[2][0][column] + partial[3][0][column];
        const float ys = partial[0][1][column] + partial[1][1][column] + partial[2][1][column] + partial[3][1][column];
        const float u = beta * (v_now[v] - k_factor * xs);
        const float o = q_factor * ys + qk * u;
        x[j] = u * k_factor;
        if (tid < 8) o_now[v] = o, square = fmaf(o, o, square);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const float k = k_now[tid / 8 + 16 * i];
        s[i].x = fmaf(k, x[0], s[i].x), s[i].y = fmaf(k, x[1], s[i].y);
        s[i].z = fmaf(k, x[2], s[i].z), s[i].w = fmaf(k, x[3], s[i].w);
      }
    }
    if (p.final_state) {
      if (p.state_dtype == DType::kFloat32) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) store_state4(p.final_state, state_index(slice, i), DType::kFloat32, s[i]);
      } else if (p.state_dtype == DType::kFloat16) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) store_state4(p.final_state, state_index(slice, i), DType::kFloat16, s[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) store_state4(p.final_state, state_index(slice, i), DType::kBFloat16, s[i]);
      }
    }
  }

  float norm = 1.f;
  __syncthreads();  // o_now is there, and scratch has been read
  if (p.norm_weight) square = block_sums(square, 0.f, 0.f, scratch).x;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (args.cluster > 1) {
    if (tid == 0) squares[0] = square;
    ptx::cluster_sync();
    if (p.norm_weight) {
      square = 0.f;
      for (int i = 0; i < args.cluster; ++i) square += ptx::load_remote(squares, i);
    }
  }
#endif
  if (p.norm_weight) norm = rsqrtf(square / V + p.norm_eps);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int c = tid + i * kThreads;
    if (c >= width) break;
    float o = o_now[c] * norm;
    if (p.norm_weight) o *= p.norm_weight[first + c];
    const int64_t at = (seq * p.num_v_heads + head) * V + first + c;
    if (p.output_gate == OutputGate::kSigmoid) o *= sigmoid(to_float(static_cast<const T*>(p.gate)[at]));
    if (p.output_gate == OutputGate::kSilu) o *= silu(to_float(static_cast<const T*>(p.gate)[at]));
    static_cast<T*>(p.o)[at] = from_float<T>(o);
  }
  if (args.convolve && p.present_conv_state) {
    if (part == 0 && head % (p.num_v_heads / p.num_heads) == 0) {
      for (int c = tid; c < K; c += kThreads) {
        shift_state<T>(args, seq, 0, int64_t(q_head) * K + c);
        shift_state<T>(args, seq, 1, int64_t(q_head) * K + c);
      }
    }
    for (int c = tid; c < width; c += kThreads) shift_state<T>(args, seq, 2, int64_t(head) * V + first + c);
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (args.cluster > 1) ptx::cluster_sync();  // nobody leaves while others read its sum
#endif
}

template <typename T, int K>
cudaError_t launch_decode_as(const DecodeArgs& args, int64_t blocks, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kDecodeThreads);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  if (args.cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(args.cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return args.p.state_v_first ? cudaLaunchKernelEx(&config, decode_kernel<T, K, true>, args)
                              : cudaLaunchKernelEx(&config, decode_kernel<T, K, false>, args);
}

template <typename T>
cudaError_t launch_decode_for(const DecodeArgs& args, int64_t blocks, cudaStream_t stream) {
  switch (args.p.head_dim) {
    case 64:
      return launch_decode_as<T, 64>(args, blocks, stream);
    case 128:
      return launch_decode_as<T, 128>(args, blocks, stream);
    case 192:
      return launch_decode_as<T, 192>(args, blocks, stream);
    case 256:
      return launch_decode_as<T, 256>(args, blocks, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace deltafuse::kda
