// The parts of halo/dgrad.cu's kernel: weights on their way into shared memory, sums on their way
// out.
#pragma once

#include "epilogue.cuh"
#include "parts.cuh"
#include "weights.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/tma.cuh"

namespace braze::cuda::halo::narrow {

constexpr int kMaxFilterRows = 3;
constexpr int kColumns = 3;    // of the filters
constexpr int kChannels = 32;  // computed; fewer leave columns of the product unused
constexpr int kRows = 64;      // of the accumulator
constexpr int kPositions = kRows - (kColumns - 1);
constexpr int kN = kColumns * kChannels;
constexpr int kGroupEdges = 4 * 3 * kChannels;  // see shift_and_add
constexpr int kRowBytes = 128;  // of shared memory: a block of filters at a position

// kPlanes: the bf16 parts that each value is split into.
template <typename T, int kPlanes>
struct Traits {
  using Op = operand_t<T, kPlanes>;
  static constexpr int kBlock = kRowBytes / sizeof(Op);     // filters in a row of operands
  static constexpr int kGroups = kPlanes == 1 ? 4 : 2;      // warpgroups; one warp more loads
  static constexpr int kEdges = kGroups * 2 * kGroupEdges;  // two in turn
  static constexpr int kThreads = kGroups * 128 + 32;
  // 16-bit weights stay as they are in memory, channels innermost: for each filter row, block of
  // filters and part a tile [column][filter][channel]. TF32 operands must have filters innermost:
  // [column][channel][filter].
  static constexpr bool kTransposed = sizeof(Op) == 4;
  static constexpr int kWeightTile = kN * kRowBytes;
  static_assert(kColumns * kBlock * kChannels * sizeof(Op) == kWeightTile);  // both ways
};

// Weights as TF32: each thread turns 4 x 4 of a tap, a few at once.
__device__ __forceinline__ bool load_weights(const Args& a, const float* w, unsigned char* shared,
                                             int thread, int threads, Traits<float, 1>) {
  constexpr int kTile = Traits<float, 1>::kWeightTile, kBatch = 3;
  const int items = a.c * (kChannels / 16), total = items * a.r * kColumns;  // of a tap, of all
  for (int first = thread; first < total; first += kBatch * threads) {
    float values[kBatch][4][4];
    int to[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = first + b * threads, tap = i / items, item = i - tap * items;
      // Neighbouring threads have neighbouring filters: no bank conflicts on the way in.
      const int filter = (item / 64 * 8 + item % 8) * 4, c = item % 64 / 8 * 4;
      const int r = tap / kColumns, s = tap - r * kColumns;
      const float* from = w + filter * a.w_c + c + r * a.w_r + s * a.w_s;
#pragma unroll
      for (int f = 0; f < 4; ++f) {
        float4 v{0, 0, 0, 0};
        if (i < total && c < a.k) v = *reinterpret_cast<const float4*>(from + f * a.w_c);
        values[b][f][0] = v.x, values[b][f][1] = v.y, values[b][f][2] = v.z, values[b][f][3] = v.w;
      }
      // Rows c to c + 3 of the tile have swizzle c % 8 on.
      to[b] = (r * (a.c / 32) + filter / 32) * kTile + (s * kChannels + c) * kRowBytes +
              ((filter % 32 / 4 ^ c % 8) << 4);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * threads >= total) break;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        *reinterpret_cast<float4*>(shared + (to[b] ^ n << 4) + n * kRowBytes) =
            float4{round_operand(values[b][0][n]), round_operand(values[b][1][n]),
                   round_operand(values[b][2][n]), round_operand(values[b][3][n])};
      }
    }
  }
  return false;
}

// Weights in parts. Returns whether any of this thread's is infinite or NaN.
__device__ __forceinline__ bool load_weights(const Args& a, const float* w, unsigned char* shared,
                                             int thread, int threads, Traits<float, 3>) {
  constexpr int kTile = Traits<float, 3>::kWeightTile, kBatch = 9;
  const int taps = a.r * kColumns, c = thread % 8 * 4;
  bool special = false;
  for (int filter = thread / 8; filter < a.c; filter += threads / 8) {
    const float* from = w + filter * a.w_c + c;
    Vec<float, 4> values[kBatch];
#pragma unroll
    for (int tap = 0; tap < kBatch; ++tap) {
      values[tap] = {};
      if (tap < taps && c < a.k) {
        values[tap] = load_vec<4>(from + tap / kColumns * a.w_r + tap % kColumns * a.w_s);
      }
    }
    const int row = filter % 64;
    uint32_t to = row * 64 + c * 2;
    to ^= (to >> 7 & 3) << 4;
    to += filter / 64 * 3 * kTile;
#pragma unroll
    for (int tap = 0; tap < kBatch; ++tap) {
      if (tap == taps) break;
      uint32_t parts[3][2];
      special |= split_values(values[tap].v, parts);
      const int tile = tap / kColumns * (a.c / 64) * 3 * kTile + tap % kColumns * 64 * 64;
#pragma unroll
      for (int p = 0; p < 3; ++p) {
        *reinterpret_cast<uint2*>(shared + tile + p * kTile + to) = uint2{parts[p][0], parts[p][1]};
      }
    }
  }
  if (!special) return false;
#pragma unroll 1
  for (int filter = thread / 8; filter < a.c && c < a.k; filter += threads / 8) {
    const float* from = w + filter * a.w_c + c;
    const int row = filter % 64;
    uint32_t to = row * 64 + c * 2;
    to ^= (to >> 7 & 3) << 4;
    to += filter / 64 * 3 * kTile;
#pragma unroll 1
    for (int e = 0; e < 4 * taps; ++e) {
      const int tap = e / 4, r = tap / kColumns, s = tap % kColumns;
      __nv_bfloat16 parts[3];
      split(from[r * a.w_r + s * a.w_s + e % 4], parts);
      const int tile = r * (a.c / 64) * 3 * kTile + s * 64 * 64;
      auto* const target = reinterpret_cast<__nv_bfloat16*>(shared + tile + to) + e % 4;
#pragma unroll
      for (int p = 0; p < 3; ++p) target[p * kTile / 2] = parts[p];
    }
  }
  return true;
}

