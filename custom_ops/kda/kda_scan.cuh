// Prefill, second kernel: the serial pass. One block for a sequence, a value head and 32 value columns walks over the
// chunks, kWarps warps for each 16 of the columns. All is transposed: a warp's matrix rows are value columns, so that
// what one product leaves in registers is the next one's left operand:
//   D^T = U^T - S^T W^T      O^T = S^T Q^T + D^T M^T      S^T <- S^T diag(exp G_C) + D^T E
// The warps of 16 columns share the work by tokens for D and O and by channels for S, and exchange D and S (as 16-bit
// operands) through shared memory. S itself stays in registers in float32.
#pragma once

#include "kda_device.cuh"

namespace deltafuse::kda {

struct ScanArgs {
  Sequences seqs;
  const unsigned char *units, *u;
  const void* initial_state;
  void *final_state, *o;
  int32_t v_heads, v;
  DType state_dtype;
  int32_t state_v_first;
  int32_t stages;
};

constexpr int kSmallestShared = 99 * 1024;  // what every GPU from sm_80 on gives a block

template <typename N, int K>
struct ScanShape {
  static constexpr int kStrips = kSlice / 16;
  __host__ __device__ static constexpr UnitLayout unit(int v) { return UnitLayout{N::kTerms, K, v}; }
  __host__ __device__ static constexpr int u_bytes() { return kStrips * N::kTerms * kTileBytes * 4; }
  __host__ __device__ static constexpr int stage_bytes() {
    return static_cast<int>(UnitLayout{N::kTerms, K, 0}.bytes()) + u_bytes();
  }
  __host__ __device__ static constexpr int state_bytes() { return kStrips * N::kTerms * (K / 16) * kTileBytes; }
  __host__ __device__ static constexpr int delta_bytes() { return kStrips * N::kTerms * 4 * kTileBytes; }
  __host__ __device__ static constexpr int fixed_bytes() { return state_bytes() + delta_bytes() + 128; }
};

// One chunk's operands into a stage of shared memory: by the bulk copy engine where there is one.
template <typename N, int K>
__device__ __forceinline__ void fetch(const ScanArgs& args, unsigned char* stage, int64_t index, int slice,
                                      uint64_t* ready, int threads) {
  using Shape = ScanShape<N, K>;
  const UnitLayout unit = Shape::unit(args.v);
  const unsigned char* source = args.units + index * unit.bytes();
  const unsigned char* u_source = args.u + index * unit.u_bytes() + int64_t(slice) * Shape::u_bytes();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    ptx::mbar_expect(ready, Shape::stage_bytes());
    ptx::bulk_copy(stage, source, static_cast<uint32_t>(unit.bytes()), ready);
    ptx::bulk_copy(stage + unit.bytes(), u_source, Shape::u_bytes(), ready);
  }
#else
  for (int i = threadIdx.x * 16; i < unit.bytes(); i += threads * 16) ptx::cp_async16(stage + i, source + i);
  for (int i = threadIdx.x * 16; i < Shape::u_bytes(); i += threads * 16) {
    ptx::cp_async16(stage + unit.bytes() + i, u_source + i);
  }
#endif
}

