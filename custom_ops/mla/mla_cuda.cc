// Dispatch of LatentAttention's CUDA kernels: what is refused, which way a call goes, its workspace, its launches.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <mutex>
#include <new>

#include "mla.h"
#include "mla_launch.h"

namespace deltafuse::mla {

struct CudaLayer {
  DeviceInfo device;
  void* kv_b = nullptr;  // a copy, or null
};

namespace {

constexpr int64_t kAlignment = 1024;

template <typename... Values>
const char* reason(const char* format, Values... values) {
  thread_local char text[256];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

const char* failed(const char* what, cudaError_t status) { return reason("%s: %s", what, cudaGetErrorString(status)); }

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
bool misaligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; }

bool paged(const Params& p) { return p.max_blocks > 0; }
int64_t tokens(const Params& p) { return p.batch * p.seq_len; }
int64_t capacity(const Params& p) {
  if (paged(p)) return p.max_blocks * p.block_size;
  return p.static_cache ? p.past_len : p.past_len + p.seq_len;
}
int64_t cache_rows(const Params& p) { return paged(p) ? p.num_blocks * p.block_size : p.batch * capacity(p); }
int64_t groups(const Params& p) { return (p.kv_lora_rank + kFloat8Group - 1) / kFloat8Group; }
int64_t code_bytes(const Params& p) { return p.cache_type == CacheType::kSame ? size_of(p.dtype) : 1; }
int64_t latent_row(const Params& p) { return p.kv_lora_rank + (p.packed_cache ? p.qk_rope_head_dim : 0); }

Lengths lengths_of(const Params& p) {
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

// Addresses do not matter here: those of the workspace and of ORT's tensors are aligned, and cuda_forward checks.
Path path_of(const Params& p, const DeviceInfo& device) {
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
  if (widths && p.kv_lora_rank % 64 == 0 && p.scale > 0.0f && p.batch <= 65535) {
    return Path::kPrompt;
  }
  return Path::kAny;
}

// Offsets of the workspace's parts.
struct Workspace {
  int64_t latent = 0, rope = 0, scale = 0, key = 0, value = 0;     // where a present is not asked for
  int64_t q = 0, o_latent = 0, partial = 0, stats = 0, parts = 0;  // decode, and Any with absorbed weights
  int64_t q_rope = 0, flat_latent = 0, flat_rope = 0, kv = 0;      // prompts
  int64_t total = 0;
  int64_t take(int64_t bytes) {
    const int64_t at = total;
    total += aligned(bytes);
    return at;
  }
};

// Whether the new tokens' latents go to the workspace alone.
bool latents_apart(const Params& p) { return p.cache != Cache::kLatent; }
// A prompt's latents are copied into plain rows first.
bool flattens(const Params& p) { return p.cache == Cache::kLatent && (paged(p) || p.cache_type != CacheType::kSame); }

Workspace workspace_of(const Params& p, const DeviceInfo& device) {
  Workspace w;
  const int64_t size = size_of(p.dtype), items = tokens(p) * p.num_heads;
  const int64_t head_dim = p.qk_nope_head_dim + p.qk_rope_head_dim;
  if (latents_apart(p)) {
    w.latent = w.take(tokens(p) * p.kv_lora_rank * size);
    w.rope = w.take(tokens(p) * p.qk_rope_head_dim * size);
  } else {  // taken whether or not the presents are there: pointers are not known yet when the size is asked for
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
      w.parts = w.take(plan.parts_bytes);
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
      }
      break;
  }
  return w;
}

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

  const char* new_tokens(void* q_rope, int64_t q_rope_row, bool float32, void* q_scaled) {
    TokenArgs a;
    a.p = p_;
    a.lengths = lengths_;
    a.cache = view_;
    a.by_token = latents_apart(p_);
    a.q_rope = q_rope;
    a.q_rope_row = q_rope_row;
    a.q_rope_float32 = float32;
    a.q_scaled = q_scaled;
    const cudaError_t status = launch_tokens(a, stream_);
    return status == cudaSuccess ? nullptr : failed("launching the pass over new tokens", status);
  }

