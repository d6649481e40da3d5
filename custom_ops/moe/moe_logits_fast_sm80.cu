// The passes around the tensor cores' router logits: the router's weights as bfloat16 terms before, and after which
// logits decide, and those in float64. What is left as it was changes neither a choice nor a weight.
#include "moe_logits_fast.h"
#include "moe_select.cuh"

namespace deltafuse::moe {
namespace {

constexpr int kMostHidden = 16384;
constexpr int kMostGroups = 32;

// -- before: a warp a row ---------------------------------------------------------------------------------------------
template <typename W>
__global__ void __launch_bounds__(256) split_kernel(RouterArgs a, FastLogits f) {
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool there = row < a.experts;
  if (there && lane == 0) f.counts[row] = 0;
  const W* from = static_cast<const W*>(a.weight) + int64_t(row) * a.hidden;
  unsigned char* to = f.weights + int64_t(row / 256) * f.stages * f.terms * 32768 + row % 256 * 128;
  float squares = 0.0f;
  for (int chunk = lane; chunk < f.stages * 8; chunk += 32) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = there && chunk * 8 < a.hidden ? to_float(from[chunk * 8 + i]) : 0.0f;
      squares = fmaf(v[i], v[i], squares);
    }
    unsigned char* at = to + int64_t(chunk / 8) * f.terms * 32768 + ((chunk % 8 ^ row % 8) * 16);
    for (int term = 0; term < f.terms; ++term) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = pack_pair(v[2 * i], v[2 * i + 1], __nv_bfloat16());
        const float2 taken = unpack_pair(words[i], __nv_bfloat16());
        v[2 * i] -= taken.x, v[2 * i + 1] -= taken.y;
      }
      *reinterpret_cast<uint4*>(at + term * 32768) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  if (there && lane == 0) f.norms[row] = sqrtf(squares) * 1.001f;
}

// -- after: which logits decide; a warp a token -----------------------------------------------------------------------
struct TwoBest {
  uint32_t one = 0, two = 0;  // ordered keys
  __device__ __forceinline__ void take(uint32_t x) { two = max(two, min(one, x)), one = max(one, x); }
};

__device__ __forceinline__ float number_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// How far a choice can be off: `base` from its logit, and roundings.
__device__ __forceinline__ float margin(float base, float x) { return fmaf(fminf(fabsf(x), 1e30f), 0x1p-20f, base); }

