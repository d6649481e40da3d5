// CUDA errors as ORT statuses. Only for files that are compiled with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "ort.h"

namespace deltafuse::ep {

inline OrtStatus* CudaStatusOf(const Api& api, cudaError_t error, const char* call) {
  if (error == cudaSuccess) return nullptr;
  static_cast<void>(cudaGetLastError());  // so that the next call does not report this one again
  return MakeStatus(api, ORT_EP_FAIL, std::string("deltafuse: ") + call + ": " + cudaGetErrorString(error));
}

}  // namespace deltafuse::ep

#define DF_RETURN_IF_CUDA_ERROR(api, call) DF_RETURN_IF_ERROR(::deltafuse::ep::CudaStatusOf(api, call, #call))
