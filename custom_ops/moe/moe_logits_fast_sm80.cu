// The passes around the tensor cores' router logits: the router's weights as bfloat16 terms before, and after which
// logits decide, and those in float64. What is left as it was changes neither a choice nor a weight.
#include "moe_dependent.h"
#include "moe_float8_rows.cuh"
#include "moe_logits_fast.h"
#include "moe_select.cuh"

namespace deltafuse::moe {
namespace {

constexpr int kMostHidden = 16384;
constexpr int kMostGroups = 32;

// -- before: a warp a row; behind the weights' rows tokens that become float8 -----------------------------------------
template <typename W>
__global__ void __launch_bounds__(256) split_kernel(RouterArgs a, FastLogits f, Float8Args float8) {
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool there = row < a.experts;
  wait_previous();
  release_next();
  if (row >= f.tiles * 256) {
    if (row - f.tiles * 256 < float8.rows) float8_rows<__nv_bfloat16, 1, 10>(float8, row - f.tiles * 256, 1, 1);
    return;
  }
  if (there && lane == 0) f.counts[row] = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) *f.barrier = 0;
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
// A token whose logits need care: it has infinities or NaN.
constexpr int kOdd = 1 << 30;

// How far a choice can be off: `base` from its logit, and roundings.
__device__ __forceinline__ float margin(float base, float x) { return fmaf(fminf(fabsf(x), 1e30f), 0x1p-20f, base); }

// A token's choices in shared memory: a group's lie together, `lanes` lanes look after it, and neighbouring groups are
// so far apart that all lanes meet different banks.
struct Choices {
  int groups, size, lanes, stride;
  __host__ __device__ explicit Choices(const RouterArgs& a) {
    groups = a.topk_group < a.n_group ? a.n_group : 1, size = a.experts / groups, lanes = 32;
    while (lanes * groups > 32) lanes /= 2;
    stride = size + (lanes - size % 32 + 32) % 32;
  }
};

// The count-th largest of the lanes' keys, and -infinity where there are not so many.
__device__ __forceinline__ float largest(uint32_t key, int count, int lane) {
  uint32_t most = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    most = __reduce_max_sync(~0u, key);
    if (lane == __ffs(static_cast<int>(__ballot_sync(~0u, key == most))) - 1) key = 0;
  }
  const uint32_t bits = most & 0x80000000u ? most ^ 0x80000000u : ~most;
  return most ? __uint_as_float(bits) : __int_as_float(0xff800000);
}

__global__ void __launch_bounds__(256) doubts_kernel(RouterArgs a, FastLogits f) {
  extern __shared__ __align__(16) float shared[];  // [8 warps][groups * stride]
  __shared__ float tops[8], candidates[8][32];
  const float kLowest = __int_as_float(0xff800000);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x * 8 + warp;
  const Choices c(a);
  wait_previous();
  release_next();
  float longest = 0.0f;
  for (int e = threadIdx.x; e < a.experts; e += 256) {
    const float norm = f.norms[e];
    longest = norm < 1e30f ? fmaxf(longest, norm) : __int_as_float(0x7f800000);
  }
  longest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(longest)));
  if (lane == 0) tops[warp] = longest;
  __syncthreads();
  if (token >= a.tokens) return;
  longest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(tops[lane % 8])));

  float squares = 0.0f;
  const uint4* x = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(a.x) + int64_t(token) * a.hidden);
