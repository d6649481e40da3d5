// What the CUDA kernels of LatentAttention share with their dispatch: views of caches, launch functions, and how a
// sequence is cut for decode.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "mla.h"

#ifdef __CUDACC__
#define MLA_BOTH __host__ __device__ __forceinline__
#else
#define MLA_BOTH inline
#endif

namespace deltafuse::mla {

constexpr int kShortWindow = 16;  // calls of up to so many tokens a row attend with absorbed weights
constexpr int kFloat8Group = 128;

inline int size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// How many tokens a row of the batch has, new ones included.
struct Lengths {
  const void* past = nullptr;  // int32 or int64 [B], or null: past_len for all
  int32_t is_int64 = 0;
  int64_t past_len = 0, seq_len = 0, capacity = 0;

  // Tokens before the new ones, as the caller has them; valid() says whether they make sense.
  MLA_BOTH int64_t given(int64_t b) const {
    if (!past) return past_len;
    return is_int64 ? static_cast<const int64_t*>(past)[b] : static_cast<const int32_t*>(past)[b];
  }
  MLA_BOTH bool valid(int64_t n) const { return n >= 0 && n <= capacity - seq_len; }
  // What the kernels go on with: 0 where the value makes no sense.
  MLA_BOTH int64_t before(int64_t b) const { return before_of(given(b)); }
  MLA_BOTH int64_t before_of(int64_t n) const { return valid(n) ? n : 0; }
  MLA_BOTH int64_t total(int64_t b) const { return total_of(given(b)); }
  MLA_BOTH int64_t total_of(int64_t given) const {
    const int64_t n = before_of(given) + seq_len;
    return n < capacity ? n : capacity;
  }
};

// Where token t of row b lies in a cache of latents (or in what stands for one).
struct View {
  void* latent = nullptr;                // T, or codes
  void* rope = nullptr;                  // T
  float* scale = nullptr;                // int8: [R]; float8: [rows, groups]
  int64_t latent_row = 0, rope_row = 0;  // elements between tokens
  int64_t batch_rows = 0;                // tokens between rows of the batch; not paged
  CacheType type = CacheType::kSame;
  const int32_t* block_table = nullptr;
  int64_t num_blocks = 0, block_size = 0, max_blocks = 0;

  // The token's place in the buffers, or -1 where its block id makes no sense.
  MLA_BOTH int64_t row(int64_t b, int64_t t) const {
    if (!block_table) return b * batch_rows + t;
    const uint32_t size = static_cast<uint32_t>(block_size), slot = static_cast<uint32_t>(t) / size;
    if (slot >= max_blocks) return -1;
    const int64_t id = block_table[b * max_blocks + slot];
    return id < 0 || id >= num_blocks ? -1 : id * size + static_cast<uint32_t>(t) % size;
  }
};

// Decode: a sequence is cut by its own length alone, at three heights: tiles of 64 tokens, sections of tiles, chapters
// of sections. A tile's sum is always made from nothing, a section adds its tiles' sums in order, a chapter its
// sections', and the sequence its chapters'; each sum is rounded to what travels through memory before it is added. A
// block makes a tile, a section or a chapter (Grain), the second kernel the rest, with the same operations in the same
// order: the bits are the same whichever was chosen, so a row does not see how many rows there are.
enum class Grain : int32_t { kTile = 0, kSection = 1, kChapter = 2 };

struct Cut {
  int base = 0, end = 0;  // tokens that any query of the row may see; base is a multiple of kTile
  int tiles = 0;
  int section = 0;        // tiles
  int chapter_tiles = 0;  // what a chapter should have, of a short sequence; a power of two

  // Of a sequence: parts at most, and chapters; a chapter of a long sequence has so many sections.
  static constexpr int kTile = 64, kMaxParts = 128, kLongChapter = 8, kMaxChapters = kMaxParts / kLongChapter;

