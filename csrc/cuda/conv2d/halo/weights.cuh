// The weights of halo/wgmma.cuh in shared memory: for each tap and channel block a swizzled K-major
// tile. Every block of threads loads them once, which is a third of its time at small batches: so
// loads are 16 bytes wide where the weights' layout allows, and many are in flight.
#pragma once

#include "split.cuh"
#include "tiles.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"

namespace braze::cuda::halo {

// Warpgroups, each with a tile of its own; one warp more loads. A product waits for the one before
// it longer than the tensor cores take for it, and a tile's results for its products: other groups
// have to fill both. More than two have registers for smaller tiles only.
constexpr int consumers(int pixels, int planes) { return planes == 1 && pixels <= 128 ? 3 : 2; }
// fp32 results are turned in shared memory, 32 positions x 16 filters per warp; padded rows.
constexpr int kTurnPitch = 20, kTurnBytes = 32 * kTurnPitch * 4;

// T: the type of the operands in shared memory; kPlanes: the parts that each value is split into.
template <typename T, int kChannelBlock, int kPlanes = 1>
struct Layout {
  static constexpr int kRowBytes = kChannelBlock * int{sizeof(T)};
  // One tap and channel block of weights. Fewer than 64 filters take fewer rows: wgmma then reads
  // on into the next tile, for rows of the result that nobody stores.
  __host__ __device__ static int weight_tile(const Args& a) {
    return (a.k < kFilters ? (a.k + 7) / 8 * 8 : kFilters) * kRowBytes;
  }
  __host__ __device__ static int blocks(const Args& a) {
    return (a.c + kChannelBlock - 1) / kChannelBlock;
  }
  __host__ __device__ static int weight_bytes(const Args& a) {
    return aligned(a.r * a.s * blocks(a) * kPlanes * weight_tile(a));
  }
  __host__ __device__ static int plane_bytes(const Args& a) {
    return aligned(a.plane_rows * kRowBytes);
  }
  __host__ __device__ static int stage_bytes(const Args& a) {
    return blocks(a) * kPlanes * plane_bytes(a);
  }
};

// fp32 inputs in three parts are bf16 operands.
template <typename T, int kPlanes>
using operand_t = std::conditional_t<kPlanes == 1, T, __nv_bfloat16>;

// wgmma reads the upper 19 bits of TF32 operands: round instead of truncating.
template <typename T>
__device__ __forceinline__ T round_operand(T v) {
  return v;
}
template <>
__device__ __forceinline__ float round_operand(float v) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
  return __uint_as_float(bits);
}

// Where weights go, and whether any of them is infinite or NaN.
template <typename T, int kChannelBlock, int kPlanes>
struct WeightTiles {
  using Op = operand_t<T, kPlanes>;
  using L = Layout<Op, kChannelBlock, kPlanes>;

  unsigned char* shared;
  int tile;
  bool special = false;

  // The place of channel `c` of filter `k` at the first tap. Tiles are whole periods of the
  // swizzle, so that other taps are at the same place of theirs.
  __device__ uint32_t place(int k, int c) const {
    const uint32_t to = c / kChannelBlock * kPlanes * tile + k * L::kRowBytes +
                        c % kChannelBlock * static_cast<int>(sizeof(Op));
    return to ^ (to >> 7 & (L::kRowBytes / 16 - 1)) << 4;
  }
  // `N` consecutive channels.
  template <int N>
  __device__ void put(uint32_t to, const Vec<T, N>& values) {
    if constexpr (kPlanes == 1) {
      Vec<T, N> rounded;
#pragma unroll
      for (int i = 0; i < N; ++i) rounded.v[i] = round_operand(values.v[i]);
      *reinterpret_cast<Vec<T, N>*>(shared + to) = rounded;
    } else {
      if constexpr (N == 1) {
        __nv_bfloat16 parts[3];
        split(values.v[0], parts);
        special |= !is_finite(values.v[0]);
#pragma unroll
        for (int p = 0; p < 3; ++p) {
          *reinterpret_cast<__nv_bfloat16*>(shared + to + p * tile) = parts[p];
        }
      } else {
        uint32_t parts[3][N / 2];
        special |= split_values(values.v, parts);  // then load_items() does it again
#pragma unroll
        for (int p = 0; p < 3; ++p) {
          *reinterpret_cast<uint2*>(shared + to + p * tile) = uint2{parts[p][0], parts[p][1]};
        }
      }
    }
  }
};

