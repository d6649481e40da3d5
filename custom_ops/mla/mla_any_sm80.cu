// Plain arithmetic for whatever the fast kernels do not take: any head widths, float32, masks, expanded caches.
#include "mla_device.cuh"

namespace deltafuse::mla {
namespace {

constexpr int kThreads = 256, kRows = 16, kKeys = 16;
constexpr int kMaxColumns = 3;  // of the output, a thread
constexpr int kWidest = kThreads * kMaxColumns - 64;

// q_nope W_uk: one block for a token and head, a warp makes one channel at a time.
template <typename T>
__global__ void __launch_bounds__(kThreads) absorb_kernel(const AbsorbArgs a) {
  extern __shared__ float q_row[];
  const Params& p = a.p;
  const int h = blockIdx.y, nope = p.qk_nope_head_dim, head_dim = nope + p.qk_rope_head_dim;
  const int64_t token = blockIdx.x, item = token * p.num_heads + h;
  const T* q = static_cast<const T*>(p.q) + item * head_dim;
  const int64_t b = token / p.seq_len, s = token % p.seq_len;
  const float factor = p.q_scale ? p.q_scale[b * p.q_scale_batch_stride + s] : 1.0f;
  for (int d = threadIdx.x; d < nope; d += kThreads) q_row[d] = to_float(q[d]) * factor;
  __syncthreads();
  const int width = nope + p.v_head_dim, lane = threadIdx.x % 32;
  const int64_t stride = int64_t(p.num_heads) * width, row = p.kv_lora_rank + p.qk_rope_head_dim;
  for (int r = threadIdx.x / 32; r < p.kv_lora_rank; r += kThreads / 32) {
    const T* w = static_cast<const T*>(a.kv_b) + r * stride + int64_t(h) * width;
    float sum = 0.0f;
    for (int d = lane; d < nope; d += 32) sum += q_row[d] * to_float(w[d]);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane != 0) continue;
    if (a.channel_scale) sum *= a.channel_scale[r];
    if (a.out_float32) {
      static_cast<float*>(a.out)[item * row + r] = sum;
    } else {
      static_cast<T*>(a.out)[item * row + r] = from_float<T>(sum);
    }
  }
}

// o_latent W_uv and the gate: one block for a token and head, a thread makes a column.
template <typename T>
__global__ void __launch_bounds__(kThreads) project_kernel(const ProjectArgs a) {
  extern __shared__ float o_row[];
  const Params& p = a.p;
  const int h = blockIdx.y, rank = p.kv_lora_rank;
  const int64_t token = blockIdx.x, item = token * p.num_heads + h;
  for (int r = threadIdx.x; r < rank; r += kThreads) {
    o_row[r] = a.float32 ? static_cast<const float*>(a.o_latent)[item * rank + r]
                         : to_float(static_cast<const T*>(a.o_latent)[item * rank + r]);
  }
  __syncthreads();
  const int width = p.qk_nope_head_dim + p.v_head_dim;
  const int64_t stride = int64_t(p.num_heads) * width;
  const float gate = p.gate_sigmoid && p.gate ? sigmoid(to_float(static_cast<const T*>(p.gate)[item])) : 1.0f;
  for (int c = threadIdx.x; c < p.v_head_dim; c += kThreads) {
    const T* w = static_cast<const T*>(a.kv_b) + int64_t(h) * width + p.qk_nope_head_dim + c;
    float sum = 0.0f;
    for (int r = 0; r < rank; ++r) sum += o_row[r] * to_float(w[r * stride]);
    static_cast<T*>(p.o)[item * p.v_head_dim + c] = from_float<T>(sum * gate);
  }
}

// New tokens' keys and values into expanded caches: one block for a token and head.
template <typename T>
__global__ void __launch_bounds__(kThreads) expand_kernel(const ExpandArgs a) {
  extern __shared__ float latent_row[];
  const Params& p = a.p;
  const int h = blockIdx.y, rank = p.kv_lora_rank, nope = p.qk_nope_head_dim, rotary = p.qk_rope_head_dim;
  const int64_t token = blockIdx.x, b = token / p.seq_len, s = token % p.seq_len;
  if (!a.lengths.valid(a.lengths.given(b))) return;
  const int64_t row = (b * p.num_heads + h) * a.cache_rows + a.lengths.before(b) + s;
  T* key = static_cast<T*>(a.key) + row * (nope + rotary);
  T* value = static_cast<T*>(a.value) + row * p.v_head_dim;
  const int width = nope + p.v_head_dim;
  const T* rope = static_cast<const T*>(a.k_rope) + token * a.rope_row;
  for (int c = threadIdx.x; c < rotary; c += kThreads) key[nope + c] = rope[c];
  if (a.kv) {
    const T* kv = static_cast<const T*>(a.kv) + (token * p.num_heads + h) * width;
    for (int c = threadIdx.x; c < width; c += kThreads) (c < nope ? key[c] : value[c - nope]) = kv[c];
    return;
  }
  const T* latent = static_cast<const T*>(a.latent) + token * a.latent_row;
  for (int r = threadIdx.x; r < rank; r += kThreads) latent_row[r] = to_float(latent[r]);
  __syncthreads();
  const int64_t stride = int64_t(p.num_heads) * width;
  for (int c = threadIdx.x; c < width; c += kThreads) {
    const T* w = static_cast<const T*>(a.kv_b) + int64_t(h) * width + c;
    float sum = 0.0f;
    for (int r = 0; r < rank; ++r) sum += latent_row[r] * to_float(w[r * stride]);
    (c < nope ? key[c] : value[c - nope]) = from_float<T>(sum);
  }
}

// Attention of 16 query rows. Absorbed: rows are (token, head) of one sequence and all read the latents; else they are
// tokens of one head.
template <typename T, bool kAbsorbed, int kColumns>
__global__ void __launch_bounds__(kThreads) any_kernel(const AnyArgs a) {
  extern __shared__ __align__(16) float shared[];
  const Params& p = a.p;
  const int nope = kAbsorbed ? p.kv_lora_rank : p.qk_nope_head_dim, rotary = p.qk_rope_head_dim, heads = p.num_heads;
  const int dq = nope + rotary, dv = kAbsorbed ? p.kv_lora_rank : p.v_head_dim;
  const int stride = (dq + 3) / 4 * 4 + 4, v_stride = kAbsorbed ? stride : dv;
  float* q = shared;              // [kRows][stride]
  float* k = q + kRows * stride;  // [kKeys][stride]
  float* v = kAbsorbed ? k : k + kKeys * stride;
  float* scores = kAbsorbed ? k + kKeys * stride : v + kKeys * v_stride;  // [kRows][kKeys + 4]
  constexpr int kScoreRow = kKeys + 4;
  const int64_t b = blockIdx.z;
  const int64_t rows = kAbsorbed ? p.seq_len * heads : p.seq_len, first = int64_t(blockIdx.x) * kRows;
  auto token_of = [&](int64_t i) { return kAbsorbed ? i / heads : i; };
  auto head_of = [&](int64_t i) { return kAbsorbed ? i % heads : int64_t(blockIdx.y); };

  for (int i = threadIdx.x; i < kRows * stride; i += kThreads) {
    const int64_t r = first + i / stride;
    const int c = i % stride;
    float x = 0.0f;
    if (r < rows && c < dq) {
      const int64_t s = token_of(r), item = (b * p.seq_len + s) * heads + head_of(r);
      if (kAbsorbed) {
        x = a.q[item * dq + c];
      } else if (c < nope) {
        x = to_float(static_cast<const T*>(p.q)[item * dq + c]);
        if (p.q_scale) x *= p.q_scale[b * p.q_scale_batch_stride + s];
      } else {
        x = to_float(static_cast<const T*>(a.q_rope)[item * rotary + c - nope]);
      }
    }
    q[i] = x;
  }
  const int64_t total = a.lengths.total(b), before = total - p.seq_len;
  const int64_t last_row = first + kRows < rows ? first + kRows - 1 : rows - 1;
  int64_t end = total, begin = 0;
  if (p.causal) {
    end = before + token_of(last_row) + 1;
    if (p.window > 0) begin = before + token_of(first) - p.window + 1;
    if (begin < 0) begin = 0;
  }
  // This thread's score, and its columns of the output.
  const int my_row = threadIdx.x / kKeys, my_key = threadIdx.x % kKeys;
  const int64_t row = first + my_row, my_token = before + token_of(row);
  float acc[kColumns][kRows], largest = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) acc[c][r] = 0.0f;
  }
  __shared__ float rescale[kRows];
  for (int64_t t0 = begin; t0 < end; t0 += kKeys) {
    __syncthreads();
    for (int i = threadIdx.x; i < kKeys * stride; i += kThreads) {
      const int64_t t = t0 + i / stride;
      const int c = i % stride;
      float x = 0.0f;
      if (t < end && c < dq) {
        if (kAbsorbed && a.fresh && t >= before && (c >= nope || a.cache.type == CacheType::kSame)) {
          x = a.fresh[(b * p.seq_len + t - before) * dq + c];
        } else if (kAbsorbed) {
          const int64_t at = a.cache.row(b, t);
          if (at >= 0) {
            x = c < nope ? load_latent<T>(a.cache, at, c, nope)
                         : to_float(static_cast<const T*>(a.cache.rope)[at * a.cache.rope_row + c - nope]);
          }
        } else {
          const int64_t at = (b * heads + blockIdx.y) * a.cache_rows + t;
          x = to_float(static_cast<const T*>(a.key)[at * dq + c]);
        }
      }
      k[i] = x;
    }
    if (!kAbsorbed) {
      for (int i = threadIdx.x; i < kKeys * v_stride; i += kThreads) {
        const int64_t t = t0 + i / v_stride, at = (b * heads + blockIdx.y) * a.cache_rows + t;
        v[i] = t < end ? to_float(static_cast<const T*>(a.value)[at * dv + i % v_stride]) : 0.0f;
      }
    }
    __syncthreads();
    const int64_t t = t0 + my_key;
    const bool seen =
        row < rows && t < end && (!p.causal || (t <= my_token && (p.window == 0 || t > my_token - p.window)));
    float x = -INFINITY;
    if (seen) {
      const float4* qa = reinterpret_cast<const float4*>(q + my_row * stride);
      const float4* ka = reinterpret_cast<const float4*>(k + my_key * stride);
      float dot = 0.0f;
      for (int i = 0; i < (dq + 3) / 4; ++i) {
        const float4 m = qa[i], n = ka[i];
        dot += m.x * n.x + m.y * n.y + m.z * n.z + m.w * n.w;
      }
      x = dot * p.scale + mask_value<T>(p, b, head_of(row), token_of(row), t);
    }
    float top = x;
    for (int step = kKeys / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    top = fmaxf(top, largest);
    const float e = x == -INFINITY ? 0.0f : expf(x - top);
    float e_sum = e;
    for (int step = kKeys / 2; step > 0; step /= 2) e_sum += __shfl_xor_sync(~0u, e_sum, step);
    const float factor = largest == top ? 1.0f : expf(largest - top);
    sum = sum * factor + e_sum;
    largest = top;
    scores[my_row * kScoreRow + my_key] = e;
    if (my_key == 0) rescale[my_row] = factor;
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = threadIdx.x + c * kThreads;
      if (column >= dv) break;
      float values[kKeys];
#pragma unroll
      for (int j = 0; j < kKeys; ++j) values[j] = v[j * v_stride + column];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float x = acc[c][r] * rescale[r];
#pragma unroll
        for (int j = 0; j < kKeys; j += 4) {
          const float4 w = *reinterpret_cast<const float4*>(scores + r * kScoreRow + j);
          x += w.x * values[j] + w.y * values[j + 1] + w.z * values[j + 2] + w.w * values[j + 3];
        }
        acc[c][r] = x;
      }
    }
  }
  __syncthreads();
  if (my_key == 0) rescale[my_row] = sum > 0.0f ? 1.0f / sum : 0.0f;
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int column = threadIdx.x + c * kThreads;
    if (column >= dv) break;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= rows) break;
      const int64_t item = (b * p.seq_len + token_of(first + r)) * heads + head_of(first + r);
      const float x = acc[c][r] * rescale[r];
      if (kAbsorbed) {
        a.o_latent[item * dv + column] = x;
      } else {
        const float gate = p.gate_sigmoid && p.gate ? sigmoid(to_float(static_cast<const T*>(p.gate)[item])) : 1.0f;
        static_cast<T*>(p.o)[item * dv + column] = from_float<T>(x * gate);
      }
    }
  }
}

