// The host interface of the LatentAttention kernels, CPU and CUDA. Knows nothing of ORT. See spec.py for the
// mathematics.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deltafuse::mla {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
enum class Rope : int32_t { kNone = 0, kHalf = 1, kInterleaved = 2, kDeinterleaved = 3 };
enum class Cache : int32_t { kNone = 0, kLatent = 1, kExpanded = 2 };
enum class CacheType : int32_t { kSame = 0, kInt8 = 1, kFloat8 = 2 };
enum class MaskType : int32_t { kNone = 0, kT = 1, kFloat32 = 2, kBool = 3 };

// One call. Pointers are device or host pointers, as the kernel asks; an absent operand is null.
struct Params {
  // geometry
  int64_t batch = 0;     // B
  int64_t seq_len = 0;   // S, new tokens a row
  int64_t past_len = 0;  // P: tokens of a growing cache, capacity of a static one (not paged)
  int32_t num_heads = 0, qk_nope_head_dim = 0, qk_rope_head_dim = 0, v_head_dim = 0, kv_lora_rank = 0;
  DType dtype = DType::kFloat32;
  // attributes
  float scale = 1.0f;
  Rope rope = Rope::kNone;
  int32_t causal = 1;
  int32_t window = 0;
  int32_t gate_sigmoid = 0;
  float kv_norm_eps = 1e-6f;
  Cache cache = Cache::kNone;
  CacheType cache_type = CacheType::kSame;
  int32_t static_cache = 0;  // cache_lengths is there
  int32_t packed_cache = 0;  // one cache row is latent | rotated key; else two buffers
  // paged cache
  int64_t num_blocks = 0, block_size = 0, max_blocks = 0;  // 0: not paged
  // operands' forms
  int32_t cos_width = 0;                                 // Dr or Dr / 2
  int32_t cos_float32 = 0;                               // cos and sin are float32, else T
  int64_t cos_rows = 0;                                  // with position_ids: rows of the tables
  int64_t cos_batch_stride = 0;                          // in rows: S, or 0 where one row of the batch serves all
  int64_t position_batch_stride = 0;                     // likewise
  int64_t q_scale_batch_stride = 0;                      // likewise
  MaskType mask_type = MaskType::kNone;                  //
  int64_t mask_strides[4] = {0, 0, 0, 0};                // elements, for B, H, S, L; 0 where it is broadcast
  int64_t latent_row_stride = 0, k_rope_row_stride = 0;  // elements between tokens (packed: R + Dr both)
  int32_t lengths_int64 = 0;
  // inputs
  const void* q = nullptr;
  const void* latent = nullptr;
  const void* k_rope = nullptr;
  const void* kv_b_weight = nullptr;
  const float* kv_norm_weight = nullptr;
  const void* cos = nullptr;
  const void* sin = nullptr;
  const int64_t* position_ids = nullptr;
  const float* q_scale = nullptr;
  const void* past_latent = nullptr;
  const void* past_k_rope = nullptr;  // packed: null
  const float* past_latent_scale = nullptr;
  const void* past_key = nullptr;
  const void* past_value = nullptr;
  const void* cache_lengths = nullptr;
  const int32_t* block_table = nullptr;
  const void* attn_mask = nullptr;
  const void* gate = nullptr;
  // outputs; each present may be null (not asked for) or its past's buffer (static and paged caches)
  void* o = nullptr;
  void* present_latent = nullptr;
  void* present_k_rope = nullptr;
  float* present_latent_scale = nullptr;
  void* present_key = nullptr;
  void* present_value = nullptr;
  // CUDA: a word in memory that the device can write and the host can read, or null. A kernel that meets bad values
  // (Fault) stores the first one there; the host looks after the run.
  uint32_t* fault = nullptr;
};

// What a device finds in the values of a call, since only it can see them.
enum class Fault : uint32_t { kNone = 0, kPosition = 1, kLength = 2, kBlock = 3 };
// The fault in words, for an error message.
const char* fault_text(uint32_t fault);

// CPU. `parallel` runs fn(ctx, i) for i in [0, count), on as many threads as the caller likes.
using ParallelFor = void (*)(void* user, int64_t count, void (*fn)(void* ctx, int64_t i), void* ctx);

// Why the kernel does not take this call, or null. `reason` stays valid until the thread's next call.
const char* cpu_refusal(const Params& params);
size_t cpu_workspace_bytes(const Params& params);
// Returns null, or the reason of the failure (bad positions, lengths and block ids are found before anything is
// written).
const char* cpu_forward(const Params& params, void* workspace, ParallelFor parallel, void* user);

// CUDA. A layer holds what one node keeps between calls: packed weights, library handles, plans. Its methods may be
// called by one thread at a time for each stream.
struct CudaLayer;

// The geometry and attributes decide; pointers may be null. `compute_capability`: 90 for 9.0.
const char* cuda_refusal(const Params& params, int compute_capability);
// `params.kv_b_weight` (device memory) is packed into memory of the layer where it is not null; the caller may then
// pass null in each call and free its own. Work is queued on `stream` (a cudaStream_t).
const char* cuda_create(const Params& params, void* stream, CudaLayer** layer);
void cuda_destroy(CudaLayer* layer);
size_t cuda_workspace_bytes(const CudaLayer* layer, const Params& params);
// Launches on `stream` and returns without waiting; safe to capture into a CUDA graph after one call of the same
// shape. Returns null, or the reason of the failure.
const char* cuda_forward(CudaLayer* layer, const Params& params, void* workspace, void* stream);

}  // namespace deltafuse::mla