// kDirect: operands come straight from global memory, for blocks whose shared memory cannot hold a chunk.
template <typename N, int K, int kWarps, bool kDirect>
__global__ void __launch_bounds__(kSlice / 16 * kWarps * 32, 1) scan_kernel(const ScanArgs args) {
  using T = typename N::T;
  using Shape = ScanShape<N, K>;
  constexpr int kTerms = N::kTerms, kThreads = Shape::kStrips * kWarps * 32;
  constexpr int kTokenTiles = 4 / kWarps;         // of 16 tokens, this warp's share
  constexpr int kChannelTiles = K / 16 / kWarps;  // of 16 channels
  KDA_DYNAMIC_SHARED(shared);
  const UnitLayout unit = Shape::unit(args.v);

  const int slices = args.v / kSlice;
  const int slice = blockIdx.x % slices;
  const int head = blockIdx.x / slices % args.v_heads;
  const int64_t seq = blockIdx.x / slices / args.v_heads;
  const Span span = span_of(args.seqs, seq);
  const int64_t chunks = (span.end - span.begin + kChunk - 1) / kChunk;

  const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
  const int strip = threadIdx.x / 32 / kWarps, part = threadIdx.x / 32 % kWarps;
  unsigned char* state_tiles = shared + strip * (Shape::state_bytes() / Shape::kStrips);
  unsigned char* delta_tiles = shared + Shape::state_bytes() + strip * (Shape::delta_bytes() / Shape::kStrips);
  uint64_t* ready = reinterpret_cast<uint64_t*>(shared + Shape::state_bytes() + Shape::delta_bytes());
  unsigned char* stages = shared + Shape::fixed_bytes();
  constexpr int64_t kStateTerm = (K / 16) * kTileBytes, kDeltaTerm = 4 * kTileBytes;
  const int value0 = slice * kSlice + value_channel(strip, row),
            value1 = slice * kSlice + value_channel(strip, row + 8);

  const auto index_of = [&](int64_t chunk) { return (span.slot + chunk) * args.v_heads + head; };
  const auto state_index = [&](int channel, int value) {
    const int64_t base = (seq * args.v_heads + head) * K * args.v;
    return base + (args.state_v_first ? int64_t(value) * K + channel : int64_t(channel) * args.v + value);
  };

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.stages; ++i) ptx::mbar_init(ready + i, 1);
    ptx::mbar_init_fence();
  }
  __syncthreads();
#endif
  if constexpr (!kDirect) {
    for (int i = 0; i < (args.stages > 1 ? args.stages - 1 : 1); ++i) {
      if (i < chunks) fetch<N, K>(args, stages + i * Shape::stage_bytes(), index_of(i), slice, ready + i, kThreads);
      ptx::cp_async_commit();
    }
  }

  float state[kChannelTiles][2][4];
#pragma unroll
  for (int i = 0; i < kChannelTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int channel = key_channel(part * kChannelTiles + i, (e / 4) * 8 + 2 * t + e % 2);
      const int value = e / 2 % 2 ? value1 : value0;
      state[i][e / 4][e % 4] =
          args.initial_state ? load_any(args.initial_state, state_index(channel, value), args.state_dtype) : 0.f;
    }
  }
  const auto publish_state = [&]() {  // rows are value columns, pairs run along channels: the accumulator's own order
#pragma unroll
    for (int i = 0; i < kChannelTiles; ++i) {
      const auto& s = state[i];
      store_tile<N>(state_tiles + (part * kChannelTiles + i) * kTileBytes, kStateTerm, lane,
                    make_tile<N>(s[0][0], s[0][1], s[0][2], s[0][3], s[1][0], s[1][1], s[1][2], s[1][3]));
    }
  };
  publish_state();

  int buffer = 0, parity = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    // This chunk's operands are there, and every warp has left the stage that is filled next.
    const unsigned char *w, *u;
    if constexpr (kDirect) {
      __syncthreads();
      w = args.units + index_of(chunk) * unit.bytes();
      u = args.u + index_of(chunk) * unit.u_bytes() + int64_t(slice) * Shape::u_bytes();
    } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      ptx::mbar_wait(ready + buffer, parity);
#else
      if (args.stages == 3) {
        ptx::cp_async_wait<1>();
      } else {
        ptx::cp_async_wait<0>();
      }
