// The LatentAttention kernel for CPUs: the choice of an instruction set, and the order of a call's steps.
#include <atomic>
#include <cstring>

#include "../common/cpu_support.h"
#include "mla.h"
#include "mla_check.h"
#include "mla_cpu_plan.h"

namespace deltafuse::mla::cpu {

using deltafuse::cpu::FlushSubnormals;
using deltafuse::cpu::InstructionSet;
using deltafuse::cpu::Reason;
using deltafuse::cpu::Threads;

#define DELTAFUSE_CPU_CODE "../mla/mla_cpu_code.h"
#include "../common/cpu_instruction_sets.h"

namespace {

using Step = void (*)(const Call&, int64_t, float*);

struct Kernels {
  Step prepare, absorb, absorbed, project, expand, expanded;
};

// See SetInstructionSet.
std::atomic<int> chosen{0};

Kernels Choose() {
  const InstructionSet best = deltafuse::cpu::BestInstructionSet(chosen.load(std::memory_order_relaxed));
#if defined(__x86_64__)
  if (best == InstructionSet::kAvx512) {
    using namespace avx512;
    return {RunPrepare, RunAbsorb, RunAbsorbed, RunProject, RunExpand, RunExpanded};
  }
  if (best == InstructionSet::kAvx2) {
    using namespace avx2;
    return {RunPrepare, RunAbsorb, RunAbsorbed, RunProject, RunExpand, RunExpanded};
  }
#endif
  static_cast<void>(best);
  using namespace baseline;
  return {RunPrepare, RunAbsorb, RunAbsorbed, RunProject, RunExpand, RunExpanded};
}

// The values of the 256 float8 e4m3fn codes.
struct Float8Table {
  float values[256];
  Float8Table() {
    for (int code = 0; code < 256; ++code) {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      float value = exponent == 0 ? static_cast<float>(mantissa) / 512.0f : static_cast<float>(8 + mantissa) / 8.0f;
      for (int i = 7; i < exponent; ++i) value *= 2.0f;
      for (int i = exponent == 0 ? 7 : exponent; i < 7; ++i) value /= 2.0f;
      if ((code & 127) == 127) value = __builtin_nanf("");
      values[code] = code & 128 ? -value : value;
    }
  }
};

// One step of a call that several threads take tasks from, each with its own scratch.
struct Work {
  const Call* call = nullptr;
  Step step = nullptr;
  int64_t tasks = 0;
  std::atomic<int64_t> next{0};
};

void RunTasks(void* context, int64_t worker) {
  Work& work = *static_cast<Work*>(context);
  const FlushSubnormals flush;
  const Plan& plan = work.call->plan;
  float* scratch = work.call->base + plan.scratch + static_cast<size_t>(worker) * plan.scratch_floats;
  for (int64_t task = work.next++; task < work.tasks; task = work.next++) work.step(*work.call, task, scratch);
}

// A cache that goes into another buffer: `pieces` runs of `bytes`.
struct Copy {
  const char* from;
  char* to;
  int64_t pieces, bytes, from_step, to_step;
};

struct Copies {
  Copy list[3];
  int count = 0;
  int64_t tasks = 0;
};

constexpr int64_t kCopyBytes = 1 << 20;

int64_t TasksOf(const Copy& copy) { return copy.pieces * ((copy.bytes + kCopyBytes - 1) / kCopyBytes); }

// What is in the past goes to the present, unless it is the same buffer. `pieces` caches, `row` bytes a token.
void AddCopy(const Params& p, const void* past, void* present, int64_t pieces, int64_t row, Copies* copies) {
  if (past == nullptr || present == nullptr || past == present) return;
  Copy copy = {static_cast<const char*>(past), static_cast<char*>(present), pieces, p.past_len * row, 0, 0};
  if (Paged(p)) {
    copy.pieces = 1;
    copy.bytes = p.num_blocks * p.block_size * row;
  }
  copy.from_step = copy.bytes;
  copy.to_step = p.static_cache ? copy.bytes : (p.past_len + p.seq_len) * row;
  copies->list[copies->count++] = copy;
  copies->tasks += TasksOf(copy);
}

void RunCopy(void* context, int64_t task) {
  const Copies& copies = *static_cast<const Copies*>(context);
  for (int i = 0; i < copies.count; ++i) {
    const Copy& copy = copies.list[i];
    const int64_t tasks = TasksOf(copy);
    if (task >= tasks) {
      task -= tasks;
      continue;
    }
    const int64_t parts = tasks / copy.pieces, piece = task / parts, start = task % parts * kCopyBytes;
    std::memcpy(copy.to + piece * copy.to_step + start, copy.from + piece * copy.from_step + start,
                static_cast<size_t>(Min(kCopyBytes, copy.bytes - start)));
    return;
  }
}

Copies PastCopies(const Params& p) {
  const int64_t item = p.dtype == DType::kFloat32 ? 4 : 2, rank = p.kv_lora_rank, rope = p.qk_rope_head_dim;
  const int64_t groups = (rank + 127) / 128;
  Copies copies;
  if (p.cache == Cache::kLatent) {
    const int64_t row = p.packed_cache ? (rank + rope) * item : p.cache_type == CacheType::kSame ? rank * item : rank;
    AddCopy(p, p.past_latent, p.present_latent, p.batch, row, &copies);
    AddCopy(p, p.past_k_rope, p.present_k_rope, p.batch, rope * item, &copies);
    if (p.cache_type == CacheType::kFloat8) {
      AddCopy(p, p.past_latent_scale, p.present_latent_scale, p.batch, groups * 4, &copies);
    }
  } else if (p.cache == Cache::kExpanded) {
    const int64_t heads = p.batch * p.num_heads;
    AddCopy(p, p.past_key, p.present_key, heads, (p.qk_nope_head_dim + rope) * item, &copies);
    AddCopy(p, p.past_value, p.present_value, heads, p.v_head_dim * item, &copies);
  }
  return copies;
}

// A cache that grows has another shape: its new one cannot lie where the old one is read.
bool GrowsInPlace(const Params& p) {
  if (p.static_cache || p.past_len == 0) return false;
  const auto same = [](const void* past, const void* present) { return past != nullptr && past == present; };
  return same(p.past_latent, p.present_latent) || same(p.past_k_rope, p.present_k_rope) ||
         same(p.past_key, p.present_key) || same(p.past_value, p.present_value);
}

constexpr size_t kAlignment = 64;

}  // namespace

// 0: the best of this processor, 1: no more than the compiler's default, 2: no more than AVX2.
void SetInstructionSet(int limit) { chosen.store(limit, std::memory_order_relaxed); }

}  // namespace deltafuse::mla::cpu

