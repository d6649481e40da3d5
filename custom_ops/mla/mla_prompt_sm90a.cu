// A prompt's attention, heads of 128 + 64 and 128 channels, sm_90a. A block makes 128 queries of one head: one
// warpgroup fetches keys and values by tensor maps, two multiply, 64 queries each. While the products of one run, the
// other does its softmax; and within each, the next scores run beside this block's weighted sum. Keys are gone through
// from the last to the first. The output gate is applied where results leave.
#include <type_traits>

#include "mla_device.cuh"
#include "mla_maps.h"
#include "mla_wgmma_sm90a.cuh"

namespace deltafuse::mla {
namespace {

constexpr int kQueries = 128, kKeys = 128, kStages = 2, kThreads = 384;
constexpr int kBlock = 128 * 128;  // bytes of 64 channels of 128 rows
constexpr int kQueryBytes = 3 * kBlock, kKeyBytes = 3 * kBlock, kValueBytes = 2 * kBlock;
constexpr int kSharedBytes = 1024 + kQueryBytes + kStages * (kKeyBytes + kValueBytes) + 256;

struct KernelArgs {
  Lengths lengths;
  const void* gate = nullptr;
  void* o = nullptr;
  float scale = 0.0f;  // base 2
  int32_t heads = 0, seq_len = 0, causal = 0, window = 0;
  int32_t q_rope_column = 0, k_rope_column = 0, v_column = 0, k_rope_per_head = 0;
  const void* mask = nullptr;
  int64_t mask_strides[4] = {0, 0, 0, 0};
  float mask_factor = 0.0f;  // turns what is added to a scaled score into what is added to a product
};

struct Barriers {
  uint64_t q_full, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

// Blocks of keys that the queries [m0, m0 + 128) see, in the order they are gone through: last, last - 1, ..., first.
struct Range {
  int first, last, total, past;
  __device__ Range(const KernelArgs& k, int64_t b, int m0) {
    total = static_cast<int>(k.lengths.total(b));
    past = total - k.seq_len;
    const int rows = m0 + kQueries < k.seq_len ? m0 + kQueries : k.seq_len;
    const int end = k.causal ? past + rows : total;
    last = (end - 1) / kKeys;
    const int begin = past + m0 - k.window + 1;
    first = k.window > 0 && begin > 0 ? begin / kKeys : 0;
  }
};

#ifdef MLA_SM90A
// Scores to weights: s becomes exp2(scale s - scale top), the sums and tops of rows g and g + 8 follow.
__device__ __forceinline__ void softmax(float (&s)[64], float scale, float (&top)[2], float (&sum)[2],
                                        float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float here = s[2 * i];
#pragma unroll
    for (int j = 0; j < 16; ++j) here = fmaxf(here, fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
    here = fmaxf(here, __shfl_xor_sync(~0u, here, 1));
    here = fmaxf(here, __shfl_xor_sync(~0u, here, 2));
    here = fmaxf(here, top[i]);
    rescale[i] = here == top[i] ? 1.0f : ptx::exp2((top[i] - here) * scale);
    top[i] = here;
    const float shift = here == -INFINITY ? 0.0f : here * scale;
    float added = 0.0f;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * j + 2 * i + e];
        x = ptx::exp2(__fmaf_rn(x, scale, -shift));
        added += x;
      }
    }
    sum[i] = __fmaf_rn(sum[i], rescale[i], added);
  }
}

template <typename T>
__device__ __forceinline__ void scores(float (&s)[64], uint32_t q, uint32_t keys) {
#pragma unroll
  for (int c = 0; c < 3; ++c) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      ptx::wgmma_n128<0, 0>(s, ptx::descriptor(q + c * kBlock + j * 32), ptx::descriptor(keys + c * kBlock + j * 32),
                            c + j > 0, T{});
    }
  }
  ptx::wgmma_commit();
}

template <typename T>
__device__ __forceinline__ void weigh(float (&o)[64], const uint32_t (&w)[32], uint32_t values) {
#pragma unroll
  for (int j = 0; j < kKeys / 16; ++j) {
    ptx::wgmma_n128<1>(o, w[4 * j], w[4 * j + 1], w[4 * j + 2], w[4 * j + 3],
                       ptx::descriptor(values + j * 2048, kBlock), 1, T{});
  }
  ptx::wgmma_commit();
}