// A row of floats in shared memory, in whole 16-byte units: the compiler reads it so.
int row_bytes(int width) { return (4 * width + 15) / 16 * 16; }

dim3 tokens_and_heads(const Params& p) { return dim3(static_cast<unsigned>(p.batch * p.seq_len), p.num_heads); }

template <typename T, bool kAbsorbed, int kColumns>
cudaError_t launch_any_for(const AnyArgs& a, cudaStream_t stream) {
  const Params& p = a.p;
  const int nope = kAbsorbed ? p.kv_lora_rank : p.qk_nope_head_dim,
            stride = (nope + p.qk_rope_head_dim + 3) / 4 * 4 + 4;
  const int bytes =
      4 * ((kRows + kKeys) * stride + (kAbsorbed ? 0 : kKeys * p.v_head_dim + 4) + kRows * (kKeys + 4) + 16);
  const auto kernel = any_kernel<T, kAbsorbed, kColumns>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  const int64_t rows = kAbsorbed ? p.seq_len * p.num_heads : p.seq_len;
  const dim3 grid(static_cast<unsigned>((rows + kRows - 1) / kRows), kAbsorbed ? 1 : p.num_heads,
                  static_cast<unsigned>(p.batch));
  kernel<<<grid, kThreads, bytes, stream>>>(a);
  return cudaGetLastError();
}

