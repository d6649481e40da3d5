// What the CUDA kernels of KDA share with their dispatch: launch functions and the workspace's layout.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kda.h"

namespace deltafuse::kda {

constexpr int kChunk = 64;       // tokens of one chunk
constexpr int kSlice = 32;       // value columns of one block of the scan and of the decode kernel
constexpr int kTileBytes = 512;  // one 16 x 16 tile of 16-bit elements in the order a warp's matrix operand wants

// How sequences lie in the rows of q, k, v and in the workspace's chunks ("slots").
struct Sequences {
  const void* cu_seqlens = nullptr;
  int64_t seq_len = 0;  // tokens of a row of the batch, or of all rows together with cu_seqlens
  int64_t num_seqs = 0;
  int32_t is_int64 = 0;

  // Slots that can be needed: exact for a dense batch, an upper bound with cu_seqlens (its values are on the device).
  int64_t slots() const {
    return cu_seqlens ? seq_len / kChunk + num_seqs : num_seqs * ((seq_len + kChunk - 1) / kChunk);
  }
};

// Sizes of what one chunk of one value head leaves in the workspace for the scan.
struct UnitLayout {
  int terms, k, v;  // terms: 16-bit terms that stand for one number
  __host__ __device__ constexpr int64_t region() const {
    return int64_t(kTileBytes) * 4 * (k / 16);
  }  // W, Q or E, one term
  __host__ __device__ constexpr int64_t m_region() const { return int64_t(kTileBytes) * 10; }  // M, lower triangle
  __host__ __device__ constexpr int64_t q_offset() const { return terms * region(); }
  __host__ __device__ constexpr int64_t e_offset() const { return 2 * terms * region(); }
  __host__ __device__ constexpr int64_t m_offset() const { return 3 * terms * region(); }
  __host__ __device__ constexpr int64_t decay_offset() const { return m_offset() + terms * m_region(); }
  __host__ __device__ constexpr int64_t bytes() const { return decay_offset() + int64_t(4) * k; }
  __host__ __device__ constexpr int64_t u_tile() const { return int64_t(kTileBytes) * 4; }  // 16 columns, one term
  __host__ __device__ constexpr int64_t u_bytes() const { return terms * u_tile() * (v / 16); }
};

// Two bf16 terms stand for a float32; a 16-bit type is its own operand.
inline int terms_of(DType dtype) { return dtype == DType::kFloat32 ? 2 : 1; }
inline int size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// q, k, v as the recurrence takes them: the caller's, or the convolution's output.
struct Rows {
  const void *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
};

// Each returns the status of its launch.
// Convolution, or a plain copy to dense rows when conv_width is 0; out: [tokens, C] of T.
cudaError_t launch_conv(const Params& params, const Sequences& seqs, void* out, cudaStream_t stream);
cudaError_t launch_conv_state(const Params& params, const Sequences& seqs, cudaStream_t stream);
// Chunks' operands W, Q, E, M, decay and U.
cudaError_t launch_prepare(const Params& params, const Sequences& seqs, const Rows& rows, void* units, void* u,
                           cudaStream_t stream);
// The serial pass over chunks: states and outputs.
cudaError_t launch_scan(const Params& params, const Sequences& seqs, const void* units, const void* u,
                        cudaStream_t stream);
// RMS norm and output gate, in place in params.o.
cudaError_t launch_epilogue(const Params& params, int64_t tokens, cudaStream_t stream);
// One token a sequence, everything in one launch; convolve: apply the convolution to params' own q, k, v.
cudaError_t launch_decode(const Params& params, const Rows& rows, bool convolve, cudaStream_t stream);

// What the kernels that run here were compiled for (90 for 9.0): less than the device's own where a library built for
// older GPUs runs on a newer one, and that decides which instructions are there.
cudaError_t compiled_capability(int* capability);

// Cached per device: the capability that device and compiled kernels share, and the shared memory a block may ask for.
struct DeviceInfo {
  int capability = 0, shared_bytes = 0, multiprocessors = 0;
};
cudaError_t device_info(DeviceInfo* info);

}  // namespace deltafuse::kda
