// A plain C face of the CUDA kernels over moe.h's Params, for tests and benchmarks through ctypes.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "moe.h"
#include "moe_decode.h"
#include "moe_launch.h"

extern "C" {

// Weak: the CPU kernel's C face has the same one.
__attribute__((weak)) size_t deltafuse_moe_params_bytes() { return sizeof(deltafuse::moe::Params); }

const char* deltafuse_moe_cuda_refusal(const deltafuse::moe::Params* params, int compute_capability) {
  return deltafuse::moe::cuda_refusal(*params, compute_capability);
}

const char* deltafuse_moe_cuda_create(const deltafuse::moe::Params* params, void* stream,
                                      deltafuse::moe::CudaLayer** layer) {
  return deltafuse::moe::cuda_create(*params, stream, layer);
}

const char* deltafuse_moe_cuda_pack(deltafuse::moe::CudaLayer* layer, const deltafuse::moe::Params* params,
                                    void* stream) {
  return deltafuse::moe::cuda_pack(layer, *params, stream);
}

void deltafuse_moe_cuda_destroy(deltafuse::moe::CudaLayer* layer) { deltafuse::moe::cuda_destroy(layer); }

size_t deltafuse_moe_cuda_layer_bytes(const deltafuse::moe::Params* params) {
  return deltafuse::moe::cuda_layer_bytes(*params);
}

size_t deltafuse_moe_cuda_workspace_bytes(const deltafuse::moe::CudaLayer* layer,
                                          const deltafuse::moe::Params* params) {
  return deltafuse::moe::cuda_workspace_bytes(layer, *params);
}

const char* deltafuse_moe_cuda_forward(deltafuse::moe::CudaLayer* layer, const deltafuse::moe::Params* params,
                                       void* workspace, void* stream) {
  return deltafuse::moe::cuda_forward(layer, *params, workspace, stream);
}

// The router alone: steps 1 logits, 2 selection, 4 the first pass of fast logits.
size_t deltafuse_moe_cuda_route_workspace_bytes(const deltafuse::moe::Params* params) {
  return deltafuse::moe::route_workspace_bytes(*params);
}
const char* deltafuse_moe_cuda_route(const deltafuse::moe::Params* params, int steps, void* workspace, void* stream) {
  return deltafuse::moe::cuda_route(*params, steps, workspace, stream);
}

// How prompts are driven (see PromptTuning), and with "decode_" before the name calls of a few tokens (DecodeTuning):
// 0, or 1 if there is no such thing to tune. "defaults": everything as it was at the start.
int deltafuse_moe_cuda_tune(const char* name, int value) {
  if (std::strcmp(name, "defaults") == 0) {
    deltafuse::moe::prompt_tuning() = {}, deltafuse::moe::decode_tuning() = {};
    return 0;
  }
  if (std::strncmp(name, "decode_", 7) == 0) return deltafuse::moe::tune_decode(name + 7, value) ? 0 : 1;
  deltafuse::moe::PromptTuning& tuning = deltafuse::moe::prompt_tuning();
  const struct {
    const char* name;
    int32_t* value;
  } known[] = {{"tokens", &tuning.tokens},   {"stages", &tuning.stages},
               {"dynamic", &tuning.dynamic}, {"keep_weights", &tuning.keep_weights},
               {"few", &tuning.few},         {"merge", &tuning.merge},
               {"by_size", &tuning.by_size}, {"fast_logits", &tuning.fast_logits}};
  for (const auto& one : known) {
    if (std::strcmp(name, one.name) == 0) {
      *one.value = value;
      return 0;
    }
  }
  return 1;
}

}  // extern "C"