// One gradient on CUDA cores, from the parts in shared memory.
__device__ __noinline__ float plain_gradient(const Args& a, const unsigned char* weights,
                                             const unsigned char* planes, int plane_bytes,
                                             int position, int c) {
  constexpr int kTile = Traits<float, 3>::kWeightTile;
  float sum = 0;
  for (int tap = 0; tap < a.r * kColumns; ++tap) {
    const int r = tap / kColumns, s = tap - r * kColumns;
    const int row = position + (a.r - 1 - r) * a.pitch + kColumns - 1 - s;
    for (int filter = 0; filter < a.c; ++filter) {
      const int block = filter / 64;
      sum += unsplit<3, 64>(weights + (r * (a.c / 64) + block) * 3 * kTile, kTile,
                            s * 64 + filter % 64, c) *
             unsplit<3, 128>(planes + block * 3 * plane_bytes, plane_bytes, row, filter % 64);
    }
  }
  return sum;
}

// gradient[q][h][e] of channel 8 q + 2 (lane % 4) + e at position 16 warp + lane / 4 + 8 h, from
// the sums of the three columns at this position and the next two. Those of the next warp pass
// through `edges`, [warp][3][kChannels] of the warpgroup.
__device__ __forceinline__ void shift_and_add(const float (&d)[kN / 2], float* edges, int barrier,
                                              float (&gradient)[4][2][2]) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = lane / 4;
  const int channel = lane % 4 * 2;
  float* own = edges + warp * 3 * kChannels + channel;
  const float* next = edges + (warp + 1) % 4 * 3 * kChannels + channel;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    if (row == 0) *reinterpret_cast<float2*>(own + 8 * q) = float2{d[16 + 4 * q], d[17 + 4 * q]};
    if (row < 2) {
      *reinterpret_cast<float2*>(own + (1 + row) * kChannels + 8 * q) =
          float2{d[4 * q], d[4 * q + 1]};
    }
  }
  named_barrier(barrier, 128);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const float2 next1 = *reinterpret_cast<const float2*>(next + 8 * q);
    const float2 next2 =
        *reinterpret_cast<const float2*>(next + (row == 7 ? 2 : 1) * kChannels + 8 * q);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float one0 = __shfl_sync(~0u, d[16 + 4 * q + e], (lane + 4) % 32);
      const float one1 = __shfl_sync(~0u, d[18 + 4 * q + e], (lane + 4) % 32);
      const float two0 = __shfl_sync(~0u, d[4 * q + e], (lane + 8) % 32);
      const float two1 = __shfl_sync(~0u, d[2 + 4 * q + e], (lane + 8) % 32);
      gradient[q][0][e] = d[32 + 4 * q + e] + (row < 7 ? one0 : one1) + (row < 6 ? two0 : two1);
      gradient[q][1][e] = d[34 + 4 * q + e] +
                          (row < 7 ? one1
                           : e     ? next1.y
                                   : next1.x) +
                          (row < 6 ? two1
                           : e     ? next2.y
                                   : next2.x);
    }
  }
}

// The gradients of a position, as shift_and_add leaves them: eight bytes a thread.
__device__ __forceinline__ void store_position(const Args& a, float* to,
                                               const float (&gradient)[4][2][2], int half) {
  const int channel = threadIdx.x % 4 * 2;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    if (8 * q + channel < a.k) {
      *reinterpret_cast<float2*>(to + 8 * q + channel) =
          float2{gradient[q][half][0], gradient[q][half][1]};
    }
  }
}
template <typename T>
__device__ __forceinline__ void store_position(const Args& a, T* to,
                                               const float (&gradient)[4][2][2], int half) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int q = 0; q < 4; q += 2) {
    // Even threads of a pair get both halves of channels 8 q on, odd threads those of 8 (q + 1).
    const uint32_t pair[2] = {pack_pair<T>(gradient[q][half][0], gradient[q][half][1]),
                              pack_pair<T>(gradient[q + 1][half][0], gradient[q + 1][half][1])};
    const uint32_t other = __shfl_xor_sync(~0u, t % 2 ? pair[0] : pair[1], 1);
    const int c = t % 2 ? 8 * (q + 1) + 2 * (t - 1) : 8 * q + 2 * t;
    if (to && c < a.k) {
      *reinterpret_cast<uint2*>(to + c) = t % 2 ? uint2{other, pair[1]} : uint2{pair[0], other};
    }
  }
}

}  // namespace braze::cuda::halo::narrow
