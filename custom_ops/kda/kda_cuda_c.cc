// A plain C face of the CUDA kernels over kda.h's Params, for tests and benchmarks through ctypes.
#include <cstddef>
#include <cstdint>

#include "kda.h"

extern "C" {

// Weak: the CPU kernel's C face has the same one.
__attribute__((weak)) size_t deltafuse_kda_params_bytes() { return sizeof(deltafuse::kda::Params); }

const char* deltafuse_kda_cuda_refusal(const deltafuse::kda::Params* params, int compute_capability) {
  return deltafuse::kda::cuda_refusal(*params, compute_capability);
}

size_t deltafuse_kda_cuda_workspace_bytes(const deltafuse::kda::Params* params) {
  return deltafuse::kda::cuda_workspace_bytes(*params);
}

const char* deltafuse_kda_cuda_forward(const deltafuse::kda::Params* params, void* workspace, void* stream) {
  return deltafuse::kda::cuda_forward(*params, workspace, stream);
}

}  // extern "C"
