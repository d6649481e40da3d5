// Launch of decode's two kernels, and the second of them: leaves and sections of a sequence are joined in an order that
// only its length decides.
#include "mla_decode.cuh"
#include "mla_maps.h"

namespace deltafuse::mla {
namespace {

constexpr int kChannels = 4, kLanes = 4;  // channels a block makes at a time; sections are dealt to so many sums
constexpr int kCombineThreads = 32 * kChannels * kLanes;

struct CombineArgs {
  DecodeArgs a;
  int row_blocks = 0;
  int channels = 0;  // of a block
};

template <typename T>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const CombineArgs k) {
  extern __shared__ float shared[];
  constexpr int kRows = kDecodeRows;
  const DecodeArgs& a = k.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, channel = warp % kChannels, part = warp / kChannels;
  const int64_t b = blockIdx.z;
  const int row_block = blockIdx.y, first_channel = blockIdx.x * k.channels;
  ptx::launch_dependents();
  ptx::wait_prior_grid();
  const Cut cut = Cut::of(a.lengths.total(b), a.p.seq_len, a.p.window);
  const int items = a.by_section ? cut.sections : cut.leaves;
  const int per_section = a.by_section ? 1 : cut.leaves_per_section;
  const int64_t at = (b * k.row_blocks + row_block) * a.items;
  float* pair = shared;                                     // [items][2][32]: maximum and sum, then keep and add
  float* top = pair + a.items * 2 * kRows;                  // [sections][32], then the section's factor
  float* sum = top + a.items * kRows;                       // [sections][32]
  float* joined = sum + a.items * kRows;                    // [kLanes][kChannels * 32]
  T* out = reinterpret_cast<T*>(joined + kCombineThreads);  // [32][channels]
  const float* stats = a.stats + at * 2 * kRows;
  for (int i = threadIdx.x; i < items * 2 * kRows; i += kCombineThreads) pair[i] = stats[i];
  __syncthreads();
  for (int section = warp; section < cut.sections; section += kCombineThreads / 32) {
    const int from = section * per_section, to = from + per_section < items ? from + per_section : items;
    float total_top = pair[from * 2 * kRows + lane], total_sum = pair[(from * 2 + 1) * kRows + lane];
    for (int i = from + 1; i < to; ++i) {
      const float leaf_top = pair[i * 2 * kRows + lane], leaf_sum = pair[(i * 2 + 1) * kRows + lane];
      const float both = fmaxf(total_top, leaf_top), keep = ratio(total_top, both), add = ratio(leaf_top, both);
      total_sum = __fmaf_rn(leaf_sum, add, __fmul_rn(total_sum, keep));
      total_top = both;
      pair[i * 2 * kRows + lane] = keep;
      pair[(i * 2 + 1) * kRows + lane] = add;
    }
    top[section * kRows + lane] = total_top;
    sum[section * kRows + lane] = total_sum;
  }
  __syncthreads();
  float largest = -INFINITY, denominator = 0.0f;
#pragma unroll 8
  for (int s = 0; s < cut.sections; ++s) largest = fmaxf(largest, top[s * kRows + lane]);
#pragma unroll 8
  for (int s = 0; s < cut.sections; ++s) {
    denominator = __fmaf_rn(sum[s * kRows + lane], ratio(top[s * kRows + lane], largest), denominator);
  }
  const float inverse = denominator > 0.0f ? 1.0f / denominator : 0.0f;
  const float* partial = a.partial + at * kLatent * kRows + lane;
  for (int c0 = 0; c0 < k.channels; c0 += kChannels) {
    const int c = first_channel + c0 + channel;
    float mine = 0.0f;
    for (int section = part; section < cut.sections; section += kLanes) {
      const int from = section * per_section, to = from + per_section < items ? from + per_section : items;
      const float* x = partial + (int64_t(from) * kLatent + c) * kRows;
      float total = *x + 0.0f;  // as decode_kernel's first leaf, zeros' signs included
#pragma unroll 8
      for (int i = from + 1; i < to; ++i) {
        x += kLatent * kRows;
        total = __fmaf_rn(*x, pair[(i * 2 + 1) * kRows + lane], __fmul_rn(total, pair[i * 2 * kRows + lane]));
      }
      mine = __fmaf_rn(total, ratio(top[section * kRows + lane], largest), mine);
    }
    joined[threadIdx.x] = mine;
    __syncthreads();
    if (part == 0) {
      float x = mine;
#pragma unroll
      for (int i = 1; i < kLanes; ++i) x += joined[i * 32 * kChannels + threadIdx.x];
      x *= inverse;
      if (a.cache.type == CacheType::kInt8) x *= a.cache.scale[c];
      out[lane * k.channels + c0 + channel] = from_float<T>(x);
    }
    __syncthreads();
  }
  const int rows = static_cast<int>(a.p.seq_len) * a.p.num_heads, pairs = k.channels / 2;
  for (int i = threadIdx.x; i < kRows * pairs; i += kCombineThreads) {
    const int row = row_block * kRows + i / pairs;
    if (row >= rows) break;
    uint32_t* to =
        reinterpret_cast<uint32_t*>(static_cast<T*>(a.o_latent) + (b * rows + row) * kLatent + first_channel);
    to[i % pairs] = *reinterpret_cast<const uint32_t*>(out + i / pairs * k.channels + i % pairs * 2);
  }
}

// In a library that was not compiled for sm_90a the kernel is empty and asks for no shared memory of its own.
__global__ void probe_kernel(int* out) {
#ifdef MLA_SM90A
  __shared__ int here[4];
  here[threadIdx.x % 4] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = here[(threadIdx.x + 1) % 4];
#endif
}

int row_blocks(const Params& p) { return static_cast<int>((p.seq_len * p.num_heads + kDecodeRows - 1) / kDecodeRows); }

template <typename T, CacheType kType>
cudaError_t launch_for(const DecodeArgs& a, cudaStream_t stream) {
  DecodeKernelArgs k;
  k.a = a;
  k.row_blocks = row_blocks(a.p);
  const View& v = a.cache;
  const int64_t rows = v.block_table ? v.num_blocks * v.block_size : a.p.batch * v.batch_rows;
  k.box_rows = v.block_table && v.block_size < 64 ? static_cast<int>(v.block_size) : 64;
  const bool packed = kType == CacheType::kSame &&
                      static_cast<const T*>(v.rope) == static_cast<const T*>(v.latent) + kLatent &&
                      v.rope_row == v.latent_row;
  CUtensorMap rope_map, latent_map;
  const uint32_t box[2] = {64, static_cast<uint32_t>(k.box_rows)};
  const uint64_t latent_sizes[2] = {uint64_t(packed ? kLatent + kRotary : kLatent), uint64_t(rows)};
  const uint64_t rope_sizes[2] = {uint64_t(kRotary), uint64_t(rows)};
  const uint64_t latent_stride = v.latent_row * sizeof(T), rope_stride = v.rope_row * sizeof(T);
  cudaError_t status = make_map(&rope_map, a.p.dtype, 2, v.rope, rope_sizes, &rope_stride, box);
  if (status != cudaSuccess) return status;
  latent_map = rope_map;
  if (kType == CacheType::kSame) {
    status = make_map(&latent_map, a.p.dtype, 2, v.latent, latent_sizes, &latent_stride, box);
    if (status != cudaSuccess) return status;
  }
  const int bytes = decode::kSharedBytes + (kType == CacheType::kSame ? 0 : decode::kRawBytes);
  const auto kernel = decode_kernel<T, kType>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(k.row_blocks * a.items, static_cast<unsigned>(a.p.batch));
  config.blockDim = dim3(decode::kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  status = cudaLaunchKernelEx(&config, kernel, latent_map, rope_map, k);
  if (status != cudaSuccess) return status;

  CombineArgs c;
  c.a = a;
  c.row_blocks = k.row_blocks;
  c.channels = kChannels;
  while (c.channels < 128 && int64_t(kLatent / c.channels) * k.row_blocks * a.p.batch > 256) c.channels *= 2;
  const int combine_bytes = 4 * (a.items * 4 * kDecodeRows + kCombineThreads) + 2 * kDecodeRows * c.channels;
  const auto combine = combine_kernel<T>;
  status = cudaFuncSetAttribute(combine, cudaFuncAttributeMaxDynamicSharedMemorySize, combine_bytes);
  if (status != cudaSuccess) return status;
  config.gridDim = dim3(kLatent / c.channels, k.row_blocks, static_cast<unsigned>(a.p.batch));
  config.blockDim = dim3(kCombineThreads);
  config.dynamicSmemBytes = combine_bytes;
  return cudaLaunchKernelEx(&config, combine, c);
}

template <typename T>
cudaError_t launch_type(const DecodeArgs& a, cudaStream_t stream) {
  switch (a.cache.type) {
    case CacheType::kInt8:
      return launch_for<T, CacheType::kInt8>(a, stream);
    case CacheType::kFloat8:
      return launch_for<T, CacheType::kFloat8>(a, stream);
    default:
      return launch_for<T, CacheType::kSame>(a, stream);
  }
}

}  // namespace

cudaError_t has_sm90a(bool* yes) {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, probe_kernel);
  *yes = status == cudaSuccess && attributes.sharedSizeBytes >= 16;
  return status;
}

