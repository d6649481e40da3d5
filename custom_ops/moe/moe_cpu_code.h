// Everything that is compiled for each instruction set; see cpu_instruction_sets.h.
#include "../common/cpu_simd.h"
// after the vectors
#include "moe_cpu_weights.h"
// after the weights
#include "moe_cpu_experts.h"
#include "moe_cpu_router.h"