#endif
      __syncthreads();
      if (args.stages > 1 && chunk + args.stages - 1 < chunks) {
        const int next = buffer == 0 ? args.stages - 1 : buffer - 1;
        fetch<N, K>(args, stages + next * Shape::stage_bytes(), index_of(chunk + args.stages - 1), slice, ready + next,
                    kThreads);
      }
      ptx::cp_async_commit();
      w = stages + buffer * Shape::stage_bytes();
      u = w + unit.bytes();
    }
    u += strip * kTerms * unit.u_tile();
    const unsigned char *q = w + unit.q_offset(), *e = w + unit.e_offset(), *m = w + unit.m_offset();
    const float* decay = reinterpret_cast<const float*>(w + unit.decay_offset());

    // D of this warp's tokens.
    float delta[kTokenTiles][2][4], o[kTokenTiles][2][4] = {};
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      const Tile<N> x = load_tile<N>(u + (part * kTokenTiles + i) * kTileBytes, unit.u_tile(), lane);
      uint32_t a[kTerms], b[kTerms], c[kTerms], d[kTerms];
#pragma unroll
      for (int j = 0; j < kTerms; ++j) a[j] = x.term[j].x, b[j] = x.term[j].y, c[j] = x.term[j].z, d[j] = x.term[j].w;
      const float2 fa = join<N>(a), fb = join<N>(b), fc = join<N>(c), fd = join<N>(d);
      delta[i][0][0] = fa.x, delta[i][0][1] = fa.y, delta[i][0][2] = fb.x, delta[i][0][3] = fb.y;
      delta[i][1][0] = fc.x, delta[i][1][1] = fc.y, delta[i][1][2] = fd.x, delta[i][1][3] = fd.y;
    }
#pragma unroll
    for (int c = 0; c < K / 16; ++c) {
      const Tile<N> s = load_tile<N>(state_tiles + c * kTileBytes, kStateTerm, lane);
#pragma unroll
      for (int i = 0; i < kTokenTiles; ++i) {
        const int tile = (part * kTokenTiles + i) * (K / 16) + c;
        multiply_rows<N>(delta[i][0], delta[i][1], s, load_tile<N>(w + tile * kTileBytes, unit.region(), lane));
      }
    }
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      const auto& d = delta[i];
      store_tile<N>(delta_tiles + (part * kTokenTiles + i) * kTileBytes, kDeltaTerm, lane,
                    make_tile<N>(d[0][0], d[0][1], d[0][2], d[0][3], d[1][0], d[1][1], d[1][2], d[1][3]));
    }
