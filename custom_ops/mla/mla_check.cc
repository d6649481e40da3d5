#include "mla_check.h"

#include <cmath>

#include "../common/cpu_support.h"

namespace deltafuse::mla {
namespace {

using deltafuse::cpu::Reason;

constexpr int32_t kMostChannels = 1 << 16;  // of any one axis; products of two fit into 32 bits

template <typename Enum>
bool Within(Enum value, Enum last) {
  return static_cast<int32_t>(value) >= 0 && static_cast<int32_t>(value) <= static_cast<int32_t>(last);
}

long long Shown(int64_t value) { return static_cast<long long>(value); }

const char* CacheRefusal(const Params& p) {
  const bool paged = p.block_size > 0;
  if (p.cache == Cache::kNone && (p.past_len > 0 || p.static_cache || paged)) {
    return Reason("past, cache_lengths or block_table without a cache");
  }
  if (paged && !(p.static_cache && p.cache == Cache::kLatent)) {
    return Reason("block_table needs cache_lengths and a cache of latents");
  }
  if (p.cache_type != CacheType::kSame && (p.cache != Cache::kLatent || p.packed_cache)) {
    return Reason("an 8-bit cache needs a cache of latents apart from the rotary keys");
  }
  if (p.packed_cache && (p.cache != Cache::kLatent || p.qk_rope_head_dim == 0)) {
    return Reason("a packed cache needs a cache of latents and a rotary part");
  }
  return nullptr;
}

const char* OperandRefusal(const Params& p) {
  if (!(p.q && p.latent && p.kv_b_weight && p.o)) return Reason("q, latent, kv_b_weight and o are required");
  if (p.qk_rope_head_dim > 0 && !p.k_rope) return Reason("qk_rope_head_dim %d without k_rope", p.qk_rope_head_dim);
  if (p.rope != Rope::kNone && !(p.cos && p.sin)) return Reason("rope without cos and sin");
  if ((p.gate_sigmoid != 0) != (p.gate != nullptr)) return Reason("gate and gate_activation go together");
  if ((p.mask_type != MaskType::kNone) != (p.attn_mask != nullptr))
    return Reason("attn_mask has no type, or is absent");
  if (p.static_cache && !p.cache_lengths) return Reason("a static cache without cache_lengths");
  if (p.block_size > 0 && !p.block_table) return Reason("a paged cache without block_table");
  const bool past = p.past_len > 0 || (p.block_size > 0 && p.num_blocks > 0);
  if (past && p.cache == Cache::kLatent) {
    if (!p.past_latent) return Reason("past_latent is missing");
    if (p.qk_rope_head_dim > 0 && !p.packed_cache && !p.past_k_rope) return Reason("past_k_rope is missing");
  }
  if (p.cache_type == CacheType::kInt8 && !p.past_latent_scale) return Reason("past_latent_scale is missing");
  if (past && p.cache_type == CacheType::kFloat8 && !p.past_latent_scale) return Reason("past_latent_scale is missing");
  if (past && p.cache == Cache::kExpanded && !(p.past_key && p.past_value)) {
    return Reason("past_key or past_value is missing");
  }
  return nullptr;
}

}  // namespace

const char* geometry_refusal(const Params& p) {
  if (p.batch < 0 || p.seq_len < 0 || p.past_len < 0 || p.num_blocks < 0 || p.block_size < 0 || p.max_blocks < 0) {
    return Reason("a negative size");
  }
  const int32_t sizes[] = {p.num_heads, p.qk_nope_head_dim, p.v_head_dim, p.kv_lora_rank};
  for (const int32_t size : sizes) {
    if (size < 1 || size > kMostChannels || p.qk_rope_head_dim < 0 || p.qk_rope_head_dim > kMostChannels) {
      return Reason(
          "num_heads %d, qk_nope_head_dim %d, v_head_dim %d, kv_lora_rank %d, qk_rope_head_dim %d: 1 to %d expected "
          "(rope: from 0)",
          p.num_heads, p.qk_nope_head_dim, p.v_head_dim, p.kv_lora_rank, p.qk_rope_head_dim, kMostChannels);
    }
  }
  if (!Within(p.dtype, DType::kBFloat16)) {
    return Reason("element type %d: the kernel takes float32, float16 and bfloat16", static_cast<int>(p.dtype));
  }
  if (!Within(p.rope, Rope::kDeinterleaved) || !Within(p.cache, Cache::kExpanded) ||
      !Within(p.cache_type, CacheType::kFloat8) || !Within(p.mask_type, MaskType::kBool)) {
    return Reason("an unknown rope, cache, cache_type or type of mask");
  }
  if (!std::isfinite(p.scale)) return Reason("scale is not finite");
  if (p.rope != Rope::kNone) {
    if (p.qk_rope_head_dim < 2 || p.qk_rope_head_dim % 2) {
      return Reason("rope needs an even qk_rope_head_dim, not %d", p.qk_rope_head_dim);
    }
    if (p.cos_width != p.qk_rope_head_dim && p.cos_width != p.qk_rope_head_dim / 2) {
      return Reason("cos and sin have %d columns: expected %d or %d", p.cos_width, p.qk_rope_head_dim,
                    p.qk_rope_head_dim / 2);
    }
  }
  if (p.window < 0 || (p.window > 0 && !p.causal)) {
    return Reason("window %d: 0 for none, or 1 or more with causal", p.window);
  }
  return CacheRefusal(p);
}

const char* host_value_refusal(const Params& p) {
  if (p.batch == 0 || p.seq_len == 0) return nullptr;
  if (const char* reason = OperandRefusal(p)) return reason;
  if (p.position_ids) {
    const int64_t rows = p.position_batch_stride > 0 ? p.batch : 1;
    for (int64_t b = 0; b < rows; ++b) {
      for (int64_t i = 0; i < p.seq_len; ++i) {
        const int64_t id = p.position_ids[b * p.position_batch_stride + i];
        if (id < 0 || id >= p.cos_rows) {
          return Reason("position_ids[%lld, %lld] is %lld: cos and sin have %lld rows", Shown(b), Shown(i), Shown(id),
                        Shown(p.cos_rows));
        }
      }
    }
  }
  if (!p.static_cache) return nullptr;
  const int64_t capacity = p.block_size > 0 ? p.max_blocks * p.block_size : p.past_len;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t there = p.lengths_int64 ? static_cast<const int64_t*>(p.cache_lengths)[b]
                                          : static_cast<const int32_t*>(p.cache_lengths)[b];
    if (there < 0 || there > capacity - p.seq_len) {
      return Reason("cache_lengths[%lld] is %lld, with %lld new tokens: the cache has room for %lld", Shown(b),
                    Shown(there), Shown(p.seq_len), Shown(capacity));
    }
    if (p.block_size == 0) continue;
    for (int64_t i = 0; i * p.block_size < there + p.seq_len; ++i) {
      const int32_t id = p.block_table[b * p.max_blocks + i];
      if (id < 0 || id >= p.num_blocks) {
        return Reason("block_table[%lld, %lld] is %d: there are %lld blocks", Shown(b), Shown(i), id,
                      Shown(p.num_blocks));
      }
    }
  }
  return nullptr;
}

const char* fault_text(uint32_t fault) {
  switch (static_cast<Fault>(fault)) {
    case Fault::kNone:
      return "";
    case Fault::kPosition:
      return "a position in position_ids is outside of the tables cos and sin";
    case Fault::kLength:
      return "a length in cache_lengths is below 0, or leaves no room for the new tokens";
    case Fault::kBlock:
      return "a block id in block_table is outside of the pool";
  }
  return "an unknown fault";
}

}  // namespace deltafuse::mla
