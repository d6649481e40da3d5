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

int row_blocks(const Params& p, int rows) { return static_cast<int>((p.seq_len * p.num_heads + rows - 1) / rows); }

template <typename T, int kRows>
cudaError_t launch_combine(const DecodeArgs& a, cudaLaunchConfig_t config) {
  CombineArgs c;
  c.a = a;
  using S = combine::Serial<kRows>;
  const unsigned row_blocks = a.plan.row_blocks, batch = static_cast<unsigned>(a.p.batch);
  config.dynamicSmemBytes = 0;
  if (a.plan.spread) {
    config.gridDim = dim3(combine::Slot<kRows>::kCount, row_blocks, batch);
    config.blockDim = dim3(combine::kSpreadThreads);
    return cudaLaunchKernelEx(&config, combine_spread_kernel<T, kRows>, c);
  }
  config.gridDim = dim3(S::kBlocks, row_blocks, batch);
  config.blockDim = dim3(S::kThreads);
  return cudaLaunchKernelEx(&config, combine_serial_kernel<T, kRows>, c);
}

struct DecodeMaps {
  CUtensorMap latent, rope, scale, q;
};

// What is not there has the map of something else: it is not used, but looked up.
template <typename T, CacheType kType, int kRows>
cudaError_t make_maps(const DecodeArgs& a, int64_t rows, int box_rows, DecodeMaps* maps) {
  constexpr bool kCodes = kType != CacheType::kSame;
  const View& v = a.cache;
  const uint32_t some = static_cast<uint32_t>(box_rows);
  const uint32_t box[2] = {64, some}, pair_box[3] = {64, some, box_rows < Cut::kTile ? 1u : 2u},
                 code_box[2] = {128, some}, scale_box[2] = {4, some};
  // Blocks of 64 channels are the third dimension of what is fetched into the 128-byte swizzle.
  const uint64_t latent_stride = v.latent_row * (kCodes ? 1 : sizeof(T)), rope_stride = v.rope_row * sizeof(T);
  const uint64_t block_strides[2] = {latent_stride, 128}, scale_stride = 16;
  const uint64_t block_sizes[3] = {64, uint64_t(rows), kLatent / 64}, code_sizes[2] = {kLatent, uint64_t(rows)};
  const uint64_t rope_sizes[2] = {uint64_t(kRotary), uint64_t(rows)}, scale_sizes[2] = {4, uint64_t(rows)};
  cudaError_t status = make_map(&maps->rope, a.p.dtype, 2, v.rope, rope_sizes, &rope_stride, box);
  if (status != cudaSuccess) return status;
  status = kCodes ? make_map(&maps->latent, MapType::kCodes, 2, v.latent, code_sizes, &latent_stride, code_box)
                  : make_map(&maps->latent, a.p.dtype, 3, v.latent, block_sizes, block_strides, pair_box);
  if (status != cudaSuccess) return status;
  maps->scale = maps->rope;
  if (kType == CacheType::kFloat8) {
    status = make_map(&maps->scale, MapType::kFloat32, 2, v.scale, scale_sizes, &scale_stride, scale_box);
    if (status != cudaSuccess) return status;
  }
  constexpr int kQueryBlocks = (kLatent + kRotary) / 64;
  const uint64_t q_sizes[3] = {64, uint64_t(a.p.batch * a.p.seq_len * a.p.num_heads), kQueryBlocks};
  const uint64_t q_strides[2] = {(kLatent + kRotary) * sizeof(T), 128};
  const uint32_t q_box[3] = {64, kRows, kQueryBlocks};
  return make_map(&maps->q, a.p.dtype, 3, a.q, q_sizes, q_strides, q_box);
}