#pragma unroll
    for (int c = 0; c < K / 16; ++c) {
      const Tile<N> s = load_tile<N>(state_tiles + c * kTileBytes, kStateTerm, lane);
#pragma unroll
      for (int i = 0; i < kTokenTiles; ++i) {
        const int tile = (part * kTokenTiles + i) * (K / 16) + c;
        multiply_rows<N>(o[i][0], o[i][1], s, load_tile<N>(q + tile * kTileBytes, unit.region(), lane));
      }
    }
    ptx::bar_sync(1 + strip, kWarps * 32);  // D is there, and nobody reads the old S any more

    // S of this warp's channels.
    Tile<N> d[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = load_tile<N>(delta_tiles + i * kTileBytes, kDeltaTerm, lane);
#pragma unroll
    for (int i = 0; i < kChannelTiles; ++i) {
      const int tile = part * kChannelTiles + i;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 f = *reinterpret_cast<const float2*>(decay + tile * 16 + half * 8 + 2 * t);
        state[i][half][0] *= f.x, state[i][half][1] *= f.y, state[i][half][2] *= f.x, state[i][half][3] *= f.y;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < kChannelTiles; ++i) {
        const int tile = (part * kChannelTiles + i) * 4 + j;
        multiply_parts<N>(state[i][0], state[i][1], d[j], load_tile<N>(e + tile * kTileBytes, unit.region(), lane));
      }
    }
    publish_state();

    // O of this warp's tokens.
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      const int tile = part * kTokenTiles + i;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j <= tile) {
          multiply_rows<N>(o[i][0], o[i][1], d[j],
                           load_tile<N>(m + (tile * (tile + 1) / 2 + j) * kTileBytes, unit.m_region(), lane));
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // turn 8 tokens round: a lane gets one token's four neighbouring columns
        const float (&x)[4] = o[i][half];
        float y[4];
        if constexpr (kTerms == 1) {
          const float2 f = unpack(ptx::transpose8(pack(x[0], x[1], T())), T());
          const float2 g = unpack(ptx::transpose8(pack(x[2], x[3], T())), T());
          y[0] = f.x, y[1] = f.y, y[2] = g.x, y[3] = g.y;
        } else {
          uint32_t a[kTerms], b[kTerms];
          split<N>(x[0], x[1], a), split<N>(x[2], x[3], b);
#pragma unroll
          for (int j = 0; j < kTerms; ++j) a[j] = ptx::transpose8(a[j]), b[j] = ptx::transpose8(b[j]);
          const float2 f = join<N>(a), g = join<N>(b);
          y[0] = f.x, y[1] = f.y, y[2] = g.x, y[3] = g.y;
        }
        const int64_t token = span.begin + chunk * kChunk + tile * 16 + half * 8 + row;
        if (token < span.end) {
          T* o_row = static_cast<T*>(args.o) + (token * args.v_heads + head) * args.v + slice * kSlice;
          store4(o_row + strip * 16 + t * 4, y);
        }
      }
    }
    if constexpr (!kDirect) {
      if (args.stages == 1 && chunk + 1 < chunks) {
        __syncthreads();
        fetch<N, K>(args, stages, index_of(chunk + 1), slice, ready, kThreads);
        ptx::cp_async_commit();
      }
      if (++buffer == args.stages) buffer = 0, parity ^= 1;
    }
  }

  if (args.final_state) {
#pragma unroll
    for (int i = 0; i < kChannelTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int channel = key_channel(part * kChannelTiles + i, (e / 4) * 8 + 2 * t + e % 2);
        store_any(args.final_state, state_index(channel, e / 2 % 2 ? value1 : value0), args.state_dtype,
                  state[i][e / 4][e % 4]);
      }
    }
  }
}

template <typename N, int K, bool kDirect>
cudaError_t launch_scan_as(const ScanArgs& args, int bytes, cudaStream_t stream) {
  constexpr int kWarps = 4;
  const int64_t blocks = args.seqs.num_seqs * args.v_heads * (args.v / kSlice);
  if (blocks == 0) return cudaSuccess;
  const auto kernel = scan_kernel<N, K, kWarps, kDirect>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(blocks), kSlice / 16 * kWarps * 32, bytes, stream>>>(args);
  return cudaGetLastError();
}

// As many stages (up to three) as fit into a block's shared memory; none: operands straight from global memory.
template <typename N, int K>
cudaError_t launch_scan_fitting(ScanArgs args, const DeviceInfo& device, cudaStream_t stream) {
  using Shape = ScanShape<N, K>;
  for (args.stages = 3; args.stages > 0; --args.stages) {
    const int bytes = Shape::fixed_bytes() + args.stages * Shape::stage_bytes();
    if (bytes <= device.shared_bytes) return launch_scan_as<N, K, false>(args, bytes, stream);
  }
  if constexpr (Shape::fixed_bytes() + Shape::stage_bytes() > kSmallestShared) {
    return launch_scan_as<N, K, true>(args, Shape::fixed_bytes(), stream);
  } else {
    return cudaErrorInvalidConfiguration;
  }
}

template <typename N>
cudaError_t launch_scan_for(const ScanArgs& args, int k, const DeviceInfo& device, cudaStream_t stream) {
  switch (k) {
    case 64:
      return launch_scan_fitting<N, 64>(args, device, stream);
    case 128:
      return launch_scan_fitting<N, 128>(args, device, stream);
    case 192:
      return launch_scan_fitting<N, 192>(args, device, stream);
    case 256:
      return launch_scan_fitting<N, 256>(args, device, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace deltafuse::kda