  const char* attend(const void* q) {
    const DecodePlan plan = plan_decode(p_, capacity(p_), device_.multiprocessors);
    DecodeArgs a;
    a.p = p_;
    a.lengths = lengths_;
    a.cache = view_;
    a.q = q;
    a.partial = static_cast<float*>(at(w_.partial));
    a.stats = static_cast<float*>(at(w_.stats));
    a.o_latent = at(w_.o_latent);
    a.parts = static_cast<const Part*>(at(w_.parts));
    a.items = plan.items;
    a.by_section = plan.by_section;
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
    absorb.parts.lengths = lengths_;
    absorb.parts.batch = p_.batch;
    absorb.parts.window = p_.window;
    absorb.parts.by_section = plan_decode(p_, capacity(p_), device_.multiprocessors).by_section;
    absorb.parts.parts = static_cast<Part*>(at(w_.parts));
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
    if (const char* why = new_tokens(q + p_.kv_lora_rank, row, true, nullptr)) return why;
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

int64_t weight_bytes(const Params& p) {
  return int64_t(p.kv_lora_rank) * p.num_heads * (p.qk_nope_head_dim + p.v_head_dim) * size_of(p.dtype);
}

}  // namespace

cudaError_t device_info(DeviceInfo* info) {
  constexpr int kDevices = 64;
  static std::mutex mutex;
  static DeviceInfo known_devices[kDevices];
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  if (device >= kDevices) return cudaErrorInvalidDevice;
  const std::lock_guard<std::mutex> lock(mutex);
  DeviceInfo& entry = known_devices[device];
  if (entry.capability == 0) {
    DeviceInfo read;
    int major = 0, minor = 0;
    const struct {
      int* value;
      cudaDeviceAttr attribute;
    } wanted[] = {{&major, cudaDevAttrComputeCapabilityMajor},
                  {&minor, cudaDevAttrComputeCapabilityMinor},
                  {&read.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                  {&read.multiprocessors, cudaDevAttrMultiProcessorCount}};
    for (const auto& one : wanted) {
      status = cudaDeviceGetAttribute(one.value, one.attribute, device);
      if (status != cudaSuccess) return status;
    }
    int compiled = 0;
    status = compiled_capability(&compiled);
    if (status != cudaSuccess) return status;
    read.capability = major * 10 + minor < compiled ? major * 10 + minor : compiled;
    status = has_sm90a(&read.sm90a);
    if (status != cudaSuccess) return status;
    entry = read;
  }
  *info = entry;
  return cudaSuccess;
}

const char* cuda_refusal(const Params& p, int compute_capability) {
  if (compute_capability < 80) {
    return reason("compute capability %d.%d: kernels need 8.0 or newer", compute_capability / 10,
                  compute_capability % 10);
  }
  if (p.num_heads < 1 || p.qk_nope_head_dim < 1 || p.v_head_dim < 1 || p.kv_lora_rank < 1 || p.qk_rope_head_dim < 0) {
    return reason("num_heads %d, qk_nope_head_dim %d, v_head_dim %d, kv_lora_rank %d: all must be 1 or more",
                  p.num_heads, p.qk_nope_head_dim, p.v_head_dim, p.kv_lora_rank);
  }
  if (int(p.dtype) < 0 || int(p.dtype) > 2) {
    return reason("element type %d: kernels take float32, float16, bfloat16", int(p.dtype));
  }
  if (int(p.rope) < 0 || int(p.rope) > 3) return reason("rope %d: expected 0 to 3", int(p.rope));
  if (p.rope != Rope::kNone && (p.qk_rope_head_dim < 2 || p.qk_rope_head_dim % 2 != 0)) {
    return reason("qk_rope_head_dim %d: the rotation needs an even number", p.qk_rope_head_dim);
  }
  if (p.rope != Rope::kNone && p.cos_width != p.qk_rope_head_dim && p.cos_width * 2 != p.qk_rope_head_dim) {
    return reason("cos has %d columns: expected %d or %d", p.cos_width, p.qk_rope_head_dim, p.qk_rope_head_dim / 2);
  }
  if (p.cache_type != CacheType::kSame && (p.cache != Cache::kLatent || p.packed_cache)) {
    return "an 8-bit cache holds latents, apart from the rotary keys";
  }
  if (p.max_blocks > 0 && (p.cache != Cache::kLatent || !p.static_cache || p.block_size < 1)) {
    return reason("a paged cache holds latents in blocks of 1 token or more, not %lld, and needs cache_lengths",
                  static_cast<long long>(p.block_size));
  }
  if (p.cache == Cache::kExpanded) {
    constexpr int kWidest = 256;
    if (p.qk_nope_head_dim + p.qk_rope_head_dim > kWidest || p.v_head_dim > kWidest) {
      return reason("heads of %d and %d channels in an expanded cache: kernels take up to %d",
                    p.qk_nope_head_dim + p.qk_rope_head_dim, p.v_head_dim, kWidest);
    }
  } else if (p.kv_lora_rank + p.qk_rope_head_dim > any_widest()) {
    return reason("kv_lora_rank + qk_rope_head_dim %d: kernels take up to %d", p.kv_lora_rank + p.qk_rope_head_dim,
                  any_widest());
  }
  return nullptr;
}

const char* cuda_create(const Params& p, void* stream_handle, CudaLayer** layer) {
  *layer = nullptr;
  std::unique_ptr<CudaLayer> made(new (std::nothrow) CudaLayer);
  if (!made) return "no memory for the layer";
  cudaError_t status = device_info(&made->device);
  if (status != cudaSuccess) return failed("reading the device's properties", status);
  if (const char* refused = cuda_refusal(p, made->device.capability)) return refused;
  if (p.kv_b_weight) {
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    status = cudaMalloc(&made->kv_b, weight_bytes(p));
    if (status != cudaSuccess) return failed("memory for the weights", status);
    status = cudaMemcpyAsync(made->kv_b, p.kv_b_weight, weight_bytes(p), cudaMemcpyDeviceToDevice, stream);
    if (status != cudaSuccess) {
      cudaFree(made->kv_b);
      return failed("copying the weights", status);
    }
  }
  *layer = made.release();
  return nullptr;
}

void cuda_destroy(CudaLayer* layer) {
  if (!layer) return;
  if (layer->kv_b) cudaFree(layer->kv_b);
  delete layer;
}

size_t cuda_workspace_bytes(const CudaLayer* layer, const Params& p) {
  return static_cast<size_t>(workspace_of(p, layer->device).total);
}

const char* cuda_core(CudaLayer* layer, const Params& p, void* workspace, void* stream) {
  if (path_of(p, layer->device) == Path::kAny) return "no attention of its own here";
  return Run(*layer, p, workspace, static_cast<cudaStream_t>(stream), true)();
}

const char* cuda_forward(CudaLayer* layer, const Params& p, void* workspace, void* stream) {
  if (const char* refused = cuda_refusal(p, layer->device.capability)) return refused;
  if (p.batch < 0 || p.seq_len < 0 || p.past_len < 0) return "batch, seq_len and past_len must not be negative";
  if (p.static_cache && p.batch > 0 && capacity(p) < p.seq_len) {
    return reason("%lld new tokens: the cache has room for %lld", static_cast<long long>(p.seq_len),
                  static_cast<long long>(capacity(p)));
  }
  return Run(*layer, p, workspace, static_cast<cudaStream_t>(stream))();
}

}  // namespace deltafuse::mla