namespace deltafuse::mla {

const char* cpu_refusal(const Params& params) { return geometry_refusal(params); }

size_t cpu_workspace_bytes(const Params& params) {
  return cpu::MakePlan(params, cpu::Threads()).floats * sizeof(float) + cpu::kAlignment;
}

const char* cpu_forward(const Params& p, void* workspace, ParallelFor parallel, void* user) {
  if (const char* reason = cpu_refusal(p)) return reason;
  if (const char* reason = host_value_refusal(p)) return reason;
  if (cpu::GrowsInPlace(p)) return cpu::Reason("a cache without cache_lengths grows: its present needs another buffer");

  cpu::Copies copies = cpu::PastCopies(p);
  if (copies.tasks > 0) parallel(user, copies.tasks, cpu::RunCopy, &copies);
  if (p.batch == 0 || p.seq_len == 0) return nullptr;
  if (workspace == nullptr) return cpu::Reason("no workspace");

  static const cpu::Float8Table float8;
  const cpu::Kernels kernels = cpu::Choose();
  cpu::Call call;
  call.params = &p;
  call.plan = cpu::MakePlan(p, cpu::Threads());
  call.float8 = float8.values;
  const uintptr_t address = reinterpret_cast<uintptr_t>(workspace);
  call.base = reinterpret_cast<float*>((address + cpu::kAlignment - 1) / cpu::kAlignment * cpu::kAlignment);
  const cpu::Plan& plan = call.plan;

  const auto run = [&](cpu::Step step, int64_t tasks) {
    cpu::Work work;
    work.call = &call;
    work.step = step;
    work.tasks = tasks;
    parallel(user, cpu::Min(plan.workers, tasks), cpu::RunTasks, &work);
  };
  const int64_t tokens = p.batch * p.seq_len, tiles = (tokens + cpu::kTile - 1) / cpu::kTile;
  run(kernels.prepare, (tokens + cpu::kPrepareTokens - 1) / cpu::kPrepareTokens);
  if (plan.absorbed) {
    run(kernels.absorb, tiles * p.num_heads);
    run(kernels.absorbed, p.batch * plan.tiles * plan.parts);
    run(kernels.project, tiles * p.num_heads);
    return nullptr;
  }
  int64_t most = 0;
  for (int64_t b = 0; b < p.batch; ++b) most = cpu::Max(most, cpu::There(p, b) + p.seq_len);
  const int64_t blocks = (plan.fresh_keys + cpu::kBlock - 1) / cpu::kBlock;
  for (; call.first_head < p.num_heads; call.first_head += plan.heads) {
    call.heads = cpu::Min(plan.heads, p.num_heads - call.first_head);
    for (call.first_key = 0; call.first_key < most; call.first_key += plan.chunk) {
      call.last_chunk = call.first_key + plan.chunk >= most;
      run(kernels.expand, p.batch * call.heads * blocks);
      run(kernels.expanded, p.batch * call.heads * plan.tiles);
    }
  }
  return nullptr;
}

}  // namespace deltafuse::mla
