// Prompts: every token's keys and values, latent W, by wgmma. One block makes 128 tokens of 256 columns; one warpgroup
// fetches, two multiply.
#include "mla_device.cuh"
#include "mla_maps.h"
#include "mla_wgmma_sm90a.cuh"

namespace deltafuse::mla {
namespace {

constexpr int kM = 128, kN = 256, kK = 64, kStages = 4, kThreads = 384;
constexpr int kABytes = kM * kK * 2, kBBlock = kK * 128, kBBytes = kBBlock * kN / 64, kStageBytes = kABytes + kBBytes;
constexpr int kSharedBytes = 1024 + kStages * kStageBytes + 256;
[[maybe_unused]] constexpr int kOutRow = kN * 2 + 16;  // bytes

struct KernelArgs {
  Lengths lengths;
  int64_t rows = 0, columns = 0;
  int32_t rank = 0, only_new = 0;
  void* kv = nullptr;
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    expand_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                  const __grid_constant__ KernelArgs k) {
#ifdef MLA_SM90A
  extern __shared__ unsigned char unaligned[];
  unsigned char* stages = unaligned + (1024 - ptx::shared_address(unaligned) % 1024) % 1024;
  uint64_t* full = reinterpret_cast<uint64_t*>(stages + kStages * kStageBytes);
  uint64_t* empty = full + kStages;
  const int n0 = blockIdx.x * kN, m0 = blockIdx.y * kM, b = blockIdx.z;
  if (!k.only_new && m0 >= k.lengths.total(b)) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbar_init(&full[i], 1);
      ptx::mbar_init(&empty[i], 8);
    }
    ptx::mbar_init_fence();
  }
  __syncthreads();
  const int steps = k.rank / kK, group = threadIdx.x / 128;
  if (group == 2) {
    ptx::set_registers_less<24>();
    if (threadIdx.x % 128 != 0) return;
    for (int i = 0; i < steps; ++i) {
      const int stage = i % kStages;
      if (i >= kStages) ptx::mbar_wait(&empty[stage], (i / kStages - 1) & 1);
      ptx::mbar_expect(&full[stage], kStageBytes);
      unsigned char* to = stages + stage * kStageBytes;
      ptx::tma_load(to, &a_map, &full[stage], i * kK, 0, m0, b);
      for (int j = 0; j < kN / 64; ++j) {
        ptx::tma_load(to + kABytes + j * kBBlock, &b_map, &full[stage], n0 + j * 64, i * kK);
      }
    }
  } else {
    ptx::set_registers_more<240>();
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    float acc[kN / 2];
    for (int i = 0; i < steps; ++i) {
      const int stage = i % kStages;
      ptx::mbar_wait(&full[stage], (i / kStages) & 1);
      const uint32_t a = ptx::shared_address(stages + stage * kStageBytes) + group * 64 * 128;
      const uint32_t w = ptx::shared_address(stages + stage * kStageBytes + kABytes);
      ptx::wgmma_fence();
#pragma unroll
      for (int j = 0; j < kK / 16; ++j) {
        ptx::wgmma_n256<0, 1>(acc, ptx::descriptor(a + j * 32), ptx::descriptor(w + j * 2048, kBBlock), i + j > 0, T{});
      }
      ptx::wgmma_commit();
      if (i > 0) {
        ptx::wgmma_wait<1>();
        if (lane == 0) ptx::mbar_arrive(&empty[(i - 1) % kStages]);
      }
    }
    ptx::wgmma_wait<0>();
    ptx::keep(acc);
    ptx::bar_sync(1, 256);  // nobody reads the stages any more: results go through them
    unsigned char* out = stages + group * 64 * kOutRow;
    const uint32_t to = ptx::shared_address(out) + (warp * 16 + lane % 16) * kOutRow + lane / 16 * 16;
#pragma unroll
    for (int j = 0; j < kN / 8; j += 2) {
      ptx::stmatrix(to + j * 16, pack(acc[4 * j], acc[4 * j + 1], T{}), pack(acc[4 * j + 2], acc[4 * j + 3], T{}),
                    pack(acc[4 * j + 4], acc[4 * j + 5], T{}), pack(acc[4 * j + 6], acc[4 * j + 7], T{}));
    }
    ptx::bar_sync(2 + group, 128);
    T* kv = static_cast<T*>(k.kv);
#pragma unroll 4
    for (int i = thread; i < 64 * kN / 8; i += 128) {
      const int row = i / (kN / 8), chunk = i % (kN / 8);
      const int64_t token = m0 + group * 64 + row;
      if (token >= k.rows) break;
      *reinterpret_cast<uint4*>(kv + (b * k.rows + token) * k.columns + n0 + chunk * 8) =
          *reinterpret_cast<const uint4*>(out + row * kOutRow + chunk * 16);
    }
  }
#endif
}

template <typename T>
cudaError_t launch_for(const GemmArgs& g, cudaStream_t stream) {
  const Params& p = g.p;
  KernelArgs k;
  k.lengths = g.lengths;
  k.rows = g.rows;
  k.columns = int64_t(p.num_heads) * (p.qk_nope_head_dim + p.v_head_dim);
  k.rank = p.kv_lora_rank;
  k.only_new = g.only_new;
  k.kv = g.kv;
  CUtensorMap a_map, b_map;
  const Heads latents{
      g.latent, p.kv_lora_rank, 1, g.rows, p.batch, g.latent_row, g.latent_row, g.batch_rows * g.latent_row};
  cudaError_t status = make_map(&a_map, p.dtype, latents, kM);
  if (status != cudaSuccess) return status;
  const uint64_t sizes[2] = {uint64_t(k.columns), uint64_t(p.kv_lora_rank)}, stride = k.columns * sizeof(T);
  const uint32_t box[2] = {64, kK};
  status = make_map(&b_map, p.dtype, 2, g.kv_b, sizes, &stride, box);
  if (status != cudaSuccess) return status;
  const auto kernel = expand_kernel<T>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  const dim3 grid(static_cast<unsigned>(k.columns / kN), static_cast<unsigned>((g.rows + kM - 1) / kM),
                  static_cast<unsigned>(p.batch));
  kernel<<<grid, kThreads, kSharedBytes, stream>>>(a_map, b_map, k);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_expand_sm90a(const GemmArgs& g, cudaStream_t stream) {
  return g.p.dtype == DType::kBFloat16 ? launch_for<__nv_bfloat16>(g, stream) : launch_for<__half>(g, stream);
}

}  // namespace deltafuse::mla