#pragma unroll 5
  for (int chunk = lane; chunk < a.hidden / 8; chunk += 32) {
    const uint4 words = __ldg(x + chunk);
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 v = unpack_pair(w[i], __nv_bfloat16());
      squares = fmaf(v.x, v.x, fmaf(v.y, v.y, squares));
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  const int marked = squares < 1e37f ? token : token | kOdd;

  float* choices = shared + warp * c.groups * c.stride;
  const float* logits = a.logits + int64_t(token) * a.experts;
  bool all = false;
  for (int first = lane, group = 0, from = 0; first < a.experts; first += 256) {  // `from`: the group's first expert
    constexpr int kTogether = 8;
    float logit[kTogether], bias[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int e = min(first + 32 * i, a.experts - 1);
      logit[i] = logits[e], bias[i] = a.expert_bias ? __ldg(a.expert_bias + e) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int e = first + 32 * i;
      if (e >= a.experts) break;
      while (e >= from + c.size) from += c.size, ++group;
      all |= !(fabsf(logit[i]) < 1e30f);
      float power, score;
      asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(power) : "f"(logit[i] * -1.4426950408889634f));
      asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(score) : "f"(1.0f + power));
      choices[group * c.stride + e - from] = comparable(score + bias[i]);
    }
  }
  // A sigmoid's slope is a quarter at most.
  const float base = 0.2501f * f.gamma * 1.001f * sqrtf(squares) * longest + 0x1p-20f;
  all |= !(base < 1e30f);
  all = __any_sync(~0u, all);
  __syncwarp();

  // Groups that stay for certain, and those that may: bits, at the group's first lane.
  const int own = lane / c.lanes, part = lane % c.lanes;
  const bool leads = part == 0 && own < c.groups;
  unsigned certain = __ballot_sync(~0u, leads), possible = certain;
  float last = 0.0f;  // the smallest choice that counts for the lane's group
  if (c.groups > 1 && !all) {
    float one = kLowest, two = kLowest;
    if (own < c.groups) {
      for (int i = part; i < c.size; i += c.lanes) {
        const float v = choices[own * c.stride + i];
        two = fmaxf(two, fminf(one, v)), one = fmaxf(one, v);
      }
    }
    for (int step = 1; step < c.lanes; step *= 2) {
      const float other = __shfl_xor_sync(~0u, one, step), next = __shfl_xor_sync(~0u, two, step);
      two = fmaxf(fmaxf(two, next), fminf(one, other)), one = fmaxf(one, other);
    }
    const bool both = a.group_top == 2;
    const float total = comparable(both ? one + two : one);
    const float off = margin(margin(base, one) + (both ? margin(base, two) : 0.0f), total);
    last = both ? two : one;
    int could = 0, does = 0;  // others that are better
    for (int g = 0; g < c.groups; ++g) {
      const float other = __shfl_sync(~0u, total, g * c.lanes), other_off = __shfl_sync(~0u, off, g * c.lanes);
      could += g != own && other + other_off >= total - off;
      does += g != own && other - other_off > total + off;
    }
    certain = __ballot_sync(~0u, leads && could < a.topk_group);
    possible = __ballot_sync(~0u, leads && does < a.topk_group);
  }
  // At least top_k choices of groups that stay are not below `least`: first the top_k-th of the lanes' largest, then,
  // of what is not below that, the top_k-th.
  float least = kLowest;
  if (!all) {
    float most = kLowest, smallest = __int_as_float(0x7f800000);
    int there = 0;
    for (unsigned left = certain; left; left &= left - 1) {
      const float* from = choices + (__ffs(static_cast<int>(left)) - 1) / c.lanes * c.stride;
      for (int i = lane; i < c.size; i += 32) most = fmaxf(most, from[i]), smallest = fminf(smallest, from[i]);
      there += c.size;
    }
    least = largest(order_of(most), a.top_k, lane);
    if (least > kLowest) {
      int found = 0;
      for (unsigned left = certain; left; left &= left - 1) {
        const float* from = choices + (__ffs(static_cast<int>(left)) - 1) / c.lanes * c.stride;
        for (int i = lane; i - lane < c.size; i += 32) {
          const float v = i < c.size ? from[i] : kLowest;
          const unsigned those = __ballot_sync(~0u, v >= least);
          const int at = found + __popc(those & ((1u << lane) - 1));
          if (v >= least && at < 32) candidates[warp][at] = v;
          found += __popc(those);
        }
      }
      __syncwarp();
      if (found <= 32) least = largest(lane < found ? order_of(candidates[warp][lane]) : 0, a.top_k, lane);
    } else if (there >= a.top_k) {  // lanes without a choice: all of these choices
#pragma unroll
      for (int step = 16; step > 0; step /= 2) smallest = fminf(smallest, __shfl_xor_sync(~0u, smallest, step));
      least = smallest;
    }
  }
  least -= margin(base, least);
  // Choices that are equal whatever the logits are: of masked experts too.
  all |= !(least > -1e37f) || (c.groups > 1 && a.masked_score_zero && least <= 0.0f);
  if (all) possible = __ballot_sync(~0u, leads);
  int* list = reinterpret_cast<int*>(choices);  // over choices that have been looked at
  int listed = 0;
  for (unsigned left = possible; left; left &= left - 1) {
    const int first = __ffs(static_cast<int>(left)) - 1, g = first / c.lanes;
    const float counts_for = __shfl_sync(~0u, last, first);
    const bool unsure = !(certain >> first & 1);
    const float bound = unsure ? fminf(least, counts_for - margin(base, counts_for)) : least;
    for (int i = lane; i - lane < c.size; i += 32) {
      const float choice = i < c.size ? choices[g * c.stride + i] : kLowest;
      const bool decides = i < c.size && (all || choice + margin(base, choice) >= bound);
      const unsigned those = __ballot_sync(~0u, decides);
      __syncwarp();  // the list may reach choices that have just been read
      if (decides) list[listed + __popc(those & ((1u << lane) - 1))] = g * c.size + i;
      listed += __popc(those);
    }
  }
  __syncwarp();
  if (f.few) {
    const unsigned groups = __ballot_sync(~0u, lane < c.groups && certain >> (lane * c.lanes % 32) & 1);
    int entry = lane < listed ? list[lane] : kNoExpert;
    if (lane == 0 && (all || listed > kFewExperts)) entry = kAnyExpert;
    if (lane >= kFewExperts) entry = groups >> (lane - kFewExperts) * 16;
    f.few[int64_t(token) * kFew + lane] = static_cast<uint16_t>(entry);
  }
  for (int i = lane; i < listed; i += 32) {
    f.lists[int64_t(list[i]) * a.tokens + atomicAdd(f.counts + list[i], 1)] = marked;
  }
}