// Runs `body` with a value of the element type.
template <typename Body>
cudaError_t with_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(float{});
    case DType::kFloat16:
      return body(__half{});
    case DType::kBFloat16:
      return body(__nv_bfloat16{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int any_widest() { return kWidest; }

cudaError_t launch_absorb(const AbsorbArgs& a, bool, cudaStream_t stream) {
  return with_type(a.p.dtype, [&](auto zero) {
    absorb_kernel<decltype(zero)><<<tokens_and_heads(a.p), kThreads, row_bytes(a.p.qk_nope_head_dim), stream>>>(a);
    return cudaGetLastError();
  });
}

cudaError_t launch_project(const ProjectArgs& a, bool, cudaStream_t stream) {
  return with_type(a.p.dtype, [&](auto zero) {
    project_kernel<decltype(zero)><<<tokens_and_heads(a.p), kThreads, row_bytes(a.p.kv_lora_rank), stream>>>(a);
    return cudaGetLastError();
  });
}

cudaError_t launch_expand(const ExpandArgs& a, cudaStream_t stream) {
  return with_type(a.p.dtype, [&](auto zero) {
    expand_kernel<decltype(zero)><<<tokens_and_heads(a.p), kThreads, row_bytes(a.p.kv_lora_rank), stream>>>(a);
    return cudaGetLastError();
  });
}

cudaError_t launch_any(const AnyArgs& a, cudaStream_t stream) {
  return with_type(a.p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!a.absorbed) return launch_any_for<T, false, 1>(a, stream);
    if (a.p.kv_lora_rank <= kThreads) return launch_any_for<T, true, 1>(a, stream);
    return launch_any_for<T, true, kMaxColumns>(a, stream);
  });
}

}  // namespace deltafuse::mla
