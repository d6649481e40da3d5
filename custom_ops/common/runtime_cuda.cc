// Which CUDA runtime is linked into the library. Only a CUDA build has this function.
#include <cuda_runtime_api.h>

// 13020 for CUDA 13.2.
extern "C" __attribute__((visibility("default"))) int deltafuse_cuda_runtime_version() { return CUDART_VERSION; }