  // x / y rounded up, for x + y below 2^20. A half more than the dividend keeps its quotient further from whole numbers
  // than an approximate reciprocal is off.
  MLA_BOTH static int over(int x, int y) {
    x += y - 1;
#ifdef __CUDA_ARCH__
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(static_cast<float>(y)));
    return __float2int_rd((static_cast<float>(x) + 0.5f) * reciprocal);
#else
    return x / y;
#endif
  }
  // section_tiles, chapter_tiles: what they should have (DecodePlan).
  MLA_BOTH static Cut of(int total, int seq_len, int window, int section_tiles, int chapter_tiles) {
    Cut c;
    c.end = total;
    if (window > 0) {
      const int first = total - seq_len - window + 1;
      c.base = first > 0 ? first / kTile * kTile : 0;
    }
    c.tiles = (c.end - c.base + kTile - 1) / kTile;
    if (c.tiles < 1) c.tiles = 1;
    const int least = (c.tiles + kMaxParts - 1) / kMaxParts, some = section_tiles / 4;
    c.section = c.short_one() ? section_tiles : least > some ? least : some;
    c.chapter_tiles = chapter_tiles;
    return c;
  }
  // Chapters of so many tiles, at most, of a short sequence; a power of two.
  MLA_BOTH static int wanted(int tiles, int chapter_tiles) {
#ifdef __CUDA_ARCH__
    const int n = (tiles + chapter_tiles / 2) >> (31 - __clz(chapter_tiles));
#else
    const int n = (tiles + chapter_tiles / 2) / chapter_tiles;
#endif
    return n < 1 ? 1 : n;
  }
  // A sequence's parts at most, for a capacity.
  MLA_BOTH static int most_parts(int64_t capacity, Grain grain, int section_tiles, int chapter_tiles) {
    const int tiles = static_cast<int>((capacity + kTile - 1) / kTile + 1);  // a window may begin within a tile
    if (grain == Grain::kChapter) {
      const int few = wanted(tiles < kMaxParts ? tiles : kMaxParts, chapter_tiles);
      return tiles > kMaxParts && few < kMaxChapters ? kMaxChapters : few;
    }
    if (tiles > kMaxParts) return kMaxParts;
    return grain == Grain::kTile ? tiles : over(tiles, section_tiles);
  }
  // Short enough that its tiles may be parts; of a longer one the smallest parts are sections.
  MLA_BOTH bool short_one() const { return tiles <= kMaxParts; }
  MLA_BOTH int sections() const { return over(tiles, section); }
  // Sections of a chapter.
  MLA_BOTH int chapter() const { return chapter_of(sections()); }
  MLA_BOTH int chapter_of(int sections) const {
    return short_one() ? over(sections, wanted(tiles, chapter_tiles)) : kLongChapter;
  }
  MLA_BOTH int parts(Grain grain) const {
    if (grain == Grain::kTile && short_one()) return tiles;
    return grain == Grain::kChapter ? over(sections(), chapter()) : sections();
  }
};
// How many parts a batch has in sections and in chapters, and the tiles of the longest one.
struct Tally {
  int parts[2] = {0, 0}, longest[2] = {0, 0};

  MLA_BOTH void add(const Cut& cut) {
    const int sections = cut.sections(), chapter = cut.chapter_of(sections);
    const int spans[2] = {cut.section, cut.section * chapter};
    parts[0] += sections, parts[1] += Cut::over(sections, chapter);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int g = 0; g < 2; ++g) {
      const int tiles = spans[g] < cut.tiles ? spans[g] : cut.tiles;
      longest[g] = longest[g] > tiles ? longest[g] : tiles;
    }
  }
};
constexpr int kLatent = 512, kRotary = 64;

// The pass over new tokens: norm, rotation, cache write, faults.
struct TokenArgs {
  Params p;
  Lengths lengths;
  View cache;              // written at each new token's place
  int32_t by_token = 0;    // the cache's rows are the new tokens themselves, [B * S]
  void* q_rope = nullptr;  // rotated queries, element (token, head) at row * q_rope_row
  int64_t q_rope_row = 0;
  int32_t q_rope_float32 = 0;  // else T
  float* fresh = nullptr;      // not null: the new tokens' latents and rotated keys, not rounded, [tokens, R + Dr]
  // Not null: queries times q_scale, all channels of them ([tokens * H, Dn + Dr]); q_rope is then inside of it.
  void* q_scaled = nullptr;
};
cudaError_t launch_tokens(const TokenArgs& args, bool pdl, cudaStream_t stream);

