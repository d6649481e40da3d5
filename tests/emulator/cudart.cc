// The part of the CUDA runtime that programs with precompiled kernels call. Memory of the device is memory of the host,
// everything is done before a call returns, and the device says that it is an H200.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#include "dependence.h"
#include "memory.h"
#include "modules.h"
#include "streams.h"
#include "tensor_map.h"

using namespace emulator;

namespace {

constexpr int kProcessors = 132, kSharedOptin = 227 * 1024, kSharedProcessor = 228 * 1024;

thread_local cudaError_t last_error = cudaSuccess;
std::string& fault_text() {
  static std::string text = "unspecified launch failure";
  return text;
}
std::recursive_mutex device;  // one thing at a time

cudaError_t result(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local Configuration pushed;

cudaError_t launch(const void* host, dim3 grid, dim3 block, void** args, size_t shared, dim3 cluster, bool cooperative,
                   bool programmatic = false) {
  const std::lock_guard<std::recursive_mutex> lock(device);
  HostFunction* f = find_function(host);
  if (!f) return result(cudaErrorInvalidDeviceFunction);
  try {
    Kernel& k = kernel_of(*f);
    const uint64_t threads = uint64_t{block.x} * block.y * block.z, size = uint64_t{cluster.x} * cluster.y * cluster.z;
    if (!grid.x || !grid.y || !grid.z || !threads || threads > 1024 || grid.y > 65535 || grid.z > 65535 ||
        block.z > 64) {
      return result(cudaErrorInvalidConfiguration);
    }
    if (!size || size > (f->big_clusters ? 16 : 8) || grid.x % cluster.x || grid.y % cluster.y || grid.z % cluster.z) {
      return result(cudaErrorInvalidClusterSize);
    }
    if (k.max_threads && threads > static_cast<uint64_t>(k.max_threads)) return result(cudaErrorInvalidValue);
    if (shared > static_cast<size_t>(f->dynamic_limit) || shared + k.shared_bytes > kSharedOptin)
      return result(cudaErrorInvalidValue);
    std::vector<char> params = k.params;
    for (size_t i = 0; i < k.param_offset.size(); ++i)
      std::memcpy(&params[k.param_offset[i]], args[i], k.param_bytes[i]);
    Launch l;
    l.kernel = &k;
    l.grid = {grid.x, grid.y, grid.z}, l.threads = {block.x, block.y, block.z},
    l.cluster = {cluster.x, cluster.y, cluster.z};
    l.dynamic_shared = static_cast<uint32_t>(shared);
    l.cooperative = cooperative, l.programmatic = programmatic;
    return result(static_cast<cudaError_t>(submit([l, params] {
      try {
        std::copy(params.begin(), params.end(), l.kernel->params.begin());
        run_launch(l);
        return static_cast<int>(cudaSuccess);
      } catch (const std::exception& error) {
        fault_text() = error.what();
        std::fprintf(stderr, "emulator: %s\n", error.what());
        return static_cast<int>(cudaErrorLaunchFailure);
      }
    })));
  } catch (const std::exception& error) {
    fault_text() = error.what();
    std::fprintf(stderr, "emulator: %s\n", error.what());
    return result(cudaErrorLaunchFailure);
  }
}

cudaError_t copy(void* to, const void* from, size_t bytes) {
  return result(static_cast<cudaError_t>(submit([=] {
    forget_dependence();
    if (bytes) std::memmove(to, from, bytes);
    return 0;
  })));
}
cudaError_t fill(void* to, int value, size_t bytes) {
  return result(static_cast<cudaError_t>(submit([=] {
    forget_dependence();
    if (bytes) std::memset(to, value, bytes);
    return 0;
  })));
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* dims,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                CUtensorMapFloatOOBfill fill_kind) {
  static const int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  if (static_cast<size_t>(type) >= sizeof(sizes) / sizeof(sizes[0]) || rank < 1 || rank > 5)
    return CUDA_ERROR_INVALID_VALUE;
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle > CU_TENSOR_MAP_SWIZZLE_128B)
    return CUDA_ERROR_NOT_SUPPORTED;
  const auto base = reinterpret_cast<uint64_t>(address);
  TensorMap m{};
  m.magic = TensorMap::kMagic;
  m.rank = static_cast<uint8_t>(rank), m.element_bytes = static_cast<uint8_t>(sizes[type]);
  m.swizzle = static_cast<uint8_t>(swizzle), m.address = base;
  if (base % 16 || reinterpret_cast<uint64_t>(map) % 64) return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (dims[i] == 0 || dims[i] > (uint64_t{1} << 32) || box[i] == 0 || box[i] > 256 || steps[i] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    m.dims[i] = static_cast<uint32_t>(std::min<uint64_t>(dims[i], ~0u)), m.box[i] = static_cast<uint16_t>(box[i]);
    if (i > 0) {
      if (strides[i - 1] % 16 || strides[i - 1] >> 40) return CUDA_ERROR_INVALID_VALUE;
      m.strides[i - 1] = strides[i - 1];
    }
  }
  const uint32_t row = box[0] * m.element_bytes, widths[] = {1u << 20, 32, 64, 128};
  if (row % 16 || row > widths[swizzle]) return CUDA_ERROR_INVALID_VALUE;
  if (fill_kind != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) return CUDA_ERROR_NOT_SUPPORTED;
  std::memset(static_cast<void*>(map), 0, sizeof(*map));
  std::memcpy(static_cast<void*>(map), &m, sizeof(m));
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

// What nvcc's code calls.
void** __cudaRegisterFatBinary(void* wrapper) {
  return reinterpret_cast<void**>(static_cast<intptr_t>(add_library(wrapper)) + 1);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void** handle, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  add_function(static_cast<int>(reinterpret_cast<intptr_t>(handle)) - 1, host, name);
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pushed = {grid, block, shared, static_cast<cudaStream_t>(stream)};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t) {
  return launch(reinterpret_cast<const void*>(kernel), grid, block, args, shared, dim3(1, 1, 1), false);
}

cudaError_t cudaLaunchKernel(const void* f, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t) {
  return launch(f, grid, block, args, shared, dim3(1, 1, 1), false);
}
cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3 grid, dim3 block, void** args, size_t shared,
                                        cudaStream_t) {
  return launch(f, grid, block, args, shared, dim3(1, 1, 1), true);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** args) {
  dim3 cluster(1, 1, 1);
  bool cooperative = false, programmatic = false;
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    const cudaLaunchAttribute& a = c->attrs[i];
    if (a.id == cudaLaunchAttributeClusterDimension)
      cluster = dim3(a.val.clusterDim.x, a.val.clusterDim.y, a.val.clusterDim.z);
    if (a.id == cudaLaunchAttributeCooperative) cooperative = a.val.cooperative != 0;
    if (a.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      programmatic = a.val.programmaticStreamSerializationAllowed != 0;
    }
  }
  return launch(f, c->gridDim, c->blockDim, args, c->dynamicSmemBytes, cluster, cooperative, programmatic);
}

