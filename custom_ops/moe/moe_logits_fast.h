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
  uint16_t* few;           // [tokens, kFew] which experts need it, the other way round; or null
  uint32_t* barrier;       // of the selection: becomes zero
  int32_t tiles, stages, terms;
  float gamma;
};

// A token's experts in `few`, kNoExpert after them; in two more places (low half first) which groups stay for certain.
// More of them, or a token that needs care: the first is kAnyExpert.
constexpr int kFew = 32, kFewExperts = kFew - 2;
constexpr uint16_t kNoExpert = 0xffff, kAnyExpert = 0xfffe;

bool logits_fast(const RouterArgs& args, const DeviceInfo& device);
// Sizes of the parts follow from it; pointers are null.
FastLogits fast_form(const RouterArgs& args);
inline int64_t fast_weight_bytes(const FastLogits& f) { return int64_t(f.tiles) * f.stages * f.terms * 32768; }
// float8: rows that become float8 on the way, with a scale each; or none.
cudaError_t launch_logits_fast(const RouterArgs& args, const FastLogits& f, const Float8Args& float8,
                               const DeviceInfo& device, cudaStream_t stream);
// The steps of it.
cudaError_t launch_split(const RouterArgs& args, const FastLogits& f, const Float8Args& float8,
                         const DeviceInfo& device, cudaStream_t stream);
cudaError_t launch_sums_sm90(const RouterArgs& args, const FastLogits& f, const DeviceInfo& device,
                             cudaStream_t stream);
cudaError_t launch_doubts(const RouterArgs& args, const FastLogits& f, const DeviceInfo& device, cudaStream_t stream);
cudaError_t launch_exact(const RouterArgs& args, const FastLogits& f, const DeviceInfo& device, cudaStream_t stream);

}  // namespace deltafuse::moe
