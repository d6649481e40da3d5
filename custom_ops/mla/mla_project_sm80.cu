// The absorbed weights by tensor cores, for decode: q_nope W_uk before the attention and o_latent W_uv with the gate
// after it. Few tokens, so that each is one pass over half of the weights: a warp keeps its part of them in registers
// and goes over the tokens, 16 at a time. Sums run over channels in an order that suits 16-byte loads.
#include "mla_device.cuh"

namespace deltafuse::mla {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kTokens = 16;
constexpr int kMaxGroups = 8;  // of 32 nope channels

// A warp makes 8 latent channels of one head: B's columns are the rows of W, whose nope channels lie in a row.
template <typename T, int kGroups>
__global__ void __launch_bounds__(kThreads) absorb_fast_kernel(const AbsorbArgs a) {
  const Params& p = a.p;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, h = blockIdx.y;
  const int first = (blockIdx.x * kWarps + threadIdx.x / 32) * 8;  // latent channel
  const int nope = p.qk_nope_head_dim, head_dim = nope + p.qk_rope_head_dim, width = nope + p.v_head_dim;
  const int64_t tokens = p.batch * p.seq_len, stride = int64_t(p.num_heads) * width;
  const int64_t out_row = p.kv_lora_rank + p.qk_rope_head_dim;
  const T* w = static_cast<const T*>(a.kv_b) + (first + g) * stride + int64_t(h) * width + 8 * t;
  uint4 weights[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) weights[i] = __ldg(reinterpret_cast<const uint4*>(w + 32 * i));
  ptx::launch_dependents();
  for (int64_t m0 = int64_t(blockIdx.z) * kTokens; m0 < tokens; m0 += int64_t(gridDim.z) * kTokens) {
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const int64_t low = m0 + g, high = low + 8;
    const T* q = static_cast<const T*>(p.q) + h * head_dim + 8 * t;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      uint4 x = {}, y = {};
      if (low < tokens) x = *reinterpret_cast<const uint4*>(q + low * p.num_heads * head_dim + 32 * i);
      if (high < tokens) y = *reinterpret_cast<const uint4*>(q + high * p.num_heads * head_dim + 32 * i);
      ptx::mma(acc, x.x, y.x, x.y, y.y, weights[i].x, weights[i].y, T{});
      ptx::mma(acc, x.z, y.z, x.w, y.w, weights[i].z, weights[i].w, T{});
    }
    const int r = first + 2 * t;
    float scale0 = 1.0f, scale1 = 1.0f;
    if (a.channel_scale) scale0 = a.channel_scale[r], scale1 = a.channel_scale[r + 1];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t token = i ? high : low;
      if (token >= tokens) continue;
      const int64_t b = token / p.seq_len, s = token % p.seq_len;
      const float factor = p.q_scale ? p.q_scale[b * p.q_scale_batch_stride + s] : 1.0f;
      T* out = static_cast<T*>(a.out) + (token * p.num_heads + h) * out_row + r;
      *reinterpret_cast<uint32_t*>(out) = pack(acc[2 * i] * factor * scale0, acc[2 * i + 1] * factor * scale1, T{});
    }
  }
  ptx::wait_prior_grid();  // so that who waits for this kernel has waited for the one before it
}

