// Kernels that the emulator is checked with: what they should find out by themselves, and mistakes that it should find.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

__device__ __noinline__ int collatz(int n) {  // lanes leave the loop one after the other
  int steps = 0;
  while (n != 1) {
    n = n % 2 ? 3 * n + 1 : n / 2;
    ++steps;
  }
  return steps;
}

__global__ void lanes_kernel(const int* in, int* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
  int x = in[i];
  x = x % 3 == 0 ? collatz(x) : x % 3 == 1 ? -collatz(x) : 1000;
  const unsigned odd = __ballot_sync(~0u, x & 1);
  const int sum = __reduce_add_sync(~0u, x), left = __shfl_up_sync(~0u, x, 1);
  out[i] = x + 7 * __popc(odd) + 3 * sum + (lane ? left : 0);
}

// A 16x16 times B 16x8, bfloat16, as mma.sync spreads them over the lanes.
__global__ void mma_kernel(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  auto pair = [](const __nv_bfloat16* p, int step) {
    return uint32_t(__bfloat16_as_ushort(p[0])) | uint32_t(__bfloat16_as_ushort(p[step])) << 16;
  };
  uint32_t x[4], y[2];
  for (int i = 0; i < 4; ++i) x[i] = pair(a + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8, 1);
  for (int i = 0; i < 2; ++i) y[i] = pair(b + (2 * t + 8 * i) * 8 + g, 8);
  float d[4] = {};
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

enum Mistake {
  kNone,
  kNoWait,
  kEarlySums,
  kNoExpect,
  kPastGlobal,
  kPastShared,
  kNoBarrier,
  kMisaligned,
  kHalfBarrier,
  kNoFence
};

__device__ uint32_t offset_of(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void wait_for(uint64_t* barrier) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra AGAIN;\n}" ::
          "r"(offset_of(barrier))
      : "memory");
}

// A 64x16 and B 8x16 come by bulk copies, as the descriptors without swizzle want them: blocks of 8 rows of 16 bytes,
// first along the rows, then along k. C is A times B transposed, twice: the
// block doubles B itself.
__global__ void __launch_bounds__(128)
    wgmma_kernel(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c, int mistake) {
  __shared__ __align__(128) __nv_bfloat16 tile[64 * 16 + 8 * 16];
  __shared__ uint64_t barrier;
  __shared__ int turned[128];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(offset_of(&barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (mistake != kNoExpect) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(offset_of(&barrier)), "r"(2304)
                   : "memory");
    }
    for (int i = 0; i < 2; ++i) {
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       offset_of(tile + i * 1024)),
                   "l"(i ? b : a), "r"(i ? 256 : 2048), "r"(offset_of(&barrier))
                   : "memory");
    }
  }
  if (mistake != kNoWait) wait_for(&barrier);
  if (mistake == kPastGlobal) c[0] = __bfloat162float(b[128 + threadIdx.x]);
  if (mistake == kPastShared) turned[threadIdx.x + mistake] = 0;
  if (mistake == kMisaligned) c[0] = *reinterpret_cast<const float*>(a + 1);
  if (mistake == kHalfBarrier && lane < 16) asm volatile("bar.sync 1, 128;");
  tile[1024 + threadIdx.x] += tile[1024 + threadIdx.x];
  if (mistake != kNoFence) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  turned[threadIdx.x] = threadIdx.x;
  if (mistake != kNoBarrier) __syncthreads();
  const int other = turned[127 - threadIdx.x];
  auto descriptor = [](const void* p, uint64_t leading, uint64_t stride) {
    return uint64_t(offset_of(p) & 0x3ffff) >> 4 | leading >> 4 << 16 | stride >> 4 << 32;
  };
  float d[4] = {};
  const uint64_t left = descriptor(tile, 1024, 128), right = descriptor(tile + 1024, 128, 128);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;\n"
      "wgmma.commit_group.sync.aligned;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(left), "l"(right)
      : "memory");
  if (mistake != kEarlySums) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
  }
  const int row = 16 * warp + lane / 4, col = lane % 4 * 2;
  for (int i = 0; i < 4; ++i)
    c[(row + i / 2 * 8) * 8 + col + i % 2] = d[i] + (other == 127 - int(threadIdx.x) ? 0.0f : 1.0f);
}

// The second is launched so that it may begin before the first has ended.
__global__ void first_kernel(int* numbers, int mistake) {
  numbers[32 + threadIdx.x] = 1;
  if (mistake != kNoFence) __threadfence();
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;");
  numbers[threadIdx.x] = threadIdx.x;
}
__global__ void second_kernel(int* numbers, int mistake) {
  const int factor = 1 + __ldcg(numbers + 32 + threadIdx.x);  // was there before this kernel could begin
  if (mistake != kNoWait) asm volatile("griddepcontrol.wait;" ::: "memory");
  numbers[threadIdx.x] *= factor;
}

}  // namespace

extern "C" int check_lanes(const int* in, int* out, int blocks) {
  lanes_kernel<<<blocks, 64>>>(in, out);
  return cudaGetLastError();
}
extern "C" int check_mma(const void* a, const void* b, float* c) {
  mma_kernel<<<1, 32>>>(static_cast<const __nv_bfloat16*>(a), static_cast<const __nv_bfloat16*>(b), c);
  return cudaGetLastError();
}
extern "C" int check_wgmma(const void* a, const void* b, float* c, int mistake) {
  wgmma_kernel<<<1, 128>>>(static_cast<const __nv_bfloat16*>(a), static_cast<const __nv_bfloat16*>(b), c, mistake);
  return cudaGetLastError();
}
extern "C" int check_launches(int* numbers, int mistake) {
  first_kernel<<<1, 32>>>(numbers, mistake);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1), config.blockDim = dim3(32), config.attrs = &overlap, config.numAttrs = 1;
  cudaLaunchKernelEx(&config, second_kernel, numbers, mistake);
  return cudaGetLastError();
}
extern "C" const char* check_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
