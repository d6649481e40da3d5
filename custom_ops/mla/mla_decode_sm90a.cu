// Launch of decode's two kernels.
#include "mla_combine.cuh"
#include "mla_decode.cuh"
#include "mla_maps.h"

namespace deltafuse::mla {
namespace {

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

template <typename T, CacheType kType, bool kMask>
cudaError_t launch_for(const DecodeArgs& a, cudaStream_t stream) {
  DecodeKernelArgs k;
  k.a = a;
  k.row_blocks = row_blocks(a.p);
  const View& v = a.cache;
  const int64_t rows = v.block_table ? v.num_blocks * v.block_size : a.p.batch * v.batch_rows;
  k.box_rows = v.block_table && v.block_size < 64 ? static_cast<int>(v.block_size) : 64;
  k.once = rows * (v.latent_row + v.rope_row) * int64_t(sizeof(T)) > (int64_t(24) << 20);
  const bool packed = kType == CacheType::kSame &&
                      static_cast<const T*>(v.rope) == static_cast<const T*>(v.latent) + kLatent &&
                      v.rope_row == v.latent_row;
  CUtensorMap rope_map, latent_map, q_map;
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
  const uint64_t q_sizes[2] = {kLatent + kRotary, uint64_t(a.p.batch * a.p.seq_len * a.p.num_heads)};
  const uint64_t q_stride = (kLatent + kRotary) * sizeof(T);
  const uint32_t q_box[2] = {64, kDecodeRows};
  status = make_map(&q_map, a.p.dtype, 2, a.q, q_sizes, &q_stride, q_box);
  if (status != cudaSuccess) return status;
  const auto kernel = decode_kernel<T, kType, kMask>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchConfig_t config = {};
  DeviceInfo device;
  status = device_info(&device);
  if (status != cudaSuccess) return status;
  const int64_t work = a.p.batch * a.items * k.row_blocks;
  config.gridDim = dim3(static_cast<unsigned>(work < device.multiprocessors ? work : device.multiprocessors));
  config.blockDim = dim3(decode::kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  status = cudaLaunchKernelEx(&config, kernel, latent_map, rope_map, q_map, k);
  if (status != cudaSuccess) return status;

  CombineArgs c;
  c.a = a;
  c.row_blocks = k.row_blocks;
  const int combine_bytes = a.by_section ? combine::section_bytes(a.items) : combine::leaf_bytes(a.items);
  const auto combine = a.by_section ? combine_sections_kernel<T> : combine_leaves_kernel<T>;
  status = cudaFuncSetAttribute(combine, cudaFuncAttributeMaxDynamicSharedMemorySize, combine_bytes);
  if (status != cudaSuccess) return status;
  config.gridDim =
      dim3(combine::kSlotRows / (a.by_section ? combine::kWarps : 1), k.row_blocks, static_cast<unsigned>(a.p.batch));
  config.blockDim = dim3(combine::kThreads);
  config.dynamicSmemBytes = combine_bytes;
  return cudaLaunchKernelEx(&config, combine, c);
}

template <typename T, CacheType kType>
cudaError_t launch_mask(const DecodeArgs& a, cudaStream_t stream) {
  return a.p.mask_type == MaskType::kNone ? launch_for<T, kType, false>(a, stream)
                                          : launch_for<T, kType, true>(a, stream);
}

template <typename T>
cudaError_t launch_type(const DecodeArgs& a, cudaStream_t stream) {
  switch (a.cache.type) {
    case CacheType::kInt8:
      return launch_mask<T, CacheType::kInt8>(a, stream);
    case CacheType::kFloat8:
      return launch_mask<T, CacheType::kFloat8>(a, stream);
    default:
      return launch_mask<T, CacheType::kSame>(a, stream);
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
  // Sections as soon as they occupy most of the GPU in full sequences: fewer sums travel.
  const int sections = Cut::max_sections(capacity), leaves = Cut::max_leaves(capacity);
  plan.by_section = rows * Cut::of(capacity, p.seq_len, p.window).sections * 4 >= int64_t(multiprocessors) * 3;
  plan.items = plan.by_section ? sections : leaves;
  plan.partial_bytes = rows * plan.items * int64_t(kLatent) * kDecodeRows * 4;
  plan.stats_bytes = rows * plan.items * int64_t(2) * kDecodeRows * 4;
  plan.parts_bytes = (p.batch * plan.items + 1) * int64_t(sizeof(Part));
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
  if (p.batch > 4096) return "a batch above 4096";
  return nullptr;
}

cudaError_t launch_decode(const DecodeArgs& a, cudaStream_t stream) {
  if (a.p.batch == 0) return cudaSuccess;
  return a.p.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(a, stream) : launch_type<__half>(a, stream);
}

}  // namespace deltafuse::mla