// Keys that a row does not see become minus infinity; mask_row: the mask's rows of `row` and `row` + 8, or null.
template <typename M>
__device__ __forceinline__ void mask(float (&s)[64], const KernelArgs& k, const Range& range, int key0, int row,
                                     const M* const (&mask_row)[2]) {
  constexpr float kLowest = -1e30f;  // a lowest finite number does not mask out
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int position = range.past + row + 8 * i;
    int high = k.causal ? min(position + 1, range.total) : range.total;
    const int low = k.window > 0 ? position - k.window + 1 : 0;
    if (!std::is_void<M>::value && row + 8 * i >= k.seq_len) high = 0;  // the mask has no such row
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = key0 + 8 * j + 2 * t + e;
        float& x = s[4 * j + 2 * i + e];
        if (key >= high || key < low) {
          x = -INFINITY;
        } else if constexpr (!std::is_void<M>::value) {
          const M value = mask_row[i][key * k.mask_strides[3]];
          if constexpr (std::is_same<M, uint8_t>::value) {
            if (!value) x = -INFINITY;
          } else {
            const float added = to_float(value) * k.mask_factor;
            x = to_float(value) == -INFINITY ? -INFINITY : fmaxf(x + added, kLowest);
          }
        }
      }
    }
  }
}

// M: the mask's element (uint8_t: a bool), or void.
template <typename T, typename M>
__device__ void consume(const KernelArgs& k, const Range& range, int m0, int64_t b, int h, unsigned char* q,
                        unsigned char* keys, unsigned char* values, Barriers* bars) {
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, blocks = range.last - range.first + 1;
  const int first_row = m0 + group * 64, row = first_row + warp * 16 + g;
  const uint32_t q_address = ptx::shared_address(q) + group * 64 * 128;
  float o[64], s[64], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, rescale[2];
  uint32_t w[32];
#pragma unroll
  for (int i = 0; i < 64; ++i) o[i] = 0.0f;

  const M* mask_row[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t first = b * k.mask_strides[0] + h * k.mask_strides[1] + (row + 8 * i) * k.mask_strides[2];
    mask_row[i] = nullptr;
    if constexpr (!std::is_void<M>::value) mask_row[i] = static_cast<const M*>(k.mask) + first;
  }
  auto needs_mask = [&](int key0) {
    return !std::is_void<M>::value || key0 + kKeys > range.total ||
           (k.causal && key0 + kKeys - 1 > range.past + first_row) ||
           (k.window > 0 && key0 <= range.past + first_row + 63 - k.window);
  };
  // What lies behind the sequence in a cache may be anything: zeros, since 0 times NaN is NaN.
  auto clean = [&](int key0, int stage) {
    if (key0 + kKeys <= range.total || range.total >= k.lengths.capacity) return;
    ptx::mbar_wait(&bars->v_full[stage], 0);
    const int from = range.total - key0;
    for (int i = thread; i < (kKeys - from) * 16; i += 128) {
      *reinterpret_cast<uint4*>(values + stage * kValueBytes + i % 16 / 8 * kBlock + (from + i / 16) * 128 +
                                i % 8 * 16) = uint4{0, 0, 0, 0};
    }
    ptx::fence_async();
    ptx::bar_sync(2 + group, 128);
  };
  auto to_weights = [&]() {
#pragma unroll
    for (int i = 0; i < 32; ++i) w[i] = pack(s[2 * i], s[2 * i + 1], T{});
  };
  const uint32_t key_address = ptx::shared_address(keys), value_address = ptx::shared_address(values);

  ptx::mbar_wait(&bars->q_full, 0);
  ptx::mbar_wait(&bars->k_full[0], 0);
  ptx::wgmma_fence();
  scores<T>(s, q_address, key_address);
  ptx::wgmma_wait<0>();
  ptx::keep(s);
  if (lane == 0) ptx::mbar_arrive(&bars->k_empty[0]);
  int key0 = range.last * kKeys;
  if (needs_mask(key0)) mask<M>(s, k, range, key0, row, mask_row);
  softmax(s, k.scale, top, sum, rescale);
  to_weights();
  if (group == 1 && blocks > 1) ptx::bar_arrive(4, 256);  // the first warpgroup goes first
  for (int i = 0; i < blocks - 1; ++i) {
    const int stage = i % kStages, next = (i + 1) % kStages;
    ptx::mbar_wait(&bars->k_full[next], ((i + 1) / kStages) & 1);
    if (i == 0) clean(key0, stage);  // only the last keys can need it
    ptx::bar_sync(4 + group, 256);
    ptx::wgmma_fence();
    scores<T>(s, q_address, key_address + next * kKeyBytes);
    ptx::mbar_wait(&bars->v_full[stage], (i / kStages) & 1);
    ptx::wgmma_fence();
    weigh<T>(o, w, value_address + stage * kValueBytes);
    if (group == 0 || i < blocks - 2) ptx::bar_arrive(5 - group, 256);
    ptx::wgmma_wait<1>();
    ptx::keep(s);
    if (lane == 0) ptx::mbar_arrive(&bars->k_empty[next]);
    key0 -= kKeys;
    if (needs_mask(key0)) mask<M>(s, k, range, key0, row, mask_row);
    softmax(s, k.scale, top, sum, rescale);
    ptx::wgmma_wait<0>();
    ptx::keep(o);
    if (lane == 0) ptx::mbar_arrive(&bars->v_empty[stage]);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      o[4 * j] *= rescale[0], o[4 * j + 1] *= rescale[0], o[4 * j + 2] *= rescale[1], o[4 * j + 3] *= rescale[1];
    }
    to_weights();
  }
  const int stage = (blocks - 1) % kStages;
  ptx::mbar_wait(&bars->v_full[stage], ((blocks - 1) / kStages) & 1);
  if (blocks == 1) clean(key0, stage);
  ptx::keep(o);
  ptx::wgmma_fence();
  weigh<T>(o, w, value_address + stage * kValueBytes);
  ptx::wgmma_wait<0>();
  ptx::keep(o);

  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
    sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    factor[i] = sum[i] > 0.0f ? 1.0f / sum[i] : 0.0f;
    const int at = row + 8 * i;
    if (k.gate && at < k.seq_len) {
      factor[i] *= sigmoid(to_float(static_cast<const T*>(k.gate)[(b * k.seq_len + at) * k.heads + h]));
    }
  }
  // Through the place of this warpgroup's queries, so that whole rows are stored.
  unsigned char* out = q + group * 64 * 128;
  const uint32_t to = ptx::shared_address(out) + (warp * 16 + lane % 16) * 128;
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    const int chunk = (j % 8 + lane / 16) ^ (lane % 8);
    ptx::stmatrix(to + j / 8 * kBlock + chunk * 16, pack(o[4 * j] * factor[0], o[4 * j + 1] * factor[0], T{}),
                  pack(o[4 * j + 2] * factor[1], o[4 * j + 3] * factor[1], T{}),
                  pack(o[4 * j + 4] * factor[0], o[4 * j + 5] * factor[0], T{}),
                  pack(o[4 * j + 6] * factor[1], o[4 * j + 7] * factor[1], T{}));
  }
  ptx::bar_sync(2 + group, 128);