// A block makes 64 value columns of one head; its warps share the latent channels. A lane's 16 columns are 16 t + j and
// 16 t + 8 + j, so that it loads 8 neighbouring columns of a row of W at a time.
template <typename T>
__global__ void __launch_bounds__(kThreads) project_fast_kernel(const ProjectArgs a) {
  constexpr int kSteps = 4;  // of 16 latent channels, a warp holds at a time
  __shared__ float sums[kWarps][kTokens][64 + 4];
  const Params& p = a.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, h = blockIdx.y;
  const int width = p.qk_nope_head_dim + p.v_head_dim, rank = p.kv_lora_rank, c0 = blockIdx.x * 64;
  const int64_t tokens = p.batch * p.seq_len, stride = int64_t(p.num_heads) * width;
  const T* w = static_cast<const T*>(a.kv_b) + int64_t(h) * width + p.qk_nope_head_dim + c0 + 8 * g;
  uint4 weights[kSteps][4];
  auto load = [&](int base) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int k = base + (i * kWarps + warp) * 16;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weights[i][j] = uint4{};
        if (k < rank)
          weights[i][j] = __ldg(reinterpret_cast<const uint4*>(w + (k + 2 * t + (j & 1) + (j & 2) * 4) * stride));
      }
    }
  };
  constexpr int kSpan = kSteps * kWarps * 16;
  load(0);
  ptx::launch_dependents();
  ptx::wait_prior_grid();
  for (int64_t m0 = int64_t(blockIdx.z) * kTokens; m0 < tokens; m0 += int64_t(gridDim.z) * kTokens) {
    const int64_t low = m0 + g, high = low + 8;
    const T* o = static_cast<const T*>(a.o_latent) + int64_t(h) * rank + 2 * t;
    float acc[8][4] = {};
    for (int base = 0; base < rank; base += kSpan) {
      if (rank > kSpan) load(base);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int k = base + (i * kWarps + warp) * 16;
        if (k >= rank) break;
        uint32_t x0 = 0, x1 = 0, y0 = 0, y1 = 0;
        if (low < tokens) {
          const T* row = o + low * p.num_heads * rank + k;
          x0 = *reinterpret_cast<const uint32_t*>(row), x1 = *reinterpret_cast<const uint32_t*>(row + 8);
        }
        if (high < tokens) {
          const T* row = o + high * p.num_heads * rank + k;
          y0 = *reinterpret_cast<const uint32_t*>(row), y1 = *reinterpret_cast<const uint32_t*>(row + 8);
        }
        const uint32_t* r0 = reinterpret_cast<const uint32_t*>(&weights[i][0]);
        const uint32_t* r1 = reinterpret_cast<const uint32_t*>(&weights[i][1]);
        const uint32_t* r2 = reinterpret_cast<const uint32_t*>(&weights[i][2]);
        const uint32_t* r3 = reinterpret_cast<const uint32_t*>(&weights[i][3]);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t select = j % 2 ? 0x7632 : 0x5410;
          ptx::mma(acc[j], x0, y0, x1, y1, __byte_perm(r0[j / 2], r1[j / 2], select),
                   __byte_perm(r2[j / 2], r3[j / 2], select), T{});
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sums[warp][g][16 * t + j] = acc[j][0];
      sums[warp][g][16 * t + 8 + j] = acc[j][1];
      sums[warp][g + 8][16 * t + j] = acc[j][2];
      sums[warp][g + 8][16 * t + 8 + j] = acc[j][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kTokens * 32; i += kThreads) {
      const int row = i / 32, c = i % 32 * 2;
      if (m0 + row >= tokens) continue;
      float x = 0.0f, y = 0.0f;
#pragma unroll
      for (int k = 0; k < kWarps; ++k) x += sums[k][row][c], y += sums[k][row][c + 1];
      const int64_t item = (m0 + row) * p.num_heads + h;
      const float gate = p.gate_sigmoid && p.gate ? sigmoid(to_float(static_cast<const T*>(p.gate)[item])) : 1.0f;
      T* out = static_cast<T*>(p.o) + item * p.v_head_dim + c0 + c;
      *reinterpret_cast<uint32_t*>(out) = pack(x * gate, y * gate, T{});
    }
  }
}

unsigned token_blocks(const Params& p) {
  const int64_t tiles = (p.batch * p.seq_len + kTokens - 1) / kTokens;
  return static_cast<unsigned>(tiles < 8 ? tiles : 8);
}

template <typename T>
cudaError_t absorb_for(const AbsorbArgs& a, bool pdl, cudaStream_t stream) {
  const dim3 grid(a.p.kv_lora_rank / (8 * kWarps), a.p.num_heads, token_blocks(a.p));
  switch (a.p.qk_nope_head_dim / 32) {
    case 1:
      return launch(absorb_fast_kernel<T, 1>, grid, kThreads, pdl, stream, a);
    case 2:
      return launch(absorb_fast_kernel<T, 2>, grid, kThreads, pdl, stream, a);
    case 3:
      return launch(absorb_fast_kernel<T, 3>, grid, kThreads, pdl, stream, a);
    case 4:
      return launch(absorb_fast_kernel<T, 4>, grid, kThreads, pdl, stream, a);
    case 6:
      return launch(absorb_fast_kernel<T, 6>, grid, kThreads, pdl, stream, a);
    default:
      return launch(absorb_fast_kernel<T, kMaxGroups>, grid, kThreads, pdl, stream, a);
  }
}

}  // namespace

bool fast_projections(const Params& p) {
  const int groups = p.qk_nope_head_dim / 32;
  return p.dtype != DType::kFloat32 && p.qk_nope_head_dim % 32 == 0 &&
         (groups >= 1 && groups <= kMaxGroups && groups != 5 && groups != 7) && p.kv_lora_rank % 64 == 0 &&
         p.v_head_dim % 64 == 0 && p.qk_rope_head_dim % 8 == 0;
}

cudaError_t launch_absorb_fast(const AbsorbArgs& a, bool pdl, cudaStream_t stream) {
  if (a.p.dtype == DType::kBFloat16) return absorb_for<__nv_bfloat16>(a, pdl, stream);
  return absorb_for<__half>(a, pdl, stream);
}

cudaError_t launch_project_fast(const ProjectArgs& a, bool pdl, cudaStream_t stream) {
  const dim3 grid(a.p.v_head_dim / 64, a.p.num_heads, token_blocks(a.p));
  if (a.p.dtype == DType::kBFloat16) return launch(project_fast_kernel<__nv_bfloat16>, grid, kThreads, pdl, stream, a);
  return launch(project_fast_kernel<__half>, grid, kThreads, pdl, stream, a);
}

}  // namespace deltafuse::mla