template <typename T, CacheType kType, bool kMask, int kRows>
cudaError_t launch_for(const DecodeArgs& a, cudaStream_t stream) {
  const View& v = a.cache;
  const Params& p = a.p;
  DecodeKernelArgs k;
  k.past = a.lengths.past, k.is_int64 = a.lengths.is_int64;
  k.past_len = a.lengths.past_len, k.most_past = a.lengths.capacity - a.lengths.seq_len;
  k.batch = static_cast<int>(p.batch), k.seq_len = static_cast<int>(p.seq_len), k.num_heads = p.num_heads;
  k.window = p.window, k.causal = p.causal, k.scale = p.scale;
  k.plan = a.plan;
  k.row_blocks = a.plan.row_blocks;
  k.batch_rows = static_cast<int>(v.batch_rows), k.block_table = v.block_table;
  k.num_blocks = static_cast<int>(v.num_blocks), k.block_size = static_cast<int>(v.block_size);
  k.max_blocks = static_cast<int>(v.max_blocks);
  k.partial = a.partial, k.stats = a.stats, k.places = a.places;
  k.mask_type = p.mask_type, k.attn_mask = p.attn_mask;
  for (int i = 0; i < 4; ++i) k.mask_strides[i] = p.mask_strides[i];
  const int64_t rows = v.block_table ? v.num_blocks * v.block_size : p.batch * v.batch_rows;
  k.box_rows = v.block_table && v.block_size < 64 ? static_cast<int>(v.block_size) : 64;
  const int64_t code = kType == CacheType::kSame ? sizeof(T) : 1;
  k.once = rows * (v.latent_row * code + v.rope_row * int64_t(sizeof(T))) > (int64_t(24) << 20);
  DecodeMaps maps;
  cudaError_t status = make_maps<T, kType, kRows>(a, rows, k.box_rows, &maps);
  if (status != cudaSuccess) return status;
  constexpr int kBytes = decode::Shape<kType, kRows>::kBytes;
  const auto kernel = decode_kernel<T, kType, kMask, kRows>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  cudaLaunchConfig_t config = {};
  DeviceInfo device;
  status = device_info(&device);
  if (status != cudaSuccess) return status;
  const int64_t work = int64_t(a.plan.most) * k.row_blocks;
  config.gridDim = dim3(static_cast<unsigned>(work < device.multiprocessors ? work : device.multiprocessors));
  config.blockDim = dim3(decode::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  status = cudaLaunchKernelEx(&config, kernel, k, maps.latent, maps.rope, maps.scale, maps.q);
  if (status != cudaSuccess) return status;
  return launch_combine<T, kRows>(a, config);
}

template <typename T, CacheType kType>
cudaError_t launch_mask(const DecodeArgs& a, cudaStream_t stream) {
  if (a.p.mask_type != MaskType::kNone) return launch_for<T, kType, true, 32>(a, stream);
  return launch_for<T, kType, false, 32>(a, stream);
}

template <typename T>
cudaError_t launch_type(const DecodeArgs& a, cudaStream_t stream) {
  switch (a.cache.type) {
    case CacheType::kInt8:
      return launch_mask<T, CacheType::kInt8>(a, stream);
    case CacheType::kFloat8:
      return launch_mask<T, CacheType::kFloat8>(a, stream);
    default:
      if (a.plan.rows == 64) return launch_for<T, CacheType::kSame, false, 64>(a, stream);
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

DecodeChoice decode_choice;

DecodePlan plan_decode(const Params& p, int64_t capacity, int multiprocessors) {
  const DecodeChoice& choice = decode_choice;
  DecodePlan plan;
  const bool wide = p.cache_type == CacheType::kSame && p.mask_type == MaskType::kNone;
  plan.rows = wide && p.seq_len * p.num_heads > 32 ? 64 : 32;
  if (choice.rows == 32) plan.rows = 32;
  if (plan.rows == 64) plan.section_tiles = 16;  // no chapters: no registers for them
  if (choice.section_tiles > 0) plan.section_tiles = choice.section_tiles;
  if (choice.chapter_tiles > 0) plan.chapter_tiles = choice.chapter_tiles;
  plan.row_blocks = row_blocks(p, plan.rows);
  plan.multiprocessors = multiprocessors;
  plan.spread = choice.grain >= 0 ? choice.grain == 0 : p.batch * plan.row_blocks <= 4;
  plan.finest = plan.spread ? Grain::kTile : Grain::kSection;
  plan.coarsest = plan.spread ? Grain::kTile : plan.rows == 64 ? Grain::kSection : Grain::kChapter;
  if (choice.grain == 1) plan.coarsest = Grain::kSection;
  if (choice.grain == 2) plan.finest = plan.coarsest;
  const auto most = [&](Grain grain) {
    return p.batch * Cut::most_parts(capacity, grain, plan.section_tiles, plan.chapter_tiles);
  };
  // Room for a few parts a multiprocessor of a finer grain, which short sequences in a large cache may take.
  const int64_t room = 4 * multiprocessors / plan.row_blocks, fine = most(plan.finest), coarse = most(plan.coarsest);
  const int64_t some = fine < room ? fine : room;
  plan.most = static_cast<int>(coarse > some ? coarse : some);
  plan.part_of_all = 1.0f / static_cast<float>(multiprocessors);
  const double tile_bytes = Cut::kTile * (kLatent * (p.cache_type == CacheType::kSame ? 2.0 : 1.0) + kRotary * 2);
  const int64_t part_bytes = int64_t(kLatent) * plan.rows * (p.dtype == DType::kBFloat16 ? 2 : 4);
  plan.tile_alone = plan.rows == 64 ? 1600 : p.cache_type == CacheType::kSame ? 1200 : 1700;
  plan.tile_of_all = static_cast<int>(tile_bytes * multiprocessors / 4.2e3 / plan.row_blocks);  // 4.2 TB/s
  plan.part_sums = static_cast<int>(2 * part_bytes / 4000);  // 4 TB/s, there and back
  plan.partial_bytes = plan.most * plan.row_blocks * part_bytes;
  plan.stats_bytes = int64_t(plan.most) * plan.row_blocks * 2 * plan.rows * 4 + p.batch * int64_t(sizeof(int4));
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
  if (v.type == CacheType::kFloat8 && reinterpret_cast<uintptr_t>(v.scale) % 16 != 0) {
    return "scales that are no multiple of 16 bytes";
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