#pragma unroll
  for (int i = thread; i < 64 * 16; i += 128) {
    const int at = i / 16, chunk = i % 16;
    if (first_row + at >= k.seq_len) break;
    T* to_row = static_cast<T*>(k.o) + ((b * k.seq_len + first_row + at) * k.heads + h) * 128;
    *reinterpret_cast<uint4*>(to_row + chunk * 8) =
        *reinterpret_cast<const uint4*>(out + chunk / 8 * kBlock + at * 128 + ((chunk % 8) ^ (at % 8)) * 16);
  }
}

__device__ __forceinline__ void fetch_keys(const CUtensorMap* k_map, const CUtensorMap* rope_map, const KernelArgs& k,
                                           unsigned char* to, uint64_t* bar, int n, int h, int b) {
  ptx::mbar_expect(bar, kKeyBytes);
  ptx::tma_load(to, k_map, bar, 0, h, n * kKeys, b);
  ptx::tma_load(to + kBlock, k_map, bar, 64, h, n * kKeys, b);
  ptx::tma_load(to + 2 * kBlock, rope_map, bar, k.k_rope_column, k.k_rope_per_head ? h : 0, n * kKeys, b);
}
#endif

template <typename T, typename M>
__global__ void __launch_bounds__(kThreads, 1)
    prompt_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap q_rope_map,
                  const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap k_rope_map,
                  const __grid_constant__ CUtensorMap v_map, const __grid_constant__ KernelArgs k) {
#ifdef MLA_SM90A
  extern __shared__ unsigned char unaligned[];
  unsigned char* q = unaligned + (1024 - ptx::shared_address(unaligned) % 1024) % 1024;
  unsigned char* keys = q + kQueryBytes;
  unsigned char* values = keys + kStages * kKeyBytes;
  Barriers* bars = reinterpret_cast<Barriers*>(values + kStages * kValueBytes);
  const int m0 = (gridDim.x - 1 - blockIdx.x) * kQueries, h = blockIdx.y, b = blockIdx.z;  // the longest first
  const Range range(k, b, m0);
  if (threadIdx.x == 0) {
    ptx::mbar_init(&bars->q_full, 1);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbar_init(&bars->k_full[i], 1);
      ptx::mbar_init(&bars->v_full[i], 1);
      ptx::mbar_init(&bars->k_empty[i], 8);
      ptx::mbar_init(&bars->v_empty[i], 8);
    }
    ptx::mbar_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    ptx::set_registers_less<24>();
    if (threadIdx.x != 256) return;
    const int blocks = range.last - range.first + 1;
    ptx::mbar_expect(&bars->q_full, kQueryBytes);
    ptx::tma_load(q, &q_map, &bars->q_full, 0, h, m0, b);
    ptx::tma_load(q + kBlock, &q_map, &bars->q_full, 64, h, m0, b);
    ptx::tma_load(q + 2 * kBlock, &q_rope_map, &bars->q_full, k.q_rope_column, h, m0, b);
    fetch_keys(&k_map, &k_rope_map, k, keys, &bars->k_full[0], range.last, h, b);
    for (int i = 0; i < blocks; ++i) {
      if (i + 1 < blocks) {
        const int next = (i + 1) % kStages;
        if (i + 1 >= kStages) ptx::mbar_wait(&bars->k_empty[next], ((i + 1) / kStages - 1) & 1);
        fetch_keys(&k_map, &k_rope_map, k, keys + next * kKeyBytes, &bars->k_full[next], range.last - i - 1, h, b);
      }
      const int stage = i % kStages;
      if (i >= kStages) ptx::mbar_wait(&bars->v_empty[stage], (i / kStages - 1) & 1);
      ptx::mbar_expect(&bars->v_full[stage], kValueBytes);
      unsigned char* to = values + stage * kValueBytes;
      ptx::tma_load(to, &v_map, &bars->v_full[stage], k.v_column, h, (range.last - i) * kKeys, b);
      ptx::tma_load(to + kBlock, &v_map, &bars->v_full[stage], k.v_column + 64, h, (range.last - i) * kKeys, b);
    }
  } else {
    ptx::set_registers_more<240>();
    consume<T, M>(k, range, m0, b, h, q, keys, values, bars);
  }