__global__ void __launch_bounds__(256) doubts_kernel(RouterArgs a, FastLogits f) {
  extern __shared__ __align__(16) float shared[];  // [8 warps][E]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x * 8 + warp;
  if (token >= a.tokens) return;
  float* choices = shared + warp * a.experts;
  float squares = 0.0f, longest = 0.0f;
  const uint4* x = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(a.x) + int64_t(token) * a.hidden);
  for (int chunk = lane; chunk < a.hidden / 8; chunk += 32) {
    const uint4 words = x[chunk];
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 v = unpack_pair(w[i], __nv_bfloat16());
      squares = fmaf(v.x, v.x, fmaf(v.y, v.y, squares));
    }
  }
  bool all = false;
  for (int e = lane; e < a.experts; e += 32) {
    longest = fmaxf(longest, f.norms[e]);
    all |= !(f.norms[e] < 1e30f);
    const float logit = a.logits[int64_t(token) * a.experts + e];
    all |= !(fabsf(logit) < 1e30f);
    const float score = 1.0f / (1.0f + __expf(-logit));
    choices[e] = comparable(a.expert_bias ? score + a.expert_bias[e] : score);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    squares += __shfl_xor_sync(~0u, squares, step);
    longest = fmaxf(longest, __shfl_xor_sync(~0u, longest, step));
  }
  // A sigmoid's slope is a quarter at most.
  const float base = 0.2501f * f.gamma * 1.001f * sqrtf(squares) * longest + 0x1p-20f;
  all |= !(base < 1e30f);
  all = __any_sync(~0u, all);
  __syncwarp();

  // Groups that stay for certain, and those that may: bits.
  const bool grouped = a.topk_group < a.n_group;
  const int size = a.experts / a.n_group;
  unsigned certain = ~0u, possible = ~0u;
  float last = 0.0f;  // lane g: the smallest choice that counts for group g
  if (grouped && !all) {
    float total = 0.0f, off = 0.0f;
    for (int g = 0; g < a.n_group; ++g) {
      TwoBest best;
      for (int i = lane; i < size; i += 32) best.take(order_of(choices[g * size + i]));
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        const uint32_t one = __shfl_xor_sync(~0u, best.one, step), two = __shfl_xor_sync(~0u, best.two, step);
        best.take(one), best.take(two);
      }
      if (lane == g) {
        const float one = number_of(best.one), two = a.group_top == 2 ? number_of(best.two) : 0.0f;
        total = comparable(a.group_top == 2 ? one + two : one);
        off = margin(margin(base, one) + (a.group_top == 2 ? margin(base, two) : 0.0f), total);
        last = a.group_top == 2 ? two : one;
      }
    }
    int could = 0, does = 0;  // others that are better
    for (int g = 0; g < a.n_group; ++g) {
      const float other = __shfl_sync(~0u, total, g), other_off = __shfl_sync(~0u, off, g);
      could += g != lane && other + other_off >= total - off;
      does += g != lane && other - other_off > total + off;
    }
    certain = __ballot_sync(~0u, lane < a.n_group && could < a.topk_group);
    possible = __ballot_sync(~0u, lane < a.n_group && does < a.topk_group);
  }
  // At least top_k choices of groups that stay are not below `least`.
  float least = 0.0f;
  unsigned taken = 0;
  for (int j = 0; j < a.top_k && !all; ++j) {
    uint32_t best = 0;
    int at = 0;
    for (int i = 0, e = lane; e < a.experts; ++i, e += 32) {
      const uint32_t key = order_of(choices[e]);
      if (key > best && !(taken >> i & 1) && (!grouped || certain >> (e / size) & 1)) best = key, at = i;
    }
    const uint32_t most = __reduce_max_sync(~0u, best);
    if (most == 0) {
      all = true;
    } else {
      const int owner = __ffs(static_cast<int>(__ballot_sync(~0u, best == most))) - 1;
      if (lane == owner) taken |= 1u << at;
      least = number_of(most);
    }
  }
  least -= margin(base, least);
  // Choices that are equal whatever the logits are: of masked experts too.
  all |= !(least > -1e37f) || (grouped && a.masked_score_zero && least <= 0.0f);
  for (int i = lane; i < (a.experts + 31) / 32 * 32; i += 32) {
    const int e = min(i, a.experts - 1), g = grouped ? e / size : 0;
    const float most = choices[e] + margin(base, choices[e]), counts_for = __shfl_sync(~0u, last, g);
    const bool may = possible >> g & 1, unsure = grouped && may && !(certain >> g & 1);
    const bool decides = all || (may && most >= least) || (unsure && most >= counts_for - margin(base, counts_for));
    if (decides && i < a.experts) f.lists[int64_t(e) * a.tokens + atomicAdd(f.counts + e, 1)] = token;
  }
}

// -- after that: float64 ----------------------------------------------------------------------------------------------
constexpr int kSplits = 4;  // blocks an expert