// -- after that: float64 ----------------------------------------------------------------------------------------------
constexpr int kSplits = 4;  // blocks an expert

// bfloat16 numbers of a word as float64, 2^-896 of them: their bits lie where float64 wants them, subnormal ones too.
// Conversions would take four times as long. Infinities and NaN are no such.
template <bool kOddToo>
__device__ __forceinline__ double2 wide_pair(uint32_t w) {
  if constexpr (kOddToo) {
    const float2 v = unpack_pair(w, __nv_bfloat16());
    return make_double2(static_cast<double>(v.x) * 0x1p-896, static_cast<double>(v.y) * 0x1p-896);
  } else {
    constexpr int kBits = static_cast<int>(0x8fffe000u);
    return make_double2(__hiloint2double((static_cast<int>(w << 16) >> 3) & kBits, 0),
                        __hiloint2double((static_cast<int>(w) >> 3) & kBits, 0));
  }
}

// Sums of two tokens' products with a row: element i of chunk c lies at c * 9 + i, so that lanes meet different banks.
template <bool kOddToo>
__device__ __forceinline__ void add_up(const RouterArgs& a, const double* row, const int (&token)[2], int lane,
                                       double (&sum)[2][2]) {
  const uint4* x[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    x[n] = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(a.x) + int64_t(token[n]) * a.hidden);
  }
