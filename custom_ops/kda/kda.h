// The host interface of the KDA kernels, CPU and CUDA. Knows nothing of ORT. See spec.py for the mathematics.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deltafuse::kda {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
enum class L2Norm : int32_t { kNone = 0, kSum = 1, kMax = 2 };
enum class GateActivation : int32_t { kNone = 0, kSoftplus = 1, kSigmoid = 2 };
enum class OutputGate : int32_t { kNone = 0, kSigmoid = 1, kSilu = 2 };

// One call. Pointers are device or host pointers, as the kernel asks; an absent operand is null.
// A "token row" is a row of one token's channels; rows of q, k, v lie *_row_stride elements apart (packed q | k | v:
// three pointers into one buffer with row stride C); rows of g, beta, gate and o are dense.
struct Params {
  // geometry
  int64_t batch = 0;     // B (1 with cu_seqlens)
  int64_t seq_len = 0;   // S, tokens a row of the batch; with cu_seqlens the total
  int64_t num_seqs = 0;  // N: batch, or the number of sequences in cu_seqlens
  int32_t num_heads = 0, num_v_heads = 0, head_dim = 0, head_v_dim = 0;
  int32_t conv_width = 0;               // 0: no convolution
  int32_t conv_state_width = 0;         // columns of conv_state and present_conv_state
  DType dtype = DType::kFloat32;        // q k v g beta gate o conv_state
  DType state_dtype = DType::kFloat32;  // initial_state final_state
  // attributes
  float scale = 1.0f;
  L2Norm qk_l2norm = L2Norm::kNone;
  float l2norm_eps = 1e-6f;
  GateActivation gate_activation = GateActivation::kNone;
  float lower_bound = -5.0f;
  int32_t beta_sigmoid = 0;
  float beta_scale = 1.0f;
  int32_t conv_silu = 0;
  OutputGate output_gate = OutputGate::kNone;
  float norm_eps = 1e-5f;
  int32_t state_v_first = 0;  // 0: [N, HV, K, V]; 1: [N, HV, V, K]
  int32_t cu_seqlens_int64 = 0;
  // inputs
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t q_row_stride = 0, k_row_stride = 0, v_row_stride = 0;
  const void* g = nullptr;
  const void* beta = nullptr;
  const float* A_log = nullptr;
  const float* dt_bias = nullptr;
  const float* conv_weight = nullptr;
  const float* conv_bias = nullptr;
  const void* conv_state = nullptr;
  const void* initial_state = nullptr;
  const float* norm_weight = nullptr;
  const void* gate = nullptr;
  const void* cu_seqlens = nullptr;
  // outputs; final_state may be initial_state and present_conv_state may be conv_state (updated in place)
  void* o = nullptr;
  void* present_conv_state = nullptr;
  void* final_state = nullptr;
};

// CPU. `parallel` runs fn(ctx, i) for i in [0, count), on as many threads as the caller likes.
using ParallelFor = void (*)(void* user, int64_t count, void (*fn)(void* ctx, int64_t i), void* ctx);

// Why the kernel does not take this call, or null. `reason` stays valid until the thread's next call.
const char* cpu_refusal(const Params& params);
size_t cpu_workspace_bytes(const Params& params);
// Returns null, or the reason of the failure (nothing was written then).
const char* cpu_forward(const Params& params, void* workspace, ParallelFor parallel, void* user);

// CUDA: `stream` is a cudaStream_t. The geometry and attributes decide; pointers may be null in the first two.
const char* cuda_refusal(const Params& params, int compute_capability /* 90 for 9.0 */);
size_t cuda_workspace_bytes(const Params& params);
// Launches on `stream` and returns without waiting. Returns null, or the reason of the failure.
const char* cuda_forward(const Params& params, void* workspace, void* stream);

}  // namespace deltafuse::kda