#endif
}

template <typename T, typename M>
cudaError_t launch_for(const PromptArgs& a, cudaStream_t stream) {
  const Params& p = a.p;
  CUtensorMap maps[5];
  const Heads* heads[5] = {&a.q, &a.q_rope, &a.k, &a.k_rope, &a.v};
  for (int i = 0; i < 5; ++i) {
    const cudaError_t status = make_map(&maps[i], p.dtype, *heads[i], 128);
    if (status != cudaSuccess) return status;
  }
  KernelArgs k;
  k.lengths = a.lengths;
  k.gate = p.gate_sigmoid ? p.gate : nullptr;
  k.o = p.o;
  k.scale = p.scale * kLog2e;
  k.heads = p.num_heads;
  k.seq_len = static_cast<int32_t>(p.seq_len);
  k.causal = p.causal;
  k.window = p.window;
  k.q_rope_column = a.q_rope_column, k.k_rope_column = a.k_rope_column, k.v_column = a.v_column;
  k.k_rope_per_head = a.k_rope_per_head;
  k.mask = p.attn_mask;
  for (int i = 0; i < 4; ++i) k.mask_strides[i] = p.mask_strides[i];
  k.mask_factor = 1.0f / p.scale;
  const auto kernel = prompt_kernel<T, M>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  const dim3 grid(static_cast<unsigned>((p.seq_len + kQueries - 1) / kQueries), p.num_heads,
                  static_cast<unsigned>(p.batch));
  kernel<<<grid, kThreads, kSharedBytes, stream>>>(maps[0], maps[1], maps[2], maps[3], maps[4], k);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_mask(const PromptArgs& a, cudaStream_t stream) {
  switch (a.p.mask_type) {
    case MaskType::kT:
      return launch_for<T, T>(a, stream);
    case MaskType::kFloat32:
      return launch_for<T, float>(a, stream);
    case MaskType::kBool:
      return launch_for<T, uint8_t>(a, stream);
    default:
      return launch_for<T, void>(a, stream);
  }
}

}  // namespace

cudaError_t launch_prompt_sm90a(const PromptArgs& a, cudaStream_t stream) {
  return a.p.dtype == DType::kBFloat16 ? launch_mask<__nv_bfloat16>(a, stream) : launch_mask<__half>(a, stream);
}

}  // namespace deltafuse::mla
