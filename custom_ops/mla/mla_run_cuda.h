// One call of the CUDA kernels: what it copies and launches. Only for mla_cuda.cc.
#pragma once

#include "mla_plan_cuda.h"

namespace deltafuse::mla::host {

// One call on its way: launches return a reason or null.
class Run {
 public:
  // core: nothing but the attention itself, over what an earlier call left in the caches and the workspace.
  Run(const CudaLayer& layer, const Params& params, void* workspace, cudaStream_t stream, bool core = false)
      : device_(layer.device),
        p_(params),
        w_(workspace_of(params, layer.device)),
        base_(static_cast<unsigned char*>(workspace)),
        lengths_(lengths_of(params)),
        kv_b_(params.kv_b_weight ? params.kv_b_weight : layer.kv_b),
        stream_(stream),
        core_(core) {}

  const char* operator()() {
    if (w_.total > 0 && (!base_ || misaligned(base_))) return "the workspace is missing or not on a 16-byte address";
    if (const char* missing = missing_operand()) return missing;
    set_view();
    if (const char* why = core_ ? nullptr : copy_pasts()) return why;
    if (tokens(p_) == 0) return nullptr;
    switch (path_of(p_, device_)) {
      case Path::kDecode:
        return decode();
      case Path::kPrompt:
        return prompt();
      case Path::kAny:
        return any();
    }
    return nullptr;
  }

 private:
  const char* missing_operand() const {
    if (!kv_b_) return "kv_b_weight is required";
    if (tokens(p_) > 0 && (!p_.q || !p_.latent || !p_.o)) return "q, latent and o are required";
    if (p_.rope != Rope::kNone && (!p_.cos || !p_.sin) && tokens(p_) > 0) return "cos and sin are required with rope";
    if (p_.static_cache && !p_.cache_lengths && p_.batch > 0) return "cache_lengths is required with a static cache";
    if (paged(p_) && !p_.block_table && p_.batch > 0) return "block_table is required with a paged cache";
    const bool past = cache_rows(p_) > 0 && (p_.static_cache || p_.past_len > 0);
    if (p_.cache == Cache::kLatent && past) {
      if (!p_.past_latent) return "past_latent is required";
      if (!p_.past_k_rope && !p_.packed_cache && p_.qk_rope_head_dim > 0) return "past_k_rope is required";
    }
    if (p_.cache_type != CacheType::kSame && !p_.past_latent_scale && cache_rows(p_) > 0 &&
        (past || p_.cache_type == CacheType::kInt8)) {
      return "past_latent_scale is required";
    }
    if (p_.cache == Cache::kExpanded && past && (!p_.past_key || !p_.past_value)) {
      return "past_key and past_value are required";
    }
    if (p_.mask_type != MaskType::kNone && !p_.attn_mask) return "attn_mask is required";
    const void* wide[] = {p_.q, kv_b_, p_.o, p_.present_latent, p_.present_k_rope, p_.present_key, p_.present_value};
    if (path_of(p_, device_) != Path::kAny) {
      for (const void* pointer : wide) {
        if (misaligned(pointer)) return "q, kv_b_weight, o and the caches must lie on 16-byte addresses";
      }
    }
    return nullptr;
  }

  void* at(int64_t offset) const { return base_ + offset; }

