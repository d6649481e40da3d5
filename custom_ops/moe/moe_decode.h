// Calls of a few tokens: what their three kernels share with the dispatch. See NOTES.md.
#pragma once

#include "moe_dependent.h"

namespace deltafuse::moe {

constexpr int kDecodeTokens = 32;  // of a call at most; of more: prompts
constexpr int kDecodePairs = 512;  // token-expert pairs of a decode call
constexpr int kManyBlocks = 320;   // of the second product, several tokens, at most
constexpr int kScored = 512;       // experts of a token that a warp chooses from, at most (see store_scored)

// Calls of more tokens are faster in the prompts' kernels (NOTES.md has the times).
constexpr int decode_tokens(Pack pack) { return pack == Pack::kInt4 || pack == Pack::kInt8 ? kDecodeTokens : 8; }

// How the kernels are driven; results differ in rounding at most.
struct DecodeTuning {
  int32_t tokens = -1;           // calls of more are prompts; -1: see decode_tokens
  int32_t first_threads = 512;   // of a block of the first product: 256 or 512
  int32_t first_blocks = 0;      // a multiprocessor: 0: one for one token, else two where they fit
  int32_t split = 2;             // warps that share 16 rows: 1, 2, 4, 8
  int32_t second_threads = 256;  // of a block of the second product, one token: 64 to 256
  int32_t many_threads = 384;    // the same, more tokens
  int32_t dependent = 1;         // a kernel starts while the one before runs
  int32_t prefetch = 3;          // weights that go to the L2 early: 1 the router's, 2 the shared expert's
};
DecodeTuning& decode_tuning();                  // the process's
bool tune_decode(const char* name, int value);  // false: no such thing, or no such value

// Tokens as the right operand of the first product, rows of 2 * cols bytes. Integer weights: each number is two int8
// digits, 256 h + l, times a scale of its 128 columns (see digit_at); else T in the order of operand_slot.
struct Operand {
  void* data = nullptr;
  float* scales = nullptr;  // integer weights: [N, cols / 128]
  float* sums = nullptr;    // with zero points: [N, cols / 32], what 32 columns add up to
  int32_t cols = 0;         // a multiple of 128
  Pack pack = Pack::kPlain;
  __host__ __device__ bool digits() const { return pack == Pack::kInt4 || pack == Pack::kInt8; }
};

// Quotients by a number d that is known when the kernel is launched, of n below 2^32 / d.
struct Divider {
  uint32_t divisor = 1, magic = 0;  // magic 0: by 1
  Divider() = default;
  explicit Divider(int d) : divisor(d), magic(d == 1 ? 0 : static_cast<uint32_t>((uint64_t(1) << 32) / d) + 1) {}
#if defined(__CUDACC__)
  __device__ __forceinline__ int operator()(int n) const {
    return static_cast<int>(magic ? __umulhi(static_cast<uint32_t>(n), magic) : static_cast<uint32_t>(n));
  }
#endif
};

// One token's experts for its choice by a block: groups, or runs of experts where all groups stay.
constexpr int kParts = 8, kPartEach = 4;  // at most: parts, experts of a lane

struct ExpertParts {
  int count, size, each;  // parts, experts of each, of each lane
  int stay;               // as many of them stay
  ExpertParts() = default;
  __host__ __device__ explicit ExpertParts(const RouterArgs& a) {
    const bool grouped = a.topk_group < a.n_group;
    count = grouped ? a.n_group : kParts, stay = grouped ? a.topk_group : count;
    size = (a.experts + count - 1) / count, each = (size + 31) / 32;
  }
};
__host__ __device__ inline bool chooses_by_parts(const RouterArgs& a) {
  if (a.tokens != 1 || a.softmax || a.experts > kScored) return false;
  const ExpertParts parts(a);
  const bool grouped = a.topk_group < a.n_group;
  return parts.count <= kParts && parts.each <= kPartEach && parts.stay * 2 >= a.top_k &&
         (parts.count - 1) * parts.size + 2 <= a.experts && (!grouped || (a.group_top <= 2 && parts.size >= 2));
}

struct DecodeArgs {
  RouterArgs router;
  ExpertParts choice;                                 // where `polled`
  Packed gate_up, down, shared_gate_up, shared_down;  // shared: count 0 where there is none
  Activity activity;
  const void* shared_gate;  // [D] or null
  DType shared_gate_type;
  Operand x, shared_x;  // for gate_up; for shared_gate_up, data null where x serves
  float* gates;         // [N] sigmoid(shared_gate x)
  float* scored;        // [N, 2, kScored] (see store_scored) where `each`
  int32_t each;         // experts a lane chooses from; 0: the choice is made from logits
  int32_t polled;       // one token: a block chooses, scores and keys lie by expert; keys that are not zero are there
  int32_t one;          // the second product takes one token's activations as a whole
  int32_t* routed;     // how many experts are used; which [pairs]; the place of each pair's there [pairs]; `one`: which
                       // and 1 more, each of them 0 until it is there
  int32_t* flags;      // [N / 8 rounded up, kManyBlocks] the sums of a block are there
  float* parts;        // [the same, 128] sums of a slab that the next block goes on with
  int32_t flag_count;  // 0: one token
  void* h;             // [pairs + tokens, 2 * h_stride bytes] right operands of the second product
  int32_t h_stride, has_scales, has_sums;  // elements; of h
  void* y;
  float *h_scales, *h_sums;  // [pairs + tokens, h_stride / 8] of 8 channels (see group_at), where down's weights are
                             // integers: what digits count; with zero points, what the channels add up to
  Divider by_slabs, by_shared_slabs, by_top_k, by_stages;  // slabs of 16 rows of gate_up, of shared_gate_up; of down
  DecodeTuning tuning;
};

int scored_each(const RouterArgs& args);             // DecodeArgs::each
bool keys_polled(const DecodeArgs& args);            // DecodeArgs::polled
bool second_of_one(const DecodeArgs& args);          // DecodeArgs::one
size_t decode_shared_bytes(const DecodeArgs& args);  // of a block, at most
// Router logits, and the tokens as right operands.
cudaError_t launch_prepare(const DecodeArgs& args, DType dtype, const DeviceInfo& device, cudaStream_t stream);
// Choice, gates and ups with the activation; then down, weighted sum, shared expert.
cudaError_t launch_decode(const DecodeArgs& args, DType dtype, const DeviceInfo& device, cudaStream_t stream);

// One of a few tokens' kernels.
template <typename... Formal>
cudaError_t launch_few(void (*kernel)(Formal...), LaunchForm form, const DecodeArgs& args, const DeviceInfo& device,
                       cudaStream_t stream) {
  form.dependent = device.capability >= 90 && args.tuning.dependent;
  return launch_as(kernel, form, stream, args);
}

}  // namespace deltafuse::moe
