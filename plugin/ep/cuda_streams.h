// Callers' streams. Only for files that are compiled with CUDA.
#pragma once

#include "cuda_backend.h"

namespace deltafuse::ep {

// Waits for the streams that callers gave to sessions on this device, those excepted that are being captured. `any`:
// whether there are some.
OrtStatus* WaitForUserStreams(const Api& api, int ordinal, bool* any);

}  // namespace deltafuse::ep