// Decode, absorbed: q_nope W_uk into the first R channels of `out`'s rows of R + Dr.
struct AbsorbArgs {
  Params p;
  const void* kv_b = nullptr;
  const float* channel_scale = nullptr;  // int8 caches: [R], multiplied in
  void* out = nullptr;
  int32_t out_float32 = 0;  // else T
};
cudaError_t launch_absorb(const AbsorbArgs& args, bool pdl, cudaStream_t stream);
// o_latent W_uv and the gate, into p.o.
struct ProjectArgs {
  Params p;
  const void* kv_b = nullptr;
  const void* o_latent = nullptr;  // [tokens * H, R]
  int32_t float32 = 0;             // of o_latent, else T
};
cudaError_t launch_project(const ProjectArgs& args, bool pdl, cudaStream_t stream);
// The same two by tensor cores for 16-bit types, Dn a multiple of 32 up to 256, R of 64, Dv of 64.
bool fast_projections(const Params& p);
cudaError_t launch_absorb_fast(const AbsorbArgs& args, bool pdl, cudaStream_t stream);
cudaError_t launch_project_fast(const ProjectArgs& args, bool pdl, cudaStream_t stream);

// New tokens' keys and values by plain arithmetic, into expanded caches at [B, H, L, ...]; k_rope: rotated, T,
// [tokens, Dr]; latent: T [tokens, R].
struct ExpandArgs {
  Params p;
  Lengths lengths;
  const void* kv_b = nullptr;
  const void* latent = nullptr;
  const void* k_rope = nullptr;
  int64_t latent_row = 0, rope_row = 0;
  void* key = nullptr;
  void* value = nullptr;
  int64_t cache_rows = 0;    // L
  const void* kv = nullptr;  // not null: the new tokens' keys and values, made already: [tokens, H, Dn + Dv]
};
cudaError_t launch_expand(const ExpandArgs& args, cudaStream_t stream);

// Attention by plain arithmetic, for everything that the fast kernels do not take. absorbed: every head reads the
// latents (queries in float32, R + Dr wide; the output is float32 [tokens * H, R]); else expanded keys and values
// [B, H, L, ...], queries T from p.q with their rotated part in q_rope (T), output p.o with the gate.
struct AnyArgs {
  Params p;
  Lengths lengths;
  View cache;
  int32_t absorbed = 0;
  const float* q = nullptr;      // absorbed
  const float* fresh = nullptr;  // absorbed: null, or TokenArgs::fresh, read instead of what the cache has of them
  const void* q_rope = nullptr;  // expanded
  const void* key = nullptr;     // expanded
  const void* value = nullptr;   // expanded
  int64_t cache_rows = 0;        // expanded: L
  float* o_latent = nullptr;     // absorbed
};
cudaError_t launch_any(const AnyArgs& args, cudaStream_t stream);
int any_widest();  // the widest query or value row that launch_any takes

// Copies a paged or 8-bit cache's tokens into plain rows of T: latent [B, capacity, R], rope [B, capacity, Dr].
struct FlattenArgs {
  Params p;
  Lengths lengths;
  View cache;
  void* latent = nullptr;
  void* rope = nullptr;
};
cudaError_t launch_flatten(const FlattenArgs& args, cudaStream_t stream);

// -- sm_90a ----------------------------------------------------------------------------------------------------------
// Was this file's device code compiled for sm_90a, and does it run on the current device?
cudaError_t has_sm90a(bool* yes);

// How decode goes about a call. The host chooses all but the grain where there are two: that takes the lengths.
struct DecodePlan {
  Grain finest = Grain::kTile, coarsest = Grain::kTile;  // of the grains that there are to choose from
  int rows = 32;                                         // query rows (token and head) of a block, 32 or 64
  int row_blocks = 1;                                    // of a sequence
  int most = 0;                               // parts of the whole batch at most; the coarsest grain never has more
  int section_tiles = 8, chapter_tiles = 32;  // Cut; powers of two
  int spread = 0;  // parts are tiles, and the second kernel has a block for 16 channels of 8 rows
  // What things take, in nanoseconds: a tile for a multiprocessor alone, and where all of them fetch; a part's sums.
  int multiprocessors = 1, tile_alone = 0, tile_of_all = 0, part_sums = 0;
  float part_of_all = 1.0f;  // 1 / multiprocessors
  int64_t partial_bytes = 0, stats_bytes = 0;