cudaError_t cudaMalloc(void** p, size_t bytes) {
  *p = bytes ? device_malloc(bytes) : nullptr;
  return result(*p || !bytes ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* p) { return result(device_free(p) ? cudaSuccess : cudaErrorInvalidValue); }
cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }
cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) { return copy(to, from, bytes); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t) {
  if (width > to_pitch || width > from_pitch) return result(cudaErrorInvalidPitchValue);
  return result(static_cast<cudaError_t>(submit([=] {
    forget_dependence();
    for (size_t i = 0; i < height; ++i) {
      std::memmove(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width);
    }
    return 0;
  })));
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return fill(to, value, bytes); }
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) { return fill(to, value, bytes); }

cudaError_t cudaGetLastError() {
  const cudaError_t status = last_error;
  last_error = cudaSuccess;
  return status;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return "no error";
    case cudaErrorLaunchFailure:
      return fault_text().c_str();
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDeviceFunction:
      return "invalid device function";
    case cudaErrorInvalidClusterSize:
      return "invalid cluster size";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNotSupported:
      return "operation not supported";
    default:
      return "an error of the CUDA runtime";
  }
}
const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }

cudaError_t cudaGetDevice(int* number) {
  *number = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int number) { return result(number == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int number) {
  if (number != 0) return result(cudaErrorInvalidDevice);
  switch (what) {
    case cudaDevAttrMultiProcessorCount:
      *value = kProcessors;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kSharedOptin;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = kSharedProcessor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 48 * 1024;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrCooperativeLaunch:
      *value = 1;
      break;
    case cudaDevAttrL2CacheSize:
      *value = 50 << 20;
      break;
    default:
      std::fprintf(stderr, "emulator: cudaDeviceGetAttribute(%d) is not known\n", static_cast<int>(what));
      return result(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute what, int value) {
  HostFunction* f = find_function(host);
  if (!f) return result(cudaErrorInvalidDeviceFunction);
  if (what == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value > kSharedOptin) return result(cudaErrorInvalidValue);
    f->dynamic_limit = value;
  } else if (what == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    f->big_clusters = value != 0;
  }
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void* host) {
  const std::lock_guard<std::recursive_mutex> lock(device);
  HostFunction* f = find_function(host);
  if (!f) return result(cudaErrorInvalidDeviceFunction);
  try {
    const Kernel& k = kernel_of(*f);
    std::memset(static_cast<void*>(a), 0, sizeof(*a));
    a->sharedSizeBytes = static_cast<size_t>(k.shared_bytes), a->localSizeBytes = static_cast<size_t>(k.local_bytes);
    a->maxThreadsPerBlock = k.max_threads ? k.max_threads : 1024;
    a->numRegs = 64, a->ptxVersion = a->binaryVersion = 90;
    a->maxDynamicSharedSizeBytes = f->dynamic_limit;
    return cudaSuccess;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "emulator: %s\n", error.what());
    return result(cudaErrorInvalidDeviceFunction);
  }
}
// Registers are not known here: the bounds are threads and shared memory.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* host, int threads, size_t shared) {
  cudaFuncAttributes a;
  const cudaError_t status = cudaFuncGetAttributes(&a, host);
  if (status != cudaSuccess) return status;
  const size_t each = shared + a.sharedSizeBytes + 1024;
  *blocks = static_cast<int>(
      std::min<size_t>({2048 / static_cast<size_t>((threads + 31) / 32 * 32), kSharedProcessor / each, 32}));
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* host, int threads,
                                                                   size_t shared, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, host, threads, shared);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
  *s = reinterpret_cast<cudaStream_t>(new char);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithFlags(s, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  delete reinterpret_cast<char*>(s);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamGetDevice(cudaStream_t, int* number) { return cudaGetDevice(number); }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = capturing() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  *e = reinterpret_cast<cudaEvent_t>(new char);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete reinterpret_cast<char*>(e);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 0.0f;
  return cudaSuccess;
}

#undef cudaGetDriverEntryPoint
#undef cudaGetDriverEntryPointByVersion
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  const bool known = std::string(name) == "cuTensorMapEncodeTiled";
  *found = known ? reinterpret_cast<void*>(encode) : nullptr;
  if (status) *status = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char* name, void** found, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* status) {
  return cudaGetDriverEntryPointByVersion(name, found, 0, flags, status);
}

}  // extern "C"
