// The CPU kernel's vector code, for one instruction set: see ../common/cpu_instruction_sets.h.
#include "../common/cpu_simd.h"
// after the vectors
#include "mla_cpu_gemm.h"
#include "mla_cpu_rows.h"
// after rows and products
#include "mla_cpu_attend.h"
// after the attention
#include "mla_cpu_tasks.h"