#pragma unroll 2
  for (int chunk = lane; chunk < a.hidden / 8; chunk += 32) {
    uint4 words[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) words[n] = __ldg(x[n] + chunk);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const double low = row[chunk * 9 + 2 * i], high = row[chunk * 9 + 2 * i + 1];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint32_t w = i == 0 ? words[n].x : i == 1 ? words[n].y : i == 2 ? words[n].z : words[n].w;
        const double2 v = wide_pair<kOddToo>(w);
        sum[n][0] = fma(v.x, low, sum[n][0]), sum[n][1] = fma(v.y, high, sum[n][1]);
      }
    }
  }
}

template <typename W>
__global__ void __launch_bounds__(256) exact_kernel(RouterArgs a, FastLogits f) {
  extern __shared__ __align__(16) double row[];
  wait_previous();
  release_next();
  const int expert = blockIdx.x, count = f.counts[expert], warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // A part of the list a block: lists are about in the order of tokens, and blocks that run together meet in the L2.
  const int part = ((count + kSplits - 1) / kSplits + 1) / 2 * 2, begin = blockIdx.y * part;
  const int end = min(begin + part, count);
  if (begin >= end) return;
  const W* weight = static_cast<const W*>(a.weight) + int64_t(expert) * a.hidden;
#pragma unroll 5
  for (int i = threadIdx.x; i < a.hidden; i += 256) row[i / 8 * 9 + i % 8] = static_cast<double>(to_float(weight[i]));
  __syncthreads();
  const int32_t* list = f.lists + int64_t(expert) * a.tokens;
  for (int first = begin + warp * 2; first < end; first += 16) {
    int token[2] = {list[first], list[min(first + 1, end - 1)]};
    const bool odd = (token[0] | token[1]) & kOdd;
    token[0] &= kOdd - 1, token[1] &= kOdd - 1;
    double sum[2][2] = {};
    if (odd) {
      add_up<true>(a, row, token, lane, sum);
    } else {
      add_up<false>(a, row, token, lane, sum);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      double total = sum[n][0] + sum[n][1];
      for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
      total *= 0x1p896;
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

cudaError_t launch_split(const RouterArgs& a, const FastLogits& f, const Float8Args& float8, const DeviceInfo& device,
                         cudaStream_t stream) {
  const auto kernel = a.weight_type == DType::kFloat32 ? split_kernel<float> : split_kernel<__nv_bfloat16>;
  const unsigned blocks = static_cast<unsigned>(f.tiles * 32 + (float8.rows + 7) / 8);
  return launch_dependent(kernel, {blocks, 256}, device, stream, a, f, float8);
}

cudaError_t launch_doubts(const RouterArgs& a, const FastLogits& f, const DeviceInfo& device, cudaStream_t stream) {
  const Choices c(a);
  const size_t shared = sizeof(float) * 8 * c.groups * c.stride;
  const unsigned blocks = static_cast<unsigned>((a.tokens + 7) / 8);
  return launch_dependent(doubts_kernel, {blocks, 256, shared}, device, stream, a, f);
}

cudaError_t launch_exact(const RouterArgs& a, const FastLogits& f, const DeviceInfo& device, cudaStream_t stream) {
  const auto kernel = a.weight_type == DType::kFloat32 ? exact_kernel<float> : exact_kernel<__nv_bfloat16>;
  const dim3 grid(static_cast<unsigned>(a.experts), kSplits);
  return launch_dependent(kernel, {grid, 256, sizeof(double) * (a.hidden / 8 * 9)}, device, stream, a, f);
}

cudaError_t launch_logits_fast(const RouterArgs& a, const FastLogits& f, const Float8Args& float8,
                               const DeviceInfo& device, cudaStream_t stream) {
  cudaError_t status = launch_split(a, f, float8, device, stream);
  if (status == cudaSuccess) status = launch_sums_sm90(a, f, device, stream);
  if (status == cudaSuccess) status = launch_doubts(a, f, device, stream);
  if (status == cudaSuccess) status = launch_exact(a, f, device, stream);
  return status;
}

}  // namespace deltafuse::moe
