// The pass over new tokens: the latent's norm, rotation of keys and queries, the cache's new entries, and what only the
// device can see of wrong values. Two blocks a token, one for the cache and one for the queries. Also the copy of a
// paged or 8-bit cache into plain rows.
#include "mla_device.cuh"

namespace deltafuse::mla {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kLaneChannels = kFloat8Group / 32;

__device__ float block_sum(float x, float* shared) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0.0f;
  for (int w = 0; w < kWarps; ++w) x += shared[w];
  return x;
}

__device__ int64_t table_row_of(const Params& p, int64_t b, int64_t s) {
  return p.position_ids ? p.position_ids[b * p.position_batch_stride + s] : b * p.cos_batch_stride + s;
}

// Are the values fit to be used? All threads get the same answer.
__device__ bool check(const TokenArgs& a, int64_t b, int64_t s, int64_t* table_row) {
  const Params& p = a.p;
  Fault fault = Fault::kNone;
  *table_row = table_row_of(p, b, s);
  if (p.position_ids && (*table_row < 0 || *table_row >= p.cos_rows)) fault = Fault::kPosition;
  const int64_t past = a.lengths.given(b);
  if (!a.lengths.valid(past)) {
    fault = Fault::kLength;
  } else if (a.cache.block_table) {
    const int64_t blocks = (past + p.seq_len + p.block_size - 1) / p.block_size;
    int wrong = 0;
    for (int64_t i = threadIdx.x; i < blocks; i += kThreads) wrong |= a.cache.row(b, i * p.block_size) < 0;
    if (__syncthreads_or(wrong)) fault = Fault::kBlock;
  }
  if (fault != Fault::kNone && threadIdx.x == 0) report(p, fault);
  return fault == Fault::kNone;
}

