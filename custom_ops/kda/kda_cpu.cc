// The KDA kernel for CPUs: checks, the choice of an instruction set, and the work's division among threads.
#include <atomic>
#include <cmath>

#include "../common/cpu_support.h"
#include "kda.h"
#include "kda_cpu_plan.h"

namespace deltafuse::kda::cpu {

using deltafuse::cpu::FlushSubnormals;
using deltafuse::cpu::InstructionSet;
using deltafuse::cpu::Reason;
using deltafuse::cpu::Threads;

#define DELTAFUSE_CPU_CODE "../kda/kda_cpu_code.h"
#include "../common/cpu_instruction_sets.h"

namespace {

struct Kernels {
  void (*task)(const Call&, int64_t, float*);
  void (*late_norm)(const Call&, int64_t, float*);
};

// See SetInstructionSet.
std::atomic<int> chosen{0};

Kernels Choose() {
  const InstructionSet best = deltafuse::cpu::BestInstructionSet(chosen.load(std::memory_order_relaxed));
#if defined(__x86_64__)
  if (best == InstructionSet::kAvx512) return {avx512::RunTask, avx512::RunLateNorm};
  if (best == InstructionSet::kAvx2) return {avx2::RunTask, avx2::RunLateNorm};
#endif
  static_cast<void>(best);
  return {baseline::RunTask, baseline::RunLateNorm};
}

int64_t Channels(const Params& p) {
  return 2 * static_cast<int64_t>(p.num_heads) * p.head_dim + static_cast<int64_t>(p.num_v_heads) * p.head_v_dim;
}

template <typename Enum>
bool Within(Enum value, Enum last) {
  return static_cast<int32_t>(value) >= 0 && static_cast<int32_t>(value) <= static_cast<int32_t>(last);
}

// What only a call can get wrong: absent operands, and lengths that do not add up.
const char* OperandRefusal(const Params& p) {
  const int64_t rows = p.batch * p.seq_len;
  if (rows > 0 && !(p.q && p.k && p.v && p.g && p.beta && p.o)) return Reason("q, k, v, g, beta and o are required");
  if (p.gate_activation != GateActivation::kNone && p.A_log == nullptr) return Reason("gate_activation needs A_log");
  if (p.conv_width > 0 && p.conv_weight == nullptr) return Reason("conv_width %d without conv_weight", p.conv_width);
  if ((p.output_gate != OutputGate::kNone) != (p.gate != nullptr) && rows > 0) {
    return Reason("gate and output_gate go together");
  }
  if (p.cu_seqlens == nullptr) {
    if (p.num_seqs != p.batch)
      return Reason("%lld sequences in a batch of %lld", static_cast<long long>(p.num_seqs),
                    static_cast<long long>(p.batch));
    return nullptr;
  }
  if (p.batch != 1) return Reason("cu_seqlens with a batch of %lld: expected 1", static_cast<long long>(p.batch));
  int64_t end = 0;
  for (int64_t n = 0; n < p.num_seqs; ++n) {
    int64_t start = 0, length = 0;
    Sequence(p, n, &start, &length);
    if (start != end || length < 0) {
      return Reason("cu_seqlens must start at 0 and never fall: sequence %lld starts at %lld and has %lld tokens",
                    static_cast<long long>(n), static_cast<long long>(start), static_cast<long long>(length));
    }
    end = start + length;
  }
  if (end != p.seq_len) {
    return Reason("cu_seqlens end at %lld, but there are %lld tokens", static_cast<long long>(end),
                  static_cast<long long>(p.seq_len));
  }
  return nullptr;
}

// The last conv_state_width columns of past and inputs, of one sequence. Copies elements as they are. In place, column
// j is written after every column from j on was read.
template <typename Element>
void SaveConvolution(const Params& p, int64_t sequence) {
  int64_t row = 0, tokens = 0;
  Sequence(p, sequence, &row, &tokens);
  const int64_t channels = Channels(p), keys = static_cast<int64_t>(p.num_heads) * p.head_dim;
  const int64_t columns = p.conv_state_width;
  const Element* past = static_cast<const Element*>(p.conv_state);
  Element* to = static_cast<Element*>(p.present_conv_state);
  if (past) past += sequence * channels * columns;
  to += sequence * channels * columns;
  for (int64_t j = 0; j < columns; ++j) {
    const int64_t at = j + tokens;  // in past and inputs together
    for (int64_t c = 0; c < channels; ++c) {
      Element value{};
      if (at < columns) {
        if (past) value = past[c * columns + at];
      } else {
        const int64_t token = row + at - columns;
        if (c < keys) {
          value = static_cast<const Element*>(p.q)[token * p.q_row_stride + c];
        } else if (c < 2 * keys) {
          value = static_cast<const Element*>(p.k)[token * p.k_row_stride + c - keys];
        } else {
          value = static_cast<const Element*>(p.v)[token * p.v_row_stride + c - 2 * keys];
        }
      }
      to[c * columns + j] = value;
    }
  }
}

// Work that several threads take from, each with its own scratch.
struct Work {
  Call call;
  Kernels kernels;
  float* scratch = nullptr;
  std::atomic<int64_t> next{0};
};

void RunTasks(void* context, int64_t worker) {
  Work& work = *static_cast<Work*>(context);
  const FlushSubnormals flush;
  float* scratch = work.scratch + static_cast<size_t>(worker) * work.call.plan.floats;
  for (int64_t task = work.next++; task < work.call.plan.tasks; task = work.next++) {
    work.kernels.task(work.call, task, scratch);
  }
}

void RunNorms(void* context, int64_t worker) {
  Work& work = *static_cast<Work*>(context);
  const FlushSubnormals flush;
  const Params& p = *work.call.params;
  const int64_t blocks = (p.batch * p.seq_len + kNormRows - 1) / kNormRows;
  float* scratch = work.scratch + static_cast<size_t>(worker) * work.call.plan.floats;
  for (int64_t block = work.next++; block < blocks; block = work.next++) {
    work.kernels.late_norm(work.call, block, scratch);
  }
}

void SaveConvolutions(void* context, int64_t sequence) {
  const Params& p = *static_cast<const Params*>(context);
  if (p.dtype == DType::kFloat32) {
    SaveConvolution<uint32_t>(p, sequence);
  } else {
    SaveConvolution<uint16_t>(p, sequence);
  }
}

constexpr size_t kAlignment = 64;

}  // namespace

// 0: the best of this processor, 1: no more than the compiler's default, 2: no more than AVX2.
void SetInstructionSet(int limit) { chosen.store(limit, std::memory_order_relaxed); }

}  // namespace deltafuse::kda::cpu