// Loads items of N values along channels (fprop of channels_last weights), else along filters
// (their dgrad): a thread has the same item of every tap, so that indices are computed once.
template <typename T, int kChannelBlock, int kPlanes, int kThreads, int N, bool kAlongChannels>
__device__ __forceinline__ bool load_items(const Args& a, const T* w, int k0,
                                           unsigned char* shared) {
  using Tiles = WeightTiles<T, kChannelBlock, kPlanes>;
  constexpr int kBatch = 9, kItems = kAlongChannels && kPlanes > 1 ? 2 : 1;  // loads in flight
  const int rows = Tiles::L::weight_tile(a) / Tiles::L::kRowBytes, taps = a.r * a.s;
  const int blocks = Tiles::L::blocks(a), channels = blocks * kChannelBlock;
  Tiles tiles{shared, Tiles::L::weight_tile(a)};
  // The innermost index first: consecutive threads read consecutive memory.
  const int inner = (kAlongChannels ? channels : rows) / N;
  const int items = inner * (kAlongChannels ? rows : channels);
  const int tap_bytes = (a.flip ? -blocks : blocks) * kPlanes * tiles.tile;
  for (int i = threadIdx.x; i < items; i += kItems * kThreads) {
    uint32_t to[kItems][kAlongChannels ? 1 : N];
    const T* from[kItems];
    bool inside[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int at = i + item * kThreads, outer = at / inner;
      const int rest = (at - outer * inner) * N;
      const int k = kAlongChannels ? outer : rest, c = kAlongChannels ? rest : outer;
      inside[item] = at < items && k0 + k < a.k && c < a.c;
#pragma unroll
      for (int n = 0; n < (kAlongChannels ? 1 : N); ++n) to[item][n] = tiles.place(k + n, c);
      from[item] = w + (k0 + k) * a.w_k + c * a.w_c;
    }
    int64_t offset = 0;  // of a tap
    int tap_at = a.flip ? -(taps - 1) * tap_bytes : 0;
    for (int tap = 0, s = 0; tap < taps; tap += kBatch) {
      Vec<T, N> values[kBatch][kItems];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
#pragma unroll
        for (int item = 0; item < kItems; ++item) {
#pragma unroll
          for (int n = 0; n < N; ++n) values[b][item].v[n] = convert<T>(0.0f);
          if (inside[item] && tap + b < taps) values[b][item] = load_vec<N>(from[item] + offset);
        }
        offset += a.w_s;
        if (++s == a.s) s = 0, offset += a.w_r - a.s * a.w_s;
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b, tap_at += tap_bytes) {
        if (tap + b >= taps) break;
#pragma unroll
        for (int item = 0; item < kItems; ++item) {
          if (i + item * kThreads >= items) break;
          if constexpr (kAlongChannels) {
            tiles.template put<N>(tap_at + to[item][0], values[b][item]);
          } else {
#pragma unroll
            for (int n = 0; n < N; ++n) {
              tiles.template put<1>(tap_at + to[item][n], Vec<T, 1>{values[b][item].v[n]});
            }
          }
        }
      }
    }
  }
  if constexpr (kPlanes > 1 && kAlongChannels && N > 1) {
    if (!tiles.special) return false;
#pragma unroll 1
    for (int e = threadIdx.x * N; e < items * N; e += e % N == N - 1 ? kThreads * N - N + 1 : 1) {
      const int k = e / channels, c = e % channels;
      if (k0 + k >= a.k || c >= a.c) continue;
      const T* const from = w + (k0 + k) * a.w_k + c * a.w_c;
      int to = tiles.place(k, c) + (a.flip ? -(taps - 1) * tap_bytes : 0);
#pragma unroll 1
      for (int tap = 0; tap < taps; ++tap, to += tap_bytes) {
        tiles.template put<1>(to, Vec<T, 1>{from[tap / a.s * a.w_r + tap % a.s * a.w_s]});
      }
    }
  }
  return tiles.special;
}

// By the block's first kThreads threads. Returns whether any of this thread's weights is infinite
// or NaN (only where they are split).
template <typename T, int kChannelBlock, int kPlanes, int kThreads>
__device__ __forceinline__ bool load_weights(const Args& a, const T* w, int k0,
                                             unsigned char* shared) {
  constexpr int N = 16 / sizeof(T);
  const bool aligned = reinterpret_cast<uintptr_t>(w) % 16 == 0 && a.w_r % N == 0 && a.w_s % N == 0;
  if (aligned && a.w_c == 1 && a.w_k % N == 0 && a.c % N == 0) {
    return load_items<T, kChannelBlock, kPlanes, kThreads, N, true>(a, w, k0, shared);
  }
  if (aligned && a.w_k == 1 && a.w_c % N == 0 && a.k % N == 0) {
    return load_items<T, kChannelBlock, kPlanes, kThreads, N, false>(a, w, k0, shared);
  }
  return load_items<T, kChannelBlock, kPlanes, kThreads, 1, true>(a, w, k0, shared);
}

}  // namespace braze::cuda::halo
