// Prefill, second kernel: the serial pass. One block for a sequence, a value head and 32 value columns walks over the
// chunks. All is transposed: a warp's matrix rows are value columns, so that what one product leaves in registers is
// the next one's left operand:
//   D^T = U^T - S^T W^T      O^T = S^T Q^T + D^T M^T      S^T <- S^T diag(exp G_C) + D^T E
// Four warps share the work by tokens (16 each) for D and O and by channels (a quarter each) for S, and exchange D and
// S as 16-bit operands through shared memory; S itself stays in registers in float32. What bounds a step is the shared
// memory's bandwidth, so a warp takes both halves of the columns and reads every right operand once for them.
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

constexpr int kScanWarps = 4;

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

// One chunk's operands into a stage of shared memory: by the bulk copy engine where there is one, counting towards
// `ready`, else by all threads.
template <typename N, int K>
__device__ __forceinline__ void fetch(const ScanArgs& args, unsigned char* stage, int64_t index, int slice,
                                      uint64_t* ready) {
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
  constexpr int kThreads = kScanWarps * 32;
  for (int i = threadIdx.x * 16; i < unit.bytes(); i += kThreads * 16) ptx::cp_async16(stage + i, source + i);
  for (int i = threadIdx.x * 16; i < Shape::u_bytes(); i += kThreads * 16) {
    ptx::cp_async16(stage + unit.bytes() + i, u_source + i);
  }
  ptx::cp_async_commit();
#endif
}

// kDirect: operands come straight from global memory, for blocks whose shared memory cannot hold a chunk.
template <typename N, int K, bool kDirect>
__global__ void __launch_bounds__(kScanWarps * 32, 1) scan_kernel(const ScanArgs args) {
  using T = typename N::T;
  using Shape = ScanShape<N, K>;
  constexpr int kTerms = N::kTerms, kStrips = Shape::kStrips;
  constexpr int kChannelTiles = K / 16 / kScanWarps;  // of 16 channels, this warp's share
  KDA_DYNAMIC_SHARED(shared);
  const UnitLayout unit = Shape::unit(args.v);

  const int slices = args.v / kSlice;
  const int slice = blockIdx.x % slices;
  const int head = blockIdx.x / slices % args.v_heads;
  const int64_t seq = blockIdx.x / slices / args.v_heads;
  const Span span = span_of(args.seqs, seq);
  const int64_t chunks = (span.end - span.begin + kChunk - 1) / kChunk;

  const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  unsigned char* state_tiles = shared;  // [strip][term][channel tile]
  unsigned char* delta_tiles = shared + Shape::state_bytes();
  uint64_t* ready = reinterpret_cast<uint64_t*>(shared + Shape::state_bytes() + Shape::delta_bytes());
  unsigned char* stages = shared + Shape::fixed_bytes();
  constexpr int64_t kStateTerm = (K / 16) * kTileBytes, kDeltaTerm = 4 * kTileBytes;
  constexpr int64_t kStateStrip = kTerms * kStateTerm, kDeltaStrip = kTerms * kDeltaTerm;

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
  const auto fetch_chunk = [&](int64_t chunk, int buffer) {
    if (chunk < chunks)
      fetch<N, K>(args, stages + buffer * Shape::stage_bytes(), index_of(chunk), slice, ready + buffer);
  };
  if constexpr (!kDirect) {
    for (int i = 0; i < (args.stages > 1 ? args.stages - 1 : 1); ++i) fetch_chunk(i, i);
  }

  float state[kStrips][kChannelTiles][2][4];
  const auto for_state = [&](auto visit) {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int i = 0; i < kChannelTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int channel = key_channel(warp * kChannelTiles + i, (e / 4) * 8 + 2 * t + e % 2);
          const int value = slice * kSlice + value_channel(strip, row + e / 2 % 2 * 8);
          visit(state[strip][i][e / 4][e % 4], state_index(channel, value));
        }
      }
    }
  };
  for_state(
      [&](float& x, int64_t at) { x = args.initial_state ? load_any(args.initial_state, at, args.state_dtype) : 0.f; });
  const auto publish_state = [&]() {  // rows are value columns, pairs run along channels: the accumulator's own order
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int i = 0; i < kChannelTiles; ++i) {
        const auto& s = state[strip][i];
        store_tile<N>(state_tiles + strip * kStateStrip + (warp * kChannelTiles + i) * kTileBytes, kStateTerm, lane,
                      make_tile<N>(s[0][0], s[0][1], s[0][2], s[0][3], s[1][0], s[1][1], s[1][2], s[1][3]));
      }
    }
  };
  publish_state();

  int buffer = 0, parity = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    // This chunk's operands are there, every warp's share of S too, and the last chunk's stage is free again.
    const unsigned char *w, *u;
    if constexpr (kDirect) {
      __syncthreads();
      w = args.units + index_of(chunk) * unit.bytes();
      u = args.u + index_of(chunk) * unit.u_bytes() + int64_t(slice) * Shape::u_bytes();
    } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      __syncthreads();
      ptx::mbar_wait(ready + buffer, parity);
