// Router logits of prompts in two passes: the tensor cores' sums, then float64 for the logits that decide.
#pragma once

#include "moe_launch.h"

namespace deltafuse::moe {

// What the passes leave each other. Sums of the first pass are off by at most `gamma` |x| |w| (see NOTES.md).
struct FastLogits {
  unsigned char* weights;  // the router's, as one or two bfloat16 terms: [tiles, stages, terms, 4 units of 64 rows]
  float* norms;            // [E], from above
  int32_t* counts;         // [E] tokens that need an expert's logit in float64
  int32_t* lists;          // [E, tokens] which
  int32_t tiles, stages, terms;
  float gamma;
};

bool logits_fast(const RouterArgs& args, const DeviceInfo& device);
// Sizes of the parts follow from it; pointers are null.
FastLogits fast_form(const RouterArgs& args);
inline int64_t fast_weight_bytes(const FastLogits& f) { return int64_t(f.tiles) * f.stages * f.terms * 32768; }
cudaError_t launch_logits_fast(const RouterArgs& args, const FastLogits& f, const DeviceInfo& device,
                               cudaStream_t stream);
// The steps of it.
cudaError_t launch_split(const RouterArgs& args, const FastLogits& f, cudaStream_t stream);
cudaError_t launch_sums_sm90(const RouterArgs& args, const FastLogits& f, const DeviceInfo& device,
                             cudaStream_t stream);
cudaError_t launch_doubts(const RouterArgs& args, const FastLogits& f, cudaStream_t stream);
cudaError_t launch_exact(const RouterArgs& args, const FastLogits& f, cudaStream_t stream);

}  // namespace deltafuse::moe
