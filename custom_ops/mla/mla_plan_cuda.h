// Which way a call goes and what it needs of the workspace. Only for mla_cuda.cc and mla_run_cuda.h.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <cstdio>

#include "mla_launch.h"

namespace deltafuse::mla {

struct CudaLayer {
  DeviceInfo device;
  void* kv_b = nullptr;  // a copy, or null
};

namespace host {

constexpr int64_t kAlignment = 1024;

template <typename... Values>
const char* reason(const char* format, Values... values) {
  thread_local char text[256];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

inline const char* failed(const char* what, cudaError_t status) {
  return reason("%s: %s", what, cudaGetErrorString(status));
}

inline int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
inline bool misaligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; }

inline bool paged(const Params& p) { return p.max_blocks > 0; }
inline int64_t tokens(const Params& p) { return p.batch * p.seq_len; }
inline int64_t capacity(const Params& p) {
  if (paged(p)) return p.max_blocks * p.block_size;
  return p.static_cache ? p.past_len : p.past_len + p.seq_len;
}
inline int64_t cache_rows(const Params& p) { return paged(p) ? p.num_blocks * p.block_size : p.batch * capacity(p); }
inline int64_t groups(const Params& p) { return (p.kv_lora_rank + kFloat8Group - 1) / kFloat8Group; }
inline int64_t code_bytes(const Params& p) { return p.cache_type == CacheType::kSame ? size_of(p.dtype) : 1; }
inline int64_t latent_row(const Params& p) { return p.kv_lora_rank + (p.packed_cache ? p.qk_rope_head_dim : 0); }

inline Lengths lengths_of(const Params& p) {
  Lengths l;
  l.past = p.static_cache ? p.cache_lengths : nullptr;
  l.is_int64 = p.lengths_int64;
  l.past_len = p.static_cache ? 0 : p.past_len;
  l.seq_len = p.seq_len;
  l.capacity = capacity(p);
  return l;
}

// Decode and Prompt are sm_90a's own; Any is plain.
enum class Path { kDecode, kPrompt, kAny };

// Whether prompts with an attn_mask take the prompt kernel too: set by the C face, for tests, which send them to the
// plain kernels where DELTAFUSE_MLA_MASKED_PROMPTS is 0.
inline std::atomic<bool> masked_prompts{true};

// Addresses do not matter here: those of the workspace and of ORT's tensors are aligned, and cuda_forward checks.
inline Path path_of(const Params& p, const DeviceInfo& device) {
  if (!device.sm90a || p.dtype == DType::kFloat32) return Path::kAny;
  if (p.cache != Cache::kExpanded && p.seq_len <= kShortWindow && fast_projections(p)) {
    View v;
    v.latent_row = latent_row(p);
    v.rope_row = p.packed_cache ? v.latent_row : p.qk_rope_head_dim;
    v.batch_rows = capacity(p);
    v.type = p.cache_type;
    v.num_blocks = p.num_blocks, v.block_size = p.block_size, v.max_blocks = p.max_blocks;
    static const int32_t some_table = 0;
    if (paged(p)) v.block_table = &some_table;  // not read
    if (!decode_refusal(p, v)) return Path::kDecode;
  }
  const bool widths = p.qk_nope_head_dim == 128 && p.qk_rope_head_dim == 64 && p.v_head_dim == 128;
  const bool mask = p.mask_type == MaskType::kNone || masked_prompts;
  if (widths && mask && p.kv_lora_rank % 64 == 0 && p.scale > 0.0f && p.batch <= 65535) {
    return Path::kPrompt;
  }
  return Path::kAny;
}

// Offsets of the workspace's parts.
struct Workspace {
  int64_t latent = 0, rope = 0, scale = 0, key = 0, value = 0;  // where a present is not asked for
  int64_t q = 0, o_latent = 0, partial = 0, stats = 0;          // decode, and Any with absorbed weights
  int64_t fresh = 0;                                            // Any with absorbed weights
  int64_t q_rope = 0, flat_latent = 0, flat_rope = 0, kv = 0;   // prompts
  int64_t total = 0;
  int64_t take(int64_t bytes) {
    const int64_t at = total;
    total += aligned(bytes);
    return at;
  }
};

// Whether the new tokens' latents go to the workspace alone.
inline bool latents_apart(const Params& p) { return p.cache != Cache::kLatent; }
// Plain kernels over latents take the new tokens as they are, not rounded to what the cache holds.
inline bool keeps_fresh(const Params& p) { return p.dtype != DType::kFloat32 && p.cache != Cache::kExpanded; }
// A prompt's latents are copied into plain rows first.
inline bool flattens(const Params& p) {
  return p.cache == Cache::kLatent && (paged(p) || p.cache_type != CacheType::kSame);
}

// A present that is null is one that nobody asked for: the cache after the call is kept here while it runs.
inline Workspace workspace_of(const Params& p, const DeviceInfo& device) {
  Workspace w;
  const int64_t size = size_of(p.dtype), items = tokens(p) * p.num_heads;
  const int64_t head_dim = p.qk_nope_head_dim + p.qk_rope_head_dim;
  if (latents_apart(p)) {
    w.latent = w.take(tokens(p) * p.kv_lora_rank * size);
    w.rope = w.take(tokens(p) * p.qk_rope_head_dim * size);
  } else {
    if (!p.present_latent) w.latent = w.take(cache_rows(p) * latent_row(p) * code_bytes(p));
    if (!p.present_k_rope && !p.packed_cache) w.rope = w.take(cache_rows(p) * p.qk_rope_head_dim * size);
    if (!p.present_latent_scale && p.cache_type == CacheType::kFloat8) w.scale = w.take(cache_rows(p) * groups(p) * 4);
  }
  if (p.cache == Cache::kExpanded) {
    const int64_t rows = p.batch * p.num_heads * capacity(p);
    if (!p.present_key) w.key = w.take(rows * head_dim * size);
    if (!p.present_value) w.value = w.take(rows * p.v_head_dim * size);
  }
  const int64_t absorbed = items * (p.kv_lora_rank + p.qk_rope_head_dim);
  switch (path_of(p, device)) {
    case Path::kDecode: {
      const DecodePlan plan = plan_decode(p, capacity(p), device.multiprocessors);
      w.q = w.take(absorbed * size);
      w.o_latent = w.take(items * p.kv_lora_rank * size);
      w.partial = w.take(plan.partial_bytes);
      w.stats = w.take(plan.stats_bytes);
      break;
    }
    case Path::kPrompt: {
      w.q_rope = w.take(items * (p.q_scale ? head_dim : p.qk_rope_head_dim) * size);
      if (flattens(p)) {
        w.flat_latent = w.take(p.batch * capacity(p) * p.kv_lora_rank * size);
        w.flat_rope = w.take(p.batch * capacity(p) * p.qk_rope_head_dim * size);
      }
      const int64_t rows = p.cache == Cache::kExpanded ? tokens(p) : p.batch * capacity(p);
      w.kv = w.take(rows * p.num_heads * (p.qk_nope_head_dim + p.v_head_dim) * size);
      break;
    }
    case Path::kAny:
      if (p.cache == Cache::kExpanded) {
        w.q_rope = w.take(items * p.qk_rope_head_dim * size);
      } else {
        w.q = w.take(absorbed * 4);
        w.o_latent = w.take(items * p.kv_lora_rank * 4);
        if (keeps_fresh(p)) w.fresh = w.take(tokens(p) * (p.kv_lora_rank + p.qk_rope_head_dim) * 4);
      }
      break;
  }
  return w;
}

}  // namespace host
}  // namespace deltafuse::mla