  void set_view() {
    view_.batch_rows = latents_apart(p_) ? p_.seq_len : capacity(p_);
    view_.type = p_.cache_type;
    view_.latent_row = p_.kv_lora_rank;
    view_.rope_row = p_.qk_rope_head_dim;
    if (latents_apart(p_)) {
      view_.latent = at(w_.latent), view_.rope = at(w_.rope);
      return;
    }
    view_.latent = p_.present_latent ? p_.present_latent : at(w_.latent);
    if (p_.packed_cache) {
      view_.latent_row = view_.rope_row = latent_row(p_);
      view_.rope = static_cast<unsigned char*>(view_.latent) + int64_t(p_.kv_lora_rank) * size_of(p_.dtype);
    } else {
      view_.rope = p_.present_k_rope ? p_.present_k_rope : at(w_.rope);
    }
    if (p_.cache_type == CacheType::kInt8) view_.scale = const_cast<float*>(p_.past_latent_scale);
    if (p_.cache_type == CacheType::kFloat8) {
      view_.scale = p_.present_latent_scale ? p_.present_latent_scale : static_cast<float*>(at(w_.scale));
    }
    if (paged(p_)) {
      view_.block_table = p_.block_table;
      view_.num_blocks = p_.num_blocks, view_.block_size = p_.block_size, view_.max_blocks = p_.max_blocks;
    }
  }

  // `outer` rows, each of past (growing) or all (static) tokens, into the present.
  const char* copy_past(const void* past, void* present, int64_t outer, int64_t token_bytes) {
    if (!past || past == present || outer == 0 || token_bytes == 0) return nullptr;
    cudaError_t status = cudaSuccess;
    if (p_.static_cache) {
      const int64_t rows = paged(p_) ? p_.num_blocks * p_.block_size : outer * capacity(p_);
      if (rows > 0) status = cudaMemcpyAsync(present, past, rows * token_bytes, cudaMemcpyDeviceToDevice, stream_);
    } else if (p_.past_len > 0) {
      const int64_t width = p_.past_len * token_bytes;
      status = cudaMemcpy2DAsync(present, capacity(p_) * token_bytes, past, width, width, outer,
                                 cudaMemcpyDeviceToDevice, stream_);
    }
    return status == cudaSuccess ? nullptr : failed("copying the past cache", status);
  }

  const char* copy_pasts() {
    const int64_t size = size_of(p_.dtype), head_dim = p_.qk_nope_head_dim + p_.qk_rope_head_dim;
    const char* why = nullptr;
    if (p_.cache == Cache::kLatent) {
      why = copy_past(p_.past_latent, view_.latent, p_.batch, latent_row(p_) * code_bytes(p_));
      if (!why && !p_.packed_cache) {
        why = copy_past(p_.past_k_rope, view_.rope, p_.batch, p_.qk_rope_head_dim * size);
      }
      if (!why && p_.cache_type == CacheType::kFloat8) {
        why = copy_past(p_.past_latent_scale, view_.scale, p_.batch, groups(p_) * 4);
      }
    } else if (p_.cache == Cache::kExpanded) {
      key_ = p_.present_key ? p_.present_key : at(w_.key);
      value_ = p_.present_value ? p_.present_value : at(w_.value);
      why = copy_past(p_.past_key, key_, p_.batch * p_.num_heads, head_dim * size);
      if (!why) why = copy_past(p_.past_value, value_, p_.batch * p_.num_heads, p_.v_head_dim * size);
    }
    return why;
  }

  const char* new_tokens(void* q_rope, int64_t q_rope_row, bool float32, void* q_scaled, float* fresh = nullptr) {
    TokenArgs a;
    a.p = p_;
    a.lengths = lengths_;
    a.cache = view_;
    a.by_token = latents_apart(p_);
    a.q_rope = q_rope;
    a.q_rope_row = q_rope_row;
    a.q_rope_float32 = float32;
    a.q_scaled = q_scaled;
    a.fresh = fresh;
    const cudaError_t status = launch_tokens(a, path_of(p_, device_) == Path::kDecode, stream_);
    return status == cudaSuccess ? nullptr : failed("launching the pass over new tokens", status);
  }

  const char* attend(const void* q) {
    DecodeArgs a;
    a.plan = plan_decode(p_, capacity(p_), device_.multiprocessors);
    a.p = p_;
    a.lengths = lengths_;
    a.cache = view_;
    a.q = q;
    a.partial = at(w_.partial);
    a.places = static_cast<int4*>(at(w_.stats));
    a.stats = reinterpret_cast<float*>(a.places + p_.batch);
    a.o_latent = at(w_.o_latent);
    const cudaError_t status = launch_decode(a, stream_);
    return status == cudaSuccess ? nullptr : failed("launching the decode kernels", status);
  }