#else
      if (args.stages == 3 && chunk + 1 < chunks) {
        ptx::cp_async_wait<1>();
      } else {
        ptx::cp_async_wait<0>();
      }
      __syncthreads();
#endif
      if (args.stages > 1) fetch_chunk(chunk + args.stages - 1, buffer == 0 ? args.stages - 1 : buffer - 1);
      w = stages + buffer * Shape::stage_bytes();
      u = w + unit.bytes();
    }
    const unsigned char *q = w + unit.q_offset(), *e = w + unit.e_offset(), *m = w + unit.m_offset();
    const float* decay = reinterpret_cast<const float*>(w + unit.decay_offset());

    // Loads go ahead of the products that need them: with one warp to a scheduler nothing else hides their latency.
    constexpr int kAhead = kTerms == 1 && K / 16 % 8 == 0 ? 8 : 4;  // channel tiles
    Tile<N> s[kStrips][kAhead], x[kAhead];

    // D of this warp's tokens.
    float delta[kStrips][2][4], o[kStrips][2][4] = {};
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      const Tile<N> z = load_tile<N>(u + strip * kTerms * unit.u_tile() + warp * kTileBytes, unit.u_tile(), lane);
      uint32_t a[kTerms], b[kTerms], c[kTerms], d[kTerms];
#pragma unroll
      for (int j = 0; j < kTerms; ++j) a[j] = z.term[j].x, b[j] = z.term[j].y, c[j] = z.term[j].z, d[j] = z.term[j].w;
      const float2 fa = join<N>(a), fb = join<N>(b), fc = join<N>(c), fd = join<N>(d);
      auto& sum = delta[strip];
      sum[0][0] = fa.x, sum[0][1] = fa.y, sum[0][2] = fb.x, sum[0][3] = fb.y;
      sum[1][0] = fc.x, sum[1][1] = fc.y, sum[1][2] = fd.x, sum[1][3] = fd.y;
    }
    const auto times_state = [&](const unsigned char* right, bool load_state, auto& sum) {
#pragma unroll
      for (int c = 0; c < K / 16; c += kAhead) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          x[j] = load_tile<N>(right + (warp * (K / 16) + c + j) * kTileBytes, unit.region(), lane);
#pragma unroll
          for (int strip = 0; strip < kStrips; ++strip) {
            if (load_state) {
              s[strip][j] = load_tile<N>(state_tiles + strip * kStateStrip + (c + j) * kTileBytes, kStateTerm, lane);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
#pragma unroll
          for (int strip = 0; strip < kStrips; ++strip) multiply<N>(sum[strip][0], sum[strip][1], s[strip][j], x[j]);
        }
      }
    };
    times_state(w, true, delta);
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      const auto& d = delta[strip];
      store_tile<N>(delta_tiles + strip * kDeltaStrip + warp * kTileBytes, kDeltaTerm, lane,
                    make_tile<N>(d[0][0], d[0][1], d[0][2], d[0][3], d[1][0], d[1][1], d[1][2], d[1][3]));
    }
    times_state(q, K / 16 > kAhead, o);

    // S of this warp's channels; what of it needs no D goes before the barrier.
    constexpr bool kEarly = K / 16 * kTerms <= 8;
    constexpr int kTilesE = kEarly ? kChannelTiles * 4 : 1;
    Tile<N> right_e[kTilesE];
    const auto load_e = [&](int i, int j) {
      return load_tile<N>(e + ((warp * kChannelTiles + i) * 4 + j) * kTileBytes, unit.region(), lane);
    };
    if constexpr (kEarly) {
#pragma unroll
      for (int i = 0; i < kChannelTiles * 4; ++i) right_e[i] = load_e(i / 4, i % 4);
    }