DecodePlan plan_decode(const Params& p, int64_t capacity, int multiprocessors) {
  DecodePlan plan;
  const int64_t rows = row_blocks(p) * p.batch;
  const int sections = Cut::max_sections(capacity), leaves = Cut::max_leaves(capacity);
  // Sections as soon as they occupy most of the GPU: fewer sums travel.
  plan.by_section = rows * sections * 4 >= int64_t(multiprocessors) * 3 || sections == leaves;
  plan.items = plan.by_section ? sections : leaves;
  plan.partial_bytes = rows * plan.items * int64_t(kLatent) * kDecodeRows * 4;
  plan.stats_bytes = rows * plan.items * int64_t(2) * kDecodeRows * 4;
  return plan;
}

const char* decode_refusal(const Params& p, const View& v) {
  if (p.dtype == DType::kFloat32) return "float32";
  if (p.kv_lora_rank != kLatent || p.qk_rope_head_dim != kRotary) return "widths other than 512 + 64";
  const int64_t code = v.type == CacheType::kSame ? 2 : 1;
  if (v.latent_row * code % 16 != 0 || v.rope_row * 2 % 16 != 0) return "rows that are no multiple of 16 bytes";
  if (reinterpret_cast<uintptr_t>(v.latent) % 16 != 0 || reinterpret_cast<uintptr_t>(v.rope) % 16 != 0) {
    return "addresses that are no multiple of 16 bytes";
  }
  if (v.block_table) {
    const int64_t n = v.block_size;
    if (n < 64 ? n < 8 || 64 % n != 0 : n % 64 != 0) return "blocks that do not fit into tiles of 64";
    if (n * v.num_blocks >= (int64_t(1) << 31)) return "a pool of 2^31 tokens";
  } else if (p.batch * v.batch_rows >= (int64_t(1) << 31)) {
    return "a cache of 2^31 tokens";
  }
  if (p.batch > 65535) return "a batch above 65535";
  return nullptr;
}

cudaError_t launch_decode(const DecodeArgs& a, cudaStream_t stream) {
  if (a.p.batch == 0) return cudaSuccess;
  return a.p.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(a, stream) : launch_type<__half>(a, stream);
}

}  // namespace deltafuse::mla