template <typename W>
__global__ void __launch_bounds__(256) exact_kernel(RouterArgs a, FastLogits f) {
  extern __shared__ __align__(16) double row[];  // element i of chunk c at i * stride + c
  const int expert = blockIdx.x, count = f.counts[expert], warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (static_cast<int>(blockIdx.y) * 8 >= count) return;
  const int chunks = a.hidden / 8, stride = chunks + 1;
  const W* weight = static_cast<const W*>(a.weight) + int64_t(expert) * a.hidden;
  for (int i = threadIdx.x; i < a.hidden; i += 256)
    row[i % 8 * stride + i / 8] = static_cast<double>(to_float(weight[i]));
  __syncthreads();
  const int32_t* list = f.lists + int64_t(expert) * a.tokens;
  constexpr int kStep = kSplits * 8;
  for (int first = blockIdx.y * 8 + warp; first < count; first += 2 * kStep) {
    const int token[2] = {list[first], list[min(first + kStep, count - 1)]};
    double sum[2][2] = {};
#pragma unroll 2
    for (int chunk = lane; chunk < chunks; chunk += 32) {
      uint4 words[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const auto* x = static_cast<const __nv_bfloat16*>(a.x) + int64_t(token[n]) * a.hidden;
        words[n] = __ldg(reinterpret_cast<const uint4*>(x) + chunk);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const double low = row[2 * i * stride + chunk], high = row[(2 * i + 1) * stride + chunk];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float2 v = unpack_pair(i == 0   ? words[n].x
                                       : i == 1 ? words[n].y
                                       : i == 2 ? words[n].z
                                                : words[n].w,
                                       __nv_bfloat16());
          sum[n][0] = fma(static_cast<double>(v.x), low, sum[n][0]);
          sum[n][1] = fma(static_cast<double>(v.y), high, sum[n][1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      double total = sum[n][0] + sum[n][1];
      for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
      if (a.router_bias) total += static_cast<double>(a.router_bias[expert]);
      if (lane == 0) a.logits[int64_t(token[n]) * a.experts + expert] = static_cast<float>(total);
    }
  }
}

}  // namespace

bool logits_fast(const RouterArgs& a, const DeviceInfo& device) {
  const int least = prompt_tuning().fast_logits;
  const bool grouped = a.topk_group < a.n_group;
  return device.wgmma && least > 0 && a.tokens >= least && a.weight && a.x_type == DType::kBFloat16 &&
         a.weight_type != DType::kFloat16 && !a.softmax && a.hidden % 8 == 0 && a.hidden <= kMostHidden &&
         (!grouped || (a.group_top <= 2 && a.n_group <= kMostGroups)) && a.experts >= 32;
}

FastLogits fast_form(const RouterArgs& a) {
  FastLogits f{};
  f.tiles = (a.experts + 255) / 256, f.stages = (a.hidden + 63) / 64;
  f.terms = a.weight_type == DType::kFloat32 ? 2 : 1;
  // 8 steps of 16 products and a sum, each number cut off at 2^-22 of the largest (the tensor cores keep more bits than
  // that); two terms of a weight; float32 sums.
  f.gamma = 1.05f * (8 * 17 * 0x1p-22f + 0x1p-18f + static_cast<float>(f.stages) * 0x1p-24f);
  return f;
}

cudaError_t launch_split(const RouterArgs& a, const FastLogits& f, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(f.tiles * 32);
  if (a.weight_type == DType::kFloat32) {
    split_kernel<float><<<blocks, 256, 0, stream>>>(a, f);
  } else {
    split_kernel<__nv_bfloat16><<<blocks, 256, 0, stream>>>(a, f);
  }
  return cudaGetLastError();
}

cudaError_t launch_doubts(const RouterArgs& a, const FastLogits& f, cudaStream_t stream) {
  const size_t shared = sizeof(float) * 8 * a.experts;
  doubts_kernel<<<static_cast<unsigned>((a.tokens + 7) / 8), 256, shared, stream>>>(a, f);
  return cudaGetLastError();
}

cudaError_t launch_exact(const RouterArgs& a, const FastLogits& f, cudaStream_t stream) {
  const auto kernel = a.weight_type == DType::kFloat32 ? exact_kernel<float> : exact_kernel<__nv_bfloat16>;
  const size_t shared = sizeof(double) * (a.hidden + 8);
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (status != cudaSuccess) return status;
  kernel<<<dim3(static_cast<unsigned>(a.experts), kSplits), 256, shared, stream>>>(a, f);
  return cudaGetLastError();
}

cudaError_t launch_logits_fast(const RouterArgs& a, const FastLogits& f, const DeviceInfo& device,
                               cudaStream_t stream) {
  cudaError_t status = launch_split(a, f, stream);
  if (status == cudaSuccess) status = launch_sums_sm90(a, f, device, stream);
  if (status == cudaSuccess) status = launch_doubts(a, f, stream);
  if (status == cudaSuccess) status = launch_exact(a, f, stream);
  return status;
}

}  // namespace deltafuse::moe
