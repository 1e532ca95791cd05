// The products of halo/wgmma.cuh's kernel: a tile of inputs, read from another row on for each tap,
// with the weights of all taps; on the tensor cores, and where parts do not add up on CUDA cores.
#pragma once

#include "split.cuh"
#include "tiles.cuh"
#include "weights.cuh"
#include "cuda/common/wgmma.cuh"

namespace braze::cuda::halo {

// One result of a tile on CUDA cores, from the parts in shared memory: `position` in the tile,
// `filter` in the block.
__device__ __noinline__ float plain_sum(const Args& a, const unsigned char* weights,
                                        int weight_tile, const unsigned char* planes,
                                        int plane_bytes, int blocks, int position, int filter) {
  float sum = 0;
  for (int tap = 0; tap < a.r * a.s; ++tap) {
    const int row = position + tap / a.s * a.pitch + tap % a.s;
    for (int c = 0; c < a.c; ++c) {
      const int block = c / 32;
      sum += unsplit<3, 64>(weights + (tap * blocks + block) * 3 * weight_tile, weight_tile, filter,
                            c % 32) *
             unsplit<3, 64>(planes + block * 3 * plane_bytes, plane_bytes, row, c % 32);
    }
  }
  return sum;
}

// The channel blocks that a stage holds: `count` from `first` on, of `all`.
struct StageBlocks {
  int first, count, all;
};

// acc (+)= W_tap X_tap over all taps and a stage's channel blocks, from zero with the first block.
// Tiles of weights lie one behind the other, of all blocks for a tap; wait_for_weights(i) is called
// before the i-th is read. In parts each step's sum is added to acc in fp32: the tensor cores'
// truncating additions stay few.
template <typename Op, typename L, int kPixels, int kPlanes, typename Wait>
__device__ __forceinline__ void multiply_taps(float (&acc)[kPixels / 2], const Args& a,
                                              uint64_t w_desc, uint64_t x_desc, int weight_tile,
                                              int plane_bytes, const StageBlocks& blocks,
                                              const Wait& wait_for_weights) {
  constexpr int kAcc = kPixels / 2;
  [[maybe_unused]] float part_sum[kPlanes == 1 ? 1 : kAcc];
  if constexpr (kPlanes > 1) {
#pragma unroll
    for (int v = 0; v < kAcc; ++v) acc[v] = 0;
  }
  const int steps = a.r * a.s * blocks.count, skipped = blocks.all - blocks.count;
  for (int i = 0, tile = blocks.first, tap_row = 0, s = 0, block = 0; i < steps; ++i, ++tile) {
    const int w_offset = tile * kPlanes * weight_tile;
    const int x_offset = block * kPlanes * plane_bytes + (tap_row + s) * L::kRowBytes;
    if constexpr (kPlanes == 1) {
      wait_for_weights(tile);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < L::kRowBytes; step += 32) {
        Wgmma<Op, kPixels>::template run<0, 0>(acc, wgmma_advance(w_desc, w_offset + step),
                                               wgmma_advance(x_desc, x_offset + step),
                                               blocks.first + i + step > 0);
      }
      wgmma_commit();
    } else {
      using Pairs = PartPairs<kPlanes>;
      wgmma_touch(part_sum);
      wgmma_fence();
#pragma unroll
      for (int pair = 0; pair < Pairs::kCount; ++pair) {
#pragma unroll
        for (int step = 0; step < L::kRowBytes; step += 32) {
          Wgmma<Op, kPixels>::template run<0, 0>(
              part_sum, wgmma_advance(w_desc, w_offset + Pairs::first(pair) * weight_tile + step),
              wgmma_advance(x_desc, x_offset + Pairs::second(pair) * plane_bytes + step),
              pair + step > 0);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_touch(part_sum);
#pragma unroll
      for (int v = 0; v < kAcc; ++v) acc[v] += part_sum[v];
    }
    if (++block == blocks.count) {
      block = 0, tile += skipped;
      if (++s == a.s) s = 0, tap_row += a.pitch;
    }
  }
}

// The same, not in parts, for filters of kColumns columns: what is added to descriptors between the
// products of a row is constant, so that few instructions stand between two of them.
// wait_for_weights(first, count, stride) is called before those tiles of weights are read.
template <typename Op, typename L, int kPixels, int kColumns, typename Wait>
__device__ __forceinline__ void multiply_columns(float (&acc)[kPixels / 2], const Args& a,
                                                 uint64_t w_desc, uint64_t x_desc, int weight_tile,
                                                 int plane_bytes, const StageBlocks& blocks,
                                                 const Wait& wait_for_weights) {
  const int next = blocks.all * weight_tile;  // column
  for (int r = 0, accumulate = blocks.first > 0; r < a.r; ++r) {
    for (int block = 0; block < blocks.count; ++block) {
      const int first = r * kColumns * blocks.all + blocks.first + block;
      const uint64_t weights = wgmma_advance(w_desc, first * weight_tile);
      const uint64_t pixels =
          wgmma_advance(x_desc, block * plane_bytes + r * a.pitch * L::kRowBytes);
      wait_for_weights(first, kColumns, blocks.all);
      wgmma_fence();
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
#pragma unroll
        for (int step = 0; step < L::kRowBytes; step += 32) {
          Wgmma<Op, kPixels>::template run<0, 0>(
              acc, wgmma_advance(weights, column * next + step),
              wgmma_advance(pixels, column * L::kRowBytes + step), accumulate + column + step > 0);
        }
      }
      wgmma_commit();
      accumulate = 1;
    }
  }
}

}  // namespace braze::cuda::halo
