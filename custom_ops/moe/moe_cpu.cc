// The GroupedQMoE kernel for CPUs: checks, the choice of an instruction set, and the work's division among threads.
#include <atomic>
#include <cmath>

#include "../common/cpu_support.h"
#include "moe.h"
#include "moe_cpu_plan.h"
#include "moe_cpu_select.h"

namespace deltafuse::moe::cpu {

using deltafuse::cpu::FlushSubnormals;
using deltafuse::cpu::InstructionSet;
using deltafuse::cpu::Reason;
using deltafuse::cpu::Threads;

// GCC's own intrinsics start from a vector that they leave undefined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define DELTAFUSE_CPU_CODE "../moe/moe_cpu_code.h"
#include "../common/cpu_instruction_sets.h"

namespace {

using Task = void (*)(const Call&, int64_t, char*);

struct Kernels {
  Task tokens, logits, given_logits, gate_up, down;
  float (*shared_gate)(const Call&, int64_t, float*);
};

// See SetInstructionSet.
std::atomic<int> chosen{0};

Kernels Choose() {
  const InstructionSet best = deltafuse::cpu::BestInstructionSet(chosen.load(std::memory_order_relaxed));
#if defined(__x86_64__)
  if (best == InstructionSet::kAvx512)
    return {avx512::RunTokens, avx512::RunLogits, avx512::RunGivenLogits,
            avx512::RunGateUp, avx512::RunDown,   avx512::SharedGate};
  if (best == InstructionSet::kAvx2)
    return {avx2::RunTokens, avx2::RunLogits, avx2::RunGivenLogits, avx2::RunGateUp, avx2::RunDown, avx2::SharedGate};
#endif
  static_cast<void>(best);
  return {baseline::RunTokens, baseline::RunLogits, baseline::RunGivenLogits,
          baseline::RunGateUp, baseline::RunDown,   baseline::SharedGate};
}

// Work that several threads take from, each with its own scratch.
struct Work {
  Call call;
  Kernels kernels;
  Task task = nullptr;
  bool flush = false;
  int64_t tasks = 0;
  std::atomic<int64_t> next{0};
};

void Drain(Work& work, int64_t worker) {
  const Plan& plan = work.call.plan;
  char* scratch = work.call.workspace + plan.scratch + static_cast<size_t>(worker) * plan.worker_bytes;
  for (int64_t task = work.next++; task < work.tasks; task = work.next++) work.task(work.call, task, scratch);
}

void RunWorker(void* context, int64_t worker) {
  Work& work = *static_cast<Work*>(context);
  // The router keeps subnormal numbers: a score may be one.
  if (!work.flush) return Drain(work, worker);
  const FlushSubnormals flush;
  Drain(work, worker);
}

struct Parallel {
  ParallelFor run;
  void* user;
};

void Run(Work& work, Task task, int64_t tasks, bool flush, const Parallel& parallel) {
  work.task = task;
  work.tasks = tasks;
  work.flush = flush;
  work.next = 0;
  if (tasks == 1) return RunWorker(&work, 0);
  parallel.run(parallel.user, Min(tasks, work.call.plan.workers), RunWorker, &work);
}

// Ids and weights of one token.
void RunSelect(const Call& call, int64_t task, char* scratch) {
  const Params& p = *call.params;
  float* choice = reinterpret_cast<float*>(scratch + call.plan.choice);
  int32_t* ids = call.At<int32_t>(call.plan.ids) + task * p.top_k;
  float* weights = call.At<float>(call.plan.weights) + task * p.top_k;
  Select(p, call.At<float>(call.plan.logits) + task * p.num_experts, choice, choice + p.num_experts, ids, weights);
  const int64_t at = (call.first + task) * p.top_k;
  for (int32_t i = 0; i < p.top_k; ++i) {
    if (p.expert_ids) p.expert_ids[at + i] = ids[i];
    if (p.expert_weights) p.expert_weights[at + i] = weights[i];
  }
  if (p.shared_intermediate_size > 0)
    call.At<float>(call.plan.gates)[task] =
        call.shared_gate(call, task, reinterpret_cast<float*>(scratch + call.plan.rows));
}

// Orders the chunk's pairs by expert, and by token for each.
void Sort(Call& call) {
  const Params& p = *call.params;
  const int64_t pairs = call.tokens * p.top_k;
  int32_t* starts = call.At<int32_t>(call.plan.starts);
  int32_t* order = call.At<int32_t>(call.plan.pairs);
  int32_t* active = call.At<int32_t>(call.plan.active);
  const int32_t* ids = call.At<int32_t>(call.plan.ids);
  for (int64_t e = 0; e <= p.num_experts; ++e) starts[e] = 0;
  for (int64_t i = 0; i < pairs; ++i) ++starts[ids[i] + 1];
  call.num_active = call.num_zero = 0;
  for (int32_t e = 0; e < p.num_experts; ++e) {
    if (starts[e + 1] > 0) {
      active[call.num_active + call.num_zero] = e;
      ++(e < p.num_experts - p.zero_experts ? call.num_active : call.num_zero);
    }
    starts[e + 1] += starts[e];
  }
  for (int64_t i = 0; i < pairs; ++i) order[starts[ids[i]]++] = static_cast<int32_t>(i);
  for (int64_t e = p.num_experts; e > 0; --e) starts[e] = starts[e - 1];
  starts[0] = 0;
}

void RunChunk(Work& work, const Parallel& parallel) {
  Call& call = work.call;
  const Params& p = *call.params;
  Run(work, work.kernels.tokens, call.tokens, false, parallel);
  if (p.router_weight) {
    const int64_t tasks = Blocks(p.num_experts, kRouterBlock) * Blocks(call.tokens, kRouterTokens);
    Run(work, work.kernels.logits, tasks, false, parallel);
  } else {
    Run(work, work.kernels.given_logits, call.tokens, false, parallel);
  }
  Run(work, RunSelect, call.tokens, false, parallel);
  Sort(call);
  const int64_t routed = call.num_active * Blocks(p.intermediate_size, kRowBlock);
  const int64_t shared = Blocks(p.shared_intermediate_size, kRowBlock);
  Run(work, work.kernels.gate_up, routed + shared, true, parallel);
  Run(work, work.kernels.down, Blocks(p.hidden_size, kRowBlock), true, parallel);
}

template <typename Enum>
bool Within(Enum value, Enum last) {
  return static_cast<int32_t>(value) >= 0 && static_cast<int32_t>(value) <= static_cast<int32_t>(last);
}

bool Quantized(const Matrix& matrix) { return matrix.format != Format::kFloat && matrix.format != Format::kBFloat16; }

const char* MatrixRefusal(const char* name, const Matrix& m, int64_t cols) {
  if (!Within(m.format, Format::kBFloat16)) return Reason("%s: unknown format %d", name, static_cast<int>(m.format));
  const bool four = m.format == Format::kInt4 || m.format == Format::kUInt4;
  if (m.block_size < 0 || m.block_rows < 1)
    return Reason("%s: block_size %d, block_rows %d", name, m.block_size, m.block_rows);
  if (four && (cols % 2 || m.block_size % 2))
    return Reason("%s: rows of %lld in blocks of %d: 4-bit weights need even numbers", name,
                  static_cast<long long>(cols), m.block_size);
  return nullptr;
}

const char* MatrixOperands(const char* name, const Matrix& m) {
  if (!m.data) return Reason("%s_weight is required", name);
  if (Quantized(m) && !m.scale) return Reason("%s_scale is required", name);
  if (Quantized(m) && m.has_zero_point && !m.zero_point) return Reason("%s_zero_point is required", name);
  return nullptr;
}

// What only a call can get wrong: absent operands.
const char* OperandRefusal(const Params& p) {
  if (!p.x || !p.y) return Reason("x and y are required");
  if ((p.router_weight != nullptr) == (p.router_logits != nullptr))
    return Reason("one of router_weight and router_logits is required");
  if (const char* reason = MatrixOperands("gate_up", p.gate_up)) return reason;
  if (const char* reason = MatrixOperands("down", p.down)) return reason;
  if (p.shared_intermediate_size == 0) return nullptr;
  if (const char* reason = MatrixOperands("shared_gate_up", p.shared_gate_up)) return reason;
  return MatrixOperands("shared_down", p.shared_down);
}

constexpr size_t kAlignment = 64;

}  // namespace

// 0: the best of this processor, 1: no more than the compiler's default, 2: no more than AVX2.
void SetInstructionSet(int limit) { chosen.store(limit, std::memory_order_relaxed); }

}  // namespace deltafuse::moe::cpu

