// NVTX ranges, from the headers alone: they look for a profiler's library when the first range is pushed.
#include "cuda_backend.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

namespace deltafuse::ep {
const char* NvtxMissing() { return ""; }
void PushNvtxRange(const char* name) { nvtxRangePushA(name); }
void PopNvtxRange() { nvtxRangePop(); }
}  // namespace deltafuse::ep
#else
namespace deltafuse::ep {
const char* NvtxMissing() { return "this build was made without NVTX's headers"; }
void PushNvtxRange(const char*) {}
void PopNvtxRange() {}
}  // namespace deltafuse::ep
#endif