  const char* decode() {
    const int64_t row = p_.kv_lora_rank + p_.qk_rope_head_dim, size = size_of(p_.dtype);
    unsigned char* q = static_cast<unsigned char*>(at(w_.q));
    if (core_) return attend(q);
    if (const char* why = new_tokens(q + p_.kv_lora_rank * size, row, false, nullptr)) return why;
    AbsorbArgs absorb;
    absorb.p = p_;
    absorb.kv_b = kv_b_;
    absorb.channel_scale = p_.cache_type == CacheType::kInt8 ? view_.scale : nullptr;
    absorb.out = q;
    cudaError_t status = launch_absorb_fast(absorb, true, stream_);
    if (status != cudaSuccess) return failed("launching the absorbed queries", status);
    if (const char* why = attend(q)) return why;
    ProjectArgs project;
    project.p = p_;
    project.kv_b = kv_b_;
    project.o_latent = at(w_.o_latent);
    status = launch_project_fast(project, true, stream_);
    return status == cudaSuccess ? nullptr : failed("launching the output's projection", status);
  }

  const char* expand(const void* kv) {
    ExpandArgs e;
    e.p = p_;
    e.lengths = lengths_;
    e.kv_b = kv_b_;
    e.latent = view_.latent;
    e.k_rope = view_.rope;
    e.latent_row = view_.latent_row;
    e.rope_row = view_.rope_row;
    e.key = key_;
    e.value = value_;
    e.cache_rows = capacity(p_);
    e.kv = kv;
    const cudaError_t status = launch_expand(e, stream_);
    return status == cudaSuccess ? nullptr : failed("launching the new keys and values", status);
  }

  const char* prompt() {
    const int64_t rotary = p_.qk_rope_head_dim, head_dim = p_.qk_nope_head_dim + rotary, heads = p_.num_heads;
    const int64_t size = size_of(p_.dtype), both = p_.qk_nope_head_dim + p_.v_head_dim, s = p_.seq_len;
    const bool expanded = p_.cache == Cache::kExpanded;
    unsigned char* q_rope = static_cast<unsigned char*>(at(w_.q_rope));
    const char* why = core_        ? nullptr
                      : p_.q_scale ? new_tokens(q_rope + p_.qk_nope_head_dim * size, head_dim, false, q_rope)
                                   : new_tokens(q_rope, rotary, false, nullptr);
    if (why) return why;
    const void *latent = view_.latent, *rope = view_.rope;
    int64_t latent_row = view_.latent_row, rope_row = view_.rope_row;
    if (flattens(p_)) {
      FlattenArgs f;
      f.p = p_;
      f.lengths = lengths_;
      f.cache = view_;
      f.latent = at(w_.flat_latent);
      f.rope = at(w_.flat_rope);
      const cudaError_t status = core_ ? cudaSuccess : launch_flatten(f, stream_);
      if (status != cudaSuccess) return failed("launching the cache's copy", status);
      latent = f.latent, rope = f.rope;
      latent_row = p_.kv_lora_rank, rope_row = rotary;
    }
    const int64_t rows = expanded ? s : capacity(p_);
    GemmArgs g;
    g.p = p_;
    g.lengths = lengths_;
    g.latent = latent;
    g.latent_row = latent_row;
    g.batch_rows = g.rows = rows;
    g.only_new = expanded;
    g.kv_b = kv_b_;
    g.kv = at(w_.kv);
    cudaError_t status = core_ ? cudaSuccess : launch_expand_sm90a(g, stream_);
    if (status != cudaSuccess) return failed("launching the keys' and values' product", status);
    PromptArgs a;
    a.p = p_;
    a.lengths = lengths_;
    a.q = Heads{p_.q, head_dim, heads, s, p_.batch, head_dim, heads * head_dim, s * heads * head_dim};
    if (p_.q_scale) {
      a.q.data = q_rope;
      a.q_rope = a.q;
      a.q_rope_column = p_.qk_nope_head_dim;
    } else {
      a.q_rope = Heads{q_rope, rotary, heads, s, p_.batch, rotary, heads * rotary, s * heads * rotary};
    }
    if (expanded) {
      if (!core_ && (why = expand(g.kv))) return why;
      a.k = Heads{key_,     head_dim,
                  heads,    capacity(p_),
                  p_.batch, capacity(p_) * head_dim,
                  head_dim, heads * capacity(p_) * head_dim};
      a.k_rope = a.k;
      a.k_rope_column = p_.qk_nope_head_dim;
      a.k_rope_per_head = 1;
      a.v = Heads{value_,        p_.v_head_dim,
                  heads,         capacity(p_),
                  p_.batch,      capacity(p_) * p_.v_head_dim,
                  p_.v_head_dim, heads * capacity(p_) * p_.v_head_dim};
    } else {
      a.k = Heads{g.kv, both, heads, rows, p_.batch, both, heads * both, rows * heads * both};
      a.v = a.k;
      a.v_column = p_.qk_nope_head_dim;
      a.k_rope = Heads{rope, rotary, 1, rows, p_.batch, rope_row, rope_row, rows * rope_row};
    }
    status = launch_prompt_sm90a(a, stream_);
    return status == cudaSuccess ? nullptr : failed("launching the attention", status);
  }

