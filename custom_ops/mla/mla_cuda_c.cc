// A plain C face of the CUDA kernels over mla.h's Params, for tests and benchmarks through ctypes.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "mla.h"
#include "mla_launch.h"
#include "mla_plan_cuda.h"

using deltafuse::mla::CudaLayer;
using deltafuse::mla::Params;

extern "C" {

// Weak: the CPU kernel's C face has the same one.
__attribute__((weak)) size_t deltafuse_mla_params_bytes() { return sizeof(Params); }

const char* deltafuse_mla_cuda_refusal(const Params* params, int compute_capability) {
  return deltafuse::mla::cuda_refusal(*params, compute_capability);
}

const char* deltafuse_mla_cuda_create(const Params* params, void* stream, CudaLayer** layer) {
  return deltafuse::mla::cuda_create(*params, stream, layer);
}

void deltafuse_mla_cuda_destroy(CudaLayer* layer) { deltafuse::mla::cuda_destroy(layer); }

size_t deltafuse_mla_cuda_workspace_bytes(const CudaLayer* layer, const Params* params) {
  return deltafuse::mla::cuda_workspace_bytes(layer, *params);
}

const char* deltafuse_mla_cuda_forward(CudaLayer* layer, const Params* params, void* workspace, void* stream) {
  return deltafuse::mla::cuda_forward(layer, *params, workspace, stream);
}

// For tests: prompts with a mask by the prompt kernel, or not (mla_plan_cuda.h). Not while a call is under way.
void deltafuse_mla_cuda_masked_prompts(int on) { deltafuse::mla::host::masked_prompts = on != 0; }

// For tests and tune_mla.py: what decode does instead of what it would choose (mla_launch.h); negative: as it would.
// Not while a call is under way, and before the call's workspace is asked for. 0: there is no such choice.
int deltafuse_mla_cuda_choose(const char* name, int value) {
  deltafuse::mla::DecodeChoice& choice = deltafuse::mla::decode_choice;
  const struct {
    const char* name;
    int* value;
  } known[] = {{"grain", &choice.grain},
               {"rows", &choice.rows},
               {"section_tiles", &choice.section_tiles},
               {"chapter_tiles", &choice.chapter_tiles}};
  for (const auto& one : known) {
    if (std::strcmp(name, one.name) == 0) {
      *one.value = value;
      return 1;
    }
  }
  return 0;
}

// The attention alone, once more (mla_launch.h).
const char* deltafuse_mla_cuda_core(CudaLayer* layer, const Params* params, void* workspace, void* stream) {
  return deltafuse::mla::cuda_core(layer, *params, workspace, stream);
}

}  // extern "C"