#pragma unroll
    for (int i = 0; i < kChannelTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 f = *reinterpret_cast<const float2*>(decay + (warp * kChannelTiles + i) * 16 + half * 8 + 2 * t);
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) {
          auto& x4 = state[strip][i][half];
          x4[0] *= f.x, x4[1] *= f.y, x4[2] *= f.x, x4[3] *= f.y;
        }
      }
    }
    __syncthreads();  // D is there, and nobody reads the old S any more
    Tile<N> d[kStrips][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        d[strip][j] = load_tile<N>(delta_tiles + strip * kDeltaStrip + j * kTileBytes, kDeltaTerm, lane);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < kChannelTiles; ++i) {
        Tile<N> right;
        if constexpr (kEarly) {
          right = right_e[i * 4 + j];
        } else {
          right = load_e(i, j);
        }
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) {
          multiply<N>(state[strip][i][0], state[strip][i][1], d[strip][j], right);
        }
      }
    }
    publish_state();

    // O of this warp's tokens.
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j <= warp) {
        const Tile<N> right = load_tile<N>(m + (warp * (warp + 1) / 2 + j) * kTileBytes, unit.m_region(), lane);
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) multiply<N>(o[strip][0], o[strip][1], d[strip][j], right);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // turn 8 tokens round: a lane gets one token's four neighbouring columns
      const int64_t token = span.begin + chunk * kChunk + warp * 16 + half * 8 + row;
      T* o_row = static_cast<T*>(args.o) + (token * args.v_heads + head) * args.v + slice * kSlice + t * 4;
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        const float (&z)[4] = o[strip][half];
        float y[4];
        if constexpr (kTerms == 1) {
          const float2 f = unpack(ptx::transpose8(pack(z[0], z[1], T())), T());
          const float2 g = unpack(ptx::transpose8(pack(z[2], z[3], T())), T());
          y[0] = f.x, y[1] = f.y, y[2] = g.x, y[3] = g.y;
        } else {
          uint32_t a[kTerms], b[kTerms];
          split<N>(z[0], z[1], a), split<N>(z[2], z[3], b);
#pragma unroll
          for (int j = 0; j < kTerms; ++j) a[j] = ptx::transpose8(a[j]), b[j] = ptx::transpose8(b[j]);
          const float2 f = join<N>(a), g = join<N>(b);
          y[0] = f.x, y[1] = f.y, y[2] = g.x, y[3] = g.y;
        }
        if (token < span.end) store4(o_row + strip * 16, y);
      }
    }
    if constexpr (!kDirect) {
      if (args.stages == 1) {
        __syncthreads();
        fetch_chunk(chunk + 1, 0);
      }
    }
    if (++buffer == args.stages) buffer = 0, parity ^= 1;
  }

  if (args.final_state) {
    for_state([&](float& x, int64_t at) { store_any(args.final_state, at, args.state_dtype, x); });
  }
}

template <typename N, int K, bool kDirect>
cudaError_t launch_scan_as(const ScanArgs& args, int bytes, cudaStream_t stream) {
  const int64_t blocks = args.seqs.num_seqs * args.v_heads * (args.v / kSlice);
  if (blocks == 0) return cudaSuccess;
  const cudaError_t status =
      cudaFuncSetAttribute(scan_kernel<N, K, kDirect>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  scan_kernel<N, K, kDirect><<<static_cast<unsigned>(blocks), kScanWarps * 32, bytes, stream>>>(args);
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