  const char* any() {
    const int64_t row = p_.kv_lora_rank + p_.qk_rope_head_dim;
    AnyArgs a;
    a.p = p_;
    a.lengths = lengths_;
    a.cache = view_;
    if (p_.cache == Cache::kExpanded) {
      if (const char* why = new_tokens(at(w_.q_rope), p_.qk_rope_head_dim, false, nullptr)) return why;
      if (const char* why = expand(nullptr)) return why;
      a.q_rope = at(w_.q_rope);
      a.key = key_;
      a.value = value_;
      a.cache_rows = capacity(p_);
      const cudaError_t status = launch_any(a, stream_);
      return status == cudaSuccess ? nullptr : failed("launching the plain attention", status);
    }
    float* q = static_cast<float*>(at(w_.q));
    float* fresh = keeps_fresh(p_) ? static_cast<float*>(at(w_.fresh)) : nullptr;
    a.fresh = fresh;
    if (const char* why = new_tokens(q + p_.kv_lora_rank, row, true, nullptr, fresh)) return why;
    AbsorbArgs absorb;
    absorb.p = p_;
    absorb.kv_b = kv_b_;
    absorb.out = q;
    absorb.out_float32 = 1;
    cudaError_t status = launch_absorb(absorb, false, stream_);
    if (status != cudaSuccess) return failed("launching the absorbed queries", status);
    a.absorbed = 1;
    a.q = q;
    a.o_latent = static_cast<float*>(at(w_.o_latent));
    status = launch_any(a, stream_);
    if (status != cudaSuccess) return failed("launching the plain attention", status);
    ProjectArgs project;
    project.p = p_;
    project.kv_b = kv_b_;
    project.o_latent = a.o_latent;
    project.float32 = 1;
    status = launch_project(project, false, stream_);
    return status == cudaSuccess ? nullptr : failed("launching the output's projection", status);
  }

  const DeviceInfo& device_;
  const Params& p_;
  const Workspace w_;
  unsigned char* const base_;
  const Lengths lengths_;
  const void* const kv_b_;
  const cudaStream_t stream_;
  const bool core_;
  View view_;
  void *key_ = nullptr, *value_ = nullptr;
};

}  // namespace deltafuse::mla::host