namespace deltafuse::moe {

const char* cpu_refusal(const Params& p) {
  using cpu::Reason;
  if (p.num_tokens < 0) return Reason("a negative number of tokens");
  if (p.num_experts < 1 || p.top_k < 1 || p.hidden_size < 1 || p.intermediate_size < 1 || p.n_group < 1 ||
      p.topk_group < 1 || p.group_top < 1)
    return Reason(
        "num_experts %d, top_k %d, hidden_size %d, intermediate_size %d, n_group %d, topk_group %d, group_top %d: all "
        "must be 1 or more",
        p.num_experts, p.top_k, p.hidden_size, p.intermediate_size, p.n_group, p.topk_group, p.group_top);
  if (p.shared_intermediate_size < 0) return Reason("shared_intermediate_size %d", p.shared_intermediate_size);
  if (p.zero_experts < 0 || p.zero_experts >= p.num_experts)
    return Reason("zero_experts %d of num_experts %d", p.zero_experts, p.num_experts);
  if (p.top_k > p.num_experts) return Reason("top_k %d of num_experts %d", p.top_k, p.num_experts);
  if (p.num_experts % p.n_group != 0 || p.topk_group > p.n_group || p.group_top > p.num_experts / p.n_group)
    return Reason("num_experts %d, n_group %d, topk_group %d, group_top %d", p.num_experts, p.n_group, p.topk_group,
                  p.group_top);
  if (!cpu::Within(p.dtype, DType::kBFloat16)) return Reason("element type %d", static_cast<int>(p.dtype));
  if (!cpu::Within(p.score, Score::kSoftmax) || !cpu::Within(p.activation, Activation::kRelu2) ||
      !cpu::Within(p.clamp, Clamp::kAfter))
    return Reason("an unknown score_function, activation or clamp");
  if (!std::isfinite(p.norm_eps) || !std::isfinite(p.norm_min) || !std::isfinite(p.routed_scaling_factor) ||
      !std::isfinite(p.activation_alpha) || !std::isfinite(p.up_offset))
    return Reason("norm_eps, norm_min, routed_scaling_factor, activation_alpha or up_offset is not finite");
  if (p.norm_min < 0 || (p.activation != Activation::kSilu && p.activation_alpha != 1.0f) ||
      (!p.gated && p.up_offset != 0.0f))
    return Reason("norm_min %g, activation_alpha %g, up_offset %g, gated %d", static_cast<double>(p.norm_min),
                  static_cast<double>(p.activation_alpha), static_cast<double>(p.up_offset), p.gated);
  if (p.clamp != Clamp::kNone && !(p.gated && p.gate_limit > 0 && p.up_limit > 0))
    return Reason("gate_limit %g, up_limit %g, gated %d", static_cast<double>(p.gate_limit),
                  static_cast<double>(p.up_limit), p.gated);
  if (const char* reason = cpu::MatrixRefusal("gate_up_weight", p.gate_up, p.hidden_size)) return reason;
  if (const char* reason = cpu::MatrixRefusal("down_weight", p.down, p.intermediate_size)) return reason;
  if (p.shared_intermediate_size == 0) return nullptr;
  if (const char* reason = cpu::MatrixRefusal("shared_gate_up_weight", p.shared_gate_up, p.hidden_size)) return reason;
  return cpu::MatrixRefusal("shared_down_weight", p.shared_down, p.shared_intermediate_size);
}

size_t cpu_workspace_bytes(const Params& p) { return cpu::MakePlan(p, cpu::Threads()).bytes + cpu::kAlignment; }

const char* cpu_forward(const Params& p, void* workspace, ParallelFor parallel, void* user) {
  if (const char* reason = cpu_refusal(p)) return reason;
  if (p.num_tokens == 0) return nullptr;
  if (const char* reason = cpu::OperandRefusal(p)) return reason;
  if (workspace == nullptr) return cpu::Reason("no workspace");

  cpu::Work work;
  work.kernels = cpu::Choose();
  work.call.params = &p;
  work.call.plan = cpu::MakePlan(p, cpu::Threads());
  work.call.shared_gate = work.kernels.shared_gate;
  const uintptr_t address = reinterpret_cast<uintptr_t>(workspace);
  work.call.workspace = reinterpret_cast<char*>((address + cpu::kAlignment - 1) / cpu::kAlignment * cpu::kAlignment);
  for (int64_t first = 0; first < p.num_tokens; first += work.call.plan.chunk) {
    work.call.first = first;
    work.call.tokens = cpu::Min(work.call.plan.chunk, p.num_tokens - first);
    cpu::RunChunk(work, {parallel, user});
  }
  return nullptr;
}

}  // namespace deltafuse::moe
