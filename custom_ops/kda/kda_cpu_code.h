// The CPU kernel's vector code, for one instruction set: see ../common/cpu_instruction_sets.h.
#include "../common/cpu_simd.h"
// after the vectors
#include "kda_cpu_chunk.h"
// after the recurrence
#include "kda_cpu_task.h"
