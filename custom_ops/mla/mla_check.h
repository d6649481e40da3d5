// Checks of a call that hold for every kernel (spec.py's MlaConfig.check), and of the values that a host can read.
#pragma once

#include "mla.h"

namespace deltafuse::mla {

// Why the op does not define this geometry and these attributes, or null. Pointers may be null. The text is valid until
// the thread's next call.
const char* geometry_refusal(const Params& params);

// What only a call can get wrong: absent operands, and on the host positions, lengths and block ids. Null if all is
// well. Reads the arrays.
const char* host_value_refusal(const Params& params);

}  // namespace deltafuse::mla