  // Sections or chapters for a batch: rounds of parts, tiles as fast as a multiprocessor makes or memory brings them,
  // sums.
  MLA_BOTH float time(int parts, int longest) const {
    parts *= row_blocks;
    const int rounds = Cut::over(parts, multiprocessors);
    const float busy = static_cast<float>(parts - (rounds - 1) * multiprocessors) * part_of_all;
    const float alone = static_cast<float>(tile_alone), all = static_cast<float>(tile_of_all);
    const float full_tile = all > alone ? all : alone, last_tile = all * busy > alone ? all * busy : alone;
    const float tiles = static_cast<float>(longest);
    return static_cast<float>(rounds - 1) * (tiles * full_tile + 300.0f) + tiles * last_tile +
           static_cast<float>(parts) * static_cast<float>(part_sums);
  }
  MLA_BOTH Grain cheapest(const Tally& tally) const {
    if (tally.parts[0] > most) return coarsest;
    return time(tally.parts[0], tally.longest[0]) < time(tally.parts[1], tally.longest[1]) ? finest : coarsest;
  }
};
DecodePlan plan_decode(const Params& p, int64_t capacity, int multiprocessors);
// What tests and tune_mla.py choose instead; negative: left to plan_decode. Not while a call is under way.
struct DecodeChoice {
  int grain = -1, rows = -1, section_tiles = -1, chapter_tiles = -1;
};
extern DecodeChoice decode_choice;

struct DecodeArgs {
  Params p;
  Lengths lengths;
  View cache;
  DecodePlan plan;
  const void* q = nullptr;   // T [B * S * H, 576]
  void* partial = nullptr;   // [parts of all, row blocks, 512, rows]: bfloat16 for T bfloat16, else float32
  float* stats = nullptr;    // [parts of all, row blocks, 2, rows]: maximum (base 2), sum
  int4* places = nullptr;    // [B]: a sequence's first part, its parts, and how many of them are a chapter
  void* o_latent = nullptr;  // T [B * S * H, 512]
};
// Null, or why the tiles cannot be fetched.
const char* decode_refusal(const Params& p, const View& cache);
cudaError_t launch_decode(const DecodeArgs& args, cudaStream_t stream);

// Prompts: keys and values of all tokens, [B, L, H, Dn + Dv] = latent W, by wgmma.
struct GemmArgs {
  Params p;
  Lengths lengths;
  const void* latent = nullptr;  // T [B, rows, R], with strides
  int64_t latent_row = 0, batch_rows = 0;
  int64_t rows = 0;      // tokens of a row of the batch that may be there
  int32_t only_new = 0;  // all of them are; else as many as `lengths` says
  const void* kv_b = nullptr;
  void* kv = nullptr;
};
cudaError_t launch_expand_sm90a(const GemmArgs& args, cudaStream_t stream);

// A T tensor (d, head, token, batch) with element strides.
struct Heads {
  const void* data = nullptr;
  int64_t width = 0, heads = 0, tokens = 0, batch = 0;
  int64_t head_stride = 0, token_stride = 0, batch_stride = 0;
};
struct PromptArgs {
  Params p;
  Lengths lengths;
  Heads q, q_rope, k, k_rope, v;
  int32_t q_rope_column = 0, k_rope_column = 0, v_column = 0;
  int32_t k_rope_per_head = 0;
};
cudaError_t launch_prompt_sm90a(const PromptArgs& args, cudaStream_t stream);

// For benchmarks: the attention alone, again, after a call of cuda_forward with the same operands.
const char* cuda_core(CudaLayer* layer, const Params& params, void* workspace, void* stream);

// Cached per device: what its kernels can use.
struct DeviceInfo {
  int capability = 0, shared_bytes = 0, multiprocessors = 0;
  bool sm90a = false;
};
cudaError_t device_info(DeviceInfo* info);
cudaError_t compiled_capability(int* capability);

}  // namespace deltafuse::mla