// Into the cache where row is not negative, and where they are kept as they are.
template <typename T>
__device__ void write_latent(const TokenArgs& a, const T* in, int64_t row, float* fresh, float* shared) {
  const Params& p = a.p;
  const int width = p.kv_lora_rank, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float factor = 1.0f;
  if (p.kv_norm_weight) {
    float squares = 0.0f;
    for (int c = threadIdx.x; c < width; c += kThreads) squares += to_float(in[c]) * to_float(in[c]);
    factor = rsqrtf(block_sum(squares, shared) / width + p.kv_norm_eps);
  }
  const int groups = (width + kFloat8Group - 1) / kFloat8Group;
  for (int g = warp; g < groups; g += kWarps) {
    float x[kLaneChannels], largest = 0.0f;
    for (int i = 0; i < kLaneChannels; ++i) {
      const int c = g * kFloat8Group + i * 32 + lane;
      x[i] = c < width ? to_float(in[c]) * factor : 0.0f;
      if (p.kv_norm_weight && c < width) x[i] *= p.kv_norm_weight[c];
      largest = fmaxf(largest, fabsf(x[i]));
      if (fresh && c < width) fresh[c] = x[i];
    }
    if (row < 0) continue;
    float scale = 1.0f;
    if (a.cache.type == CacheType::kFloat8) {
      for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      if (largest > 0.0f) scale = largest / kFloat8Max;
      if (lane == 0) a.cache.scale[row * groups + g] = scale;
    }
    for (int i = 0; i < kLaneChannels; ++i) {
      const int c = g * kFloat8Group + i * 32 + lane;
      if (c >= width) continue;
      const int64_t at = row * a.cache.latent_row + c;
      if (a.cache.type == CacheType::kSame) {
        static_cast<T*>(a.cache.latent)[at] = from_float<T>(x[i]);
      } else if (a.cache.type == CacheType::kInt8) {
        const float channel = a.cache.scale[c];
        const float code = channel != 0.0f ? rintf(x[i] / channel) : 0.0f;
        static_cast<int8_t*>(a.cache.latent)[at] = static_cast<int8_t>(fminf(fmaxf(code, -127.0f), 127.0f));
      } else {
        static_cast<uint8_t*>(a.cache.latent)[at] = float8_code(x[i] / scale);
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) tokens_kernel(const TokenArgs a) {
  __shared__ float shared[kWarps];
  // Only then may the next kernel begin: what it overwrites is read by the calls before.
  ptx::wait_prior_grid();
  ptx::launch_dependents();
  const Params& p = a.p;
  const int64_t token = blockIdx.x, b = token / p.seq_len, s = token % p.seq_len;
  const int width = p.kv_lora_rank, rotary = p.qk_rope_head_dim, heads = p.num_heads;
  const int head_dim = p.qk_nope_head_dim + rotary;
  int64_t table_row = 0;
  const bool fit = blockIdx.y > 0 || check(a, b, s, &table_row);
  if (blockIdx.y > 0 && p.rope != Rope::kNone) table_row = table_row_of(p, b, s);
  if (p.position_ids && (table_row < 0 || table_row >= p.cos_rows)) table_row = 0;
  if (blockIdx.y == 0) {
    const int64_t row = a.by_token ? token : a.cache.row(b, a.lengths.before(b) + s);
    const T* latent = static_cast<const T*>(p.latent) + token * p.latent_row_stride;
    const T* k_rope = p.k_rope ? static_cast<const T*>(p.k_rope) + token * p.k_rope_row_stride : latent + width;
    const bool cached = fit && row >= 0;
    float* fresh = a.fresh ? a.fresh + token * (width + rotary) : nullptr;
    if (cached || fresh) {
      write_latent(a, latent, cached ? row : -1, fresh, shared);
      T* out = static_cast<T*>(a.cache.rope) + row * a.cache.rope_row;
      auto put = [&](int c, float x) {
        if (cached) out[c] = from_float<T>(x);
        if (fresh) fresh[width + c] = x;
      };
      if (p.rope == Rope::kNone) {
        for (int c = threadIdx.x; c < rotary; c += kThreads) put(c, to_float(k_rope[c]));
      } else {
        for (int j = threadIdx.x; j < rotary / 2; j += kThreads) {
          const Pair r = pair_of<T>(p, table_row, j);
          const float x = to_float(k_rope[r.i0]), y = to_float(k_rope[r.i1]);
          put(r.o0, x * r.c0 - y * r.s0);
          put(r.o1, y * r.c1 + x * r.s1);
        }
      }
    }
    return;
  }
  const float factor = p.q_scale ? p.q_scale[b * p.q_scale_batch_stride + s] : 1.0f;
  const T* q = static_cast<const T*>(p.q) + token * heads * head_dim;
  auto put = [&](int64_t at, float x) {
    if (a.q_rope_float32) {
      static_cast<float*>(a.q_rope)[at] = x * factor;
    } else {
      static_cast<T*>(a.q_rope)[at] = from_float<T>(x * factor);
    }
  };
  if (p.rope == Rope::kNone) {
    for (int i = threadIdx.x; i < heads * rotary; i += kThreads) {
      const int h = i / rotary, c = i % rotary;
      put((token * heads + h) * a.q_rope_row + c, to_float(q[h * head_dim + p.qk_nope_head_dim + c]));
    }
  } else {
    const int half = rotary / 2;
    for (int i = threadIdx.x; i < heads * half; i += kThreads) {
      const int h = i / half;
      const Pair r = pair_of<T>(p, table_row, i % half);
      const T* in = q + h * head_dim + p.qk_nope_head_dim;
      const float x = to_float(in[r.i0]), y = to_float(in[r.i1]);
      const int64_t out = (token * heads + h) * a.q_rope_row;
      put(out + r.o0, x * r.c0 - y * r.s0);
      put(out + r.o1, y * r.c1 + x * r.s1);
    }
  }
  if (a.q_scaled) {
    T* out = static_cast<T*>(a.q_scaled) + token * heads * head_dim;
    for (int i = threadIdx.x; i < heads * p.qk_nope_head_dim; i += kThreads) {
      const int at = i / p.qk_nope_head_dim * head_dim + i % p.qk_nope_head_dim;
      out[at] = from_float<T>(to_float(q[at]) * factor);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) flatten_kernel(const FlattenArgs a) {
  const Params& p = a.p;
  const int64_t b = blockIdx.y, t = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (t >= a.lengths.total(b)) return;
  const int64_t row = a.cache.row(b, t), to = b * a.lengths.capacity + t;
  const int width = p.kv_lora_rank, rotary = p.qk_rope_head_dim;
  T* latent = static_cast<T*>(a.latent) + to * width;
  T* rope = static_cast<T*>(a.rope) + to * rotary;
  for (int c = threadIdx.x % 32; c < width; c += 32) {
    latent[c] = from_float<T>(row < 0 ? 0.0f : load_latent<T>(a.cache, row, c, width));
  }
  for (int c = threadIdx.x % 32; c < rotary; c += 32) {
    rope[c] = row < 0 ? from_float<T>(0.0f) : static_cast<const T*>(a.cache.rope)[row * a.cache.rope_row + c];
  }
}

}  // namespace

cudaError_t launch_tokens(const TokenArgs& a, bool pdl, cudaStream_t stream) {
  const int64_t tokens = a.p.batch * a.p.seq_len;
  if (tokens == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(tokens), 2);
  switch (a.p.dtype) {
    case DType::kFloat32:
      return launch(tokens_kernel<float>, grid, kThreads, pdl, stream, a);
    case DType::kFloat16:
      return launch(tokens_kernel<__half>, grid, kThreads, pdl, stream, a);
    case DType::kBFloat16:
      return launch(tokens_kernel<__nv_bfloat16>, grid, kThreads, pdl, stream, a);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_flatten(const FlattenArgs& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((a.lengths.capacity + kWarps - 1) / kWarps), static_cast<unsigned>(a.p.batch));
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  switch (a.p.dtype) {
    case DType::kFloat32:
      flatten_kernel<float><<<grid, kThreads, 0, stream>>>(a);
      break;
    case DType::kFloat16:
      flatten_kernel<__half><<<grid, kThreads, 0, stream>>>(a);
      break;
    case DType::kBFloat16:
      flatten_kernel<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(a);
      break;
  }
  return cudaGetLastError();
}

cudaError_t compiled_capability(int* capability) {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, tokens_kernel<float>);
  if (status == cudaSuccess) *capability = attributes.binaryVersion;
  return status;
}

}  // namespace deltafuse::mla
