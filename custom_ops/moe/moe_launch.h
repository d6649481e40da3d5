// What the CUDA kernels of GroupedQMoE share with their dispatch: the packed weights' layout, arguments, launch
// functions.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "moe.h"

namespace deltafuse::moe {

constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 32;
constexpr int kCounters = 4;    // two chains of two products
constexpr int kUnitRows = 64;   // rows that a warpgroup's product takes
constexpr int kTileRows = 256;  // rows of a block's tile: four units

// How packed weights are stored. kPlain: the activations' type.
enum class Pack : int32_t { kPlain = 0, kInt4 = 1, kInt8 = 2, kFloat8 = 3 };

// One matrix of all experts, cut into stages: 256 rows by 128 columns (kPlain: 64). A stage holds four units of 64 rows
// in the order in which a warpgroup wants them, then what belongs to each unit's rows: scales, zero points. Stages of a
// tile lie one after the other, so that one bulk copy fetches one. Rows and columns are padded with zeros. See
// NOTES.md.
struct Packed {
  const unsigned char* data = nullptr;
  const float* multiplier = nullptr;  // one an expert: scales are stored divided by it (float16 only), else null
  Pack pack = Pack::kPlain;
  int32_t sub = 1;    // scales of a row and stage: 1, or 4 (one for 32 columns)
  int32_t zeros = 0;  // 1: zero points follow the scales; 0: they are `middle`
  int32_t count = 0;  // experts
  int32_t rows = 0, cols = 0;
  int32_t gated = 0;  // 1: rows are channels' gates, then their ups, stored beside each other
  int32_t tiles = 0;  // of 256 rows
  int32_t stages = 0;
  int32_t payload = 0, tail = 0;  // bytes of a unit
  __host__ __device__ int stage_bytes() const { return 4 * (payload + tail); }
  __host__ __device__ int64_t tile_bytes() const { return int64_t(stages) * stage_bytes(); }
  __host__ __device__ int64_t expert_bytes() const { return tiles * tile_bytes(); }
  __host__ __device__ int channels() const { return gated ? rows / 2 : rows; }
  __host__ __device__ int padded_channels() const { return tiles * (gated ? kTileRows / 2 : kTileRows); }
  __host__ __device__ int blocks() const { return (cols + 127) / 128; }  // of 128 columns
  size_t bytes() const { return static_cast<size_t>(count * expert_bytes()); }
};

inline int size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

struct Activity {  // what happens between the two products
  Activation kind;
  int32_t gated;
  Clamp clamp;
  float gate_limit, up_limit;
};

struct RouterArgs {
  const void* x;
  const void* weight;  // [E, D] or null
  const void* given;   // logits [N, E] or null
  const float* router_bias;
  const float* expert_bias;
  DType x_type, weight_type, given_type;
  int32_t tokens, experts, top_k, hidden;
  int32_t n_group, topk_group, group_top, masked_score_zero, masked_weights, softmax, norm_topk_prob;
  float norm_eps, scaling;
  // outputs: of the logits' kernel, and of the selection
  float* logits;       // [N, E] where there is a weight
  int64_t* ids_out;    // may be null
  float* weights_out;  // may be null
};

// A block's tokens of one expert in the grouped products.
struct TokenTile {
  int32_t expert, start, count, unused;
};

// Experts begin at multiples of 8 rows.
__host__ __device__ inline int arranged_rows(int count) { return (count + 7) / 8 * 8; }

struct PermuteArgs {   // what the experts' products need, from the chosen ids
  int32_t* ids;        // [N, k]
  float* weights;      // [N, k]
  int32_t* positions;  // [N, k]: row of the pair in the order by expert
  int32_t* sorted;     // token of each row; experts begin at multiples of 8
  int32_t* histogram;  // [E, blocks]
  int32_t* totals;     // [E]
  uint32_t* barrier;   // zero before
  uint32_t* zeros;     // what the products want to be zero before
  int32_t zero_count;
  bool barrier_set;  // the barrier is zero already
  // [N, kFew]: the experts that can be among a token's (see FastLogits); or null
  const uint16_t* few;
  TokenTile* tiles;
  int32_t* num_tiles;
  int32_t tile_tokens;
  int32_t by_size;  // 1: the largest tiles first
  int32_t blocks;
};

// How prompts are driven on Hopper; NOTES.md says what each is for.
struct PromptTuning {
  int32_t tokens = 0;         // of a tile at most; 0: as many as the format allows
  int32_t stages = 0;         // in flight; 0: as many as fit
  int32_t dynamic = 1;        // tiles are taken from a counter; 0: dealt out in advance
  int32_t keep_weights = 0;   // 0: weights that are read once leave the L2 first
  int32_t few = 32;           // experts with so many tokens on average, or fewer, take integers' kernel for few tokens
  int32_t merge = 1;          // the shared expert's tiles lie among the experts'
  int32_t by_size = 0;        // tiles of about the same size follow each other (not of plain numbers)
  int32_t fast_logits = 512;  // from so many tokens on most logits come from the bfloat16 tensor cores; 0: never
};

struct GemmArgs {
  Packed weights;
  // The right operand: rows of x_stride bytes. Float8 rows have a scale each.
  const void* x;
  int64_t x_stride;
  const int32_t* rows;   // row of x of each sorted row, or null: the same
  int32_t x_cols;        // elements of a row that are there: a multiple of 16 bytes
  const float* x_scale;  // float8: of each row of x
  const TokenTile* tiles;
  const int32_t* num_tiles;
  // Hopper: the shared expert in the same launch, with weights packed alike; count 0: none.
  Packed shared;
  int32_t shared_rows, shared_x, shared_out;  // how many; the first in x and in out
  int32_t tile_tokens;                        // of a tile at most
  uint32_t* counter;                          // of tiles; zero before
  PromptTuning tuning;
  int32_t activate;  // 1: the first product, with the activation; 0: the second
  Activity activity;
  void* out;
  int64_t out_stride;  // elements
  int32_t out_cols;    // columns that are stored
};

// What one launch on Hopper multiplies: a product alone, or both of a chain, whose weights are packed alike. The second
// one's tiles begin while the first one's end.
struct GemmPair {
  GemmArgs product[2];
  int32_t count;
  // How many tiles of the first product are stored, of each of the list's tiles of tokens, then of each of the shared
  // expert's; zero before.
  uint32_t* stored;
};

struct CombineArgs {
  const void* out;  // [N * k, D]
  int64_t out_stride;
  const int32_t* positions;
  const float* weights;
  const void* shared;  // [N, D] or null
  int64_t shared_stride;
  const void* x;
  const void* shared_gate;  // or null
  DType shared_gate_type;
  void* y;
  int32_t tokens, top_k, hidden;
};

struct DeviceInfo {
  int capability = 0, shared_bytes = 0, multiprocessors = 0;
  bool wgmma = false;  // the kernels for 9.0a are compiled in and this is such a device
};
cudaError_t device_info(DeviceInfo* info);

// Each returns the status of its launches.
cudaError_t launch_pack(const Matrix& from, const Packed& to, float* multiplier, DType dtype, cudaStream_t stream);
cudaError_t launch_logits(const RouterArgs& args, const DeviceInfo& device, cudaStream_t stream);
cudaError_t launch_select(const RouterArgs& args, const PermuteArgs& permute, const DeviceInfo& device,
                          cudaStream_t stream);
int select_blocks(int tokens, const DeviceInfo& device);
// Rows of x [rows, cols] with a stride that kernels can load 16 bytes from; the rest is zeros.
cudaError_t launch_pad(const void* x, void* out, int64_t rows, int cols, int padded, int element, cudaStream_t stream);
// Rows of T as float8, a scale for each; columns that are not there are zeros. cols and x_stride are multiples of 8.
struct Float8Args {
  const void* x;
  int64_t x_stride;  // elements
  int32_t cols, blocks;
  int64_t rows;
  uint8_t* out;  // [rows, blocks * 128]
  float* scale;  // [rows]
};
cudaError_t launch_float8(const Float8Args& args, DType dtype, const DeviceInfo& device, cudaStream_t stream);
cudaError_t launch_shared_tiles(TokenTile* tiles, int32_t* num_tiles, int tokens, int tile_tokens, cudaStream_t stream);
cudaError_t launch_gemm_sm90(const GemmPair& args, DType dtype, const DeviceInfo& device, cudaStream_t stream);
cudaError_t launch_gemm_sm80(const GemmArgs& args, DType dtype, int64_t max_tiles, cudaStream_t stream);
// Of a tile, at most, in a call of so many tokens that gives experts `average` of them.
int gemm_sm90_tokens(Pack pack, int64_t tokens, int64_t average);
PromptTuning& prompt_tuning();   // the process's
constexpr int kGemmTokens = 64;  // the same of the kernel for all GPUs
bool gemm_sm90_compiled();
cudaError_t compiled_capability(int* capability);
// The router alone, for benchmarks and tests: steps 1 logits, 2 selection, 4 the first pass of fast logits. Logits lie
// at the workspace's beginning.
size_t route_workspace_bytes(const Params& params);
const char* cuda_route(const Params& params, int steps, void* workspace, void* stream);
cudaError_t launch_combine(const CombineArgs& args, DType dtype, const DeviceInfo& device, cudaStream_t stream);

}  // namespace deltafuse::moe