namespace deltafuse::kda {

const char* cpu_refusal(const Params& p) {
  using cpu::Reason;
  if (p.batch < 0 || p.seq_len < 0 || p.num_seqs < 0) return Reason("a negative size");
  if (p.num_heads < 1 || p.num_v_heads < 1 || p.head_dim < 1 || p.head_v_dim < 1) {
    return Reason("num_heads %d, num_v_heads %d, head_dim %d, head_v_dim %d: all must be 1 or more", p.num_heads,
                  p.num_v_heads, p.head_dim, p.head_v_dim);
  }
  if (p.num_v_heads % p.num_heads != 0) {
    return Reason("num_v_heads %d is not a multiple of num_heads %d", p.num_v_heads, p.num_heads);
  }
  if (!cpu::Within(p.dtype, DType::kBFloat16) || !cpu::Within(p.state_dtype, DType::kBFloat16)) {
    return Reason("element types %d and %d: the kernel takes float32, float16 and bfloat16", static_cast<int>(p.dtype),
                  static_cast<int>(p.state_dtype));
  }
  if (!cpu::Within(p.qk_l2norm, L2Norm::kMax) || !cpu::Within(p.gate_activation, GateActivation::kSigmoid) ||
      !cpu::Within(p.output_gate, OutputGate::kSilu)) {
    return Reason("an unknown qk_l2norm, gate_activation or output_gate");
  }
  if (!std::isfinite(p.scale)) return Reason("scale is not finite");
  if (p.gate_activation == GateActivation::kSigmoid && !(p.lower_bound < 0)) {
    return Reason("lower_bound %g: the log decay must be negative", static_cast<double>(p.lower_bound));
  }
  if (p.conv_width < 0 || p.conv_width > cpu::kMaxConvWidth) {
    return Reason("conv_width %d: expected 1 to %d, or 0 for none", p.conv_width, cpu::kMaxConvWidth);
  }
  if (p.conv_width == 0 && (p.conv_silu || p.conv_bias || p.conv_state || p.present_conv_state)) {
    return Reason("conv_bias, conv_state or conv_activation without a conv_weight");
  }
  if (p.conv_width > 0 && p.conv_state_width != 0 && p.conv_state_width != p.conv_width - 1 &&
      p.conv_state_width != p.conv_width) {
    return Reason("conv_state has %d columns: expected %d or %d", p.conv_state_width, p.conv_width - 1, p.conv_width);
  }
  if ((p.conv_state || p.present_conv_state) && p.conv_state_width < 1) {
    return Reason("conv_state or present_conv_state without columns");
  }
  return nullptr;
}

size_t cpu_workspace_bytes(const Params& p) {
  const cpu::Plan plan = cpu::MakePlan(p, cpu::Threads());
  size_t floats = static_cast<size_t>(plan.workers) * plan.floats;
  if (plan.late_norm) floats += static_cast<size_t>(p.batch * p.seq_len * p.num_v_heads) * p.head_v_dim;
  return floats * sizeof(float) + cpu::kAlignment;
}

const char* cpu_forward(const Params& p, void* workspace, ParallelFor parallel, void* user) {
  if (const char* reason = cpu_refusal(p)) return reason;
  if (const char* reason = cpu::OperandRefusal(p)) return reason;
  if (p.num_seqs == 0) return nullptr;
  if (workspace == nullptr) return cpu::Reason("no workspace");

  cpu::Work work;
  work.call.params = &p;
  work.call.plan = cpu::MakePlan(p, cpu::Threads());
  work.kernels = cpu::Choose();
  const uintptr_t address = reinterpret_cast<uintptr_t>(workspace);
  const uintptr_t aligned = (address + cpu::kAlignment - 1) / cpu::kAlignment * cpu::kAlignment;
  work.scratch = reinterpret_cast<float*>(aligned);
  work.call.late = work.scratch + static_cast<size_t>(work.call.plan.workers) * work.call.plan.floats;

  parallel(user, work.call.plan.workers, cpu::RunTasks, &work);
  if (work.call.plan.late_norm) {
    work.next = 0;
    parallel(user, work.call.plan.workers, cpu::RunNorms, &work);
  }
  // after all tasks: it may replace the conv_state that they read
  if (p.present_conv_state) {
    parallel(user, p.num_seqs, cpu::SaveConvolutions, const_cast<Params*>(&p));
  }
  return nullptr;
}

}  // namespace deltafuse::kda
