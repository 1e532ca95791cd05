// The products of conv_gradients.cu's kernel, and the way of their sums out.
#pragma once

#include "conv_gradients_tile.cuh"

namespace braze::cuda::halo::pooled {
namespace {

// The product of the input's gradient: 64 rows, for eight channels of x at a time those of one
// column of taps, then those of the next one; a chunk of positions as columns, of which the last
// lacks its neighbour.
constexpr int kPositions = 112, kResults = kPositions - 1;
constexpr int kWeightRowBytes = 2 * kChannels * 2;
constexpr int kWeightTile = kFilters * kWeightRowBytes;
constexpr int kWeightTiles = 2 * kFilterRows;  // columns 1 and 2 of a filter row, then column 0
// Results on their way out, [position][channel].
constexpr int kStagedBytes = kPositions * kXRowBytes;

// The tiles of weights, [filter][2 * kChannels] each.
template <typename T>
__device__ __forceinline__ void load_weights(unsigned char* to, const T* w, int channels) {
  constexpr int kChunks = kWeightRowBytes / 16;  // of eight channels
#pragma unroll 2
  for (int i = threadIdx.x; i < kWeightTiles * kFilters * kChunks; i += kThreads) {
    const int chunk = i % kChunks, filter = i / kChunks % kFilters, tile = i / kChunks / kFilters;
    const int column = tile % 2 == 0 ? 1 + chunk % 2 : 0, c = chunk / 2 * 8;
    uint4 v{};  // the neighbour of column 0 is none
    if (c < channels && (tile % 2 == 0 || chunk % 2 == 0)) {
      const int tap = (filter * kFilterRows + tile / 2) * kTapColumns + column;
      v = *reinterpret_cast<const uint4*>(w + tap * channels + c);
    }
    *reinterpret_cast<uint4*>(to + tile * kWeightTile + filter * kWeightRowBytes +
                              ((chunk ^ (filter & 7)) << 4)) = v;
  }
}

// acc = sums for the input's gradient, from position `first` of a tile on. dz is read from the
// place of column 2 on for both columns of a tile: then column 1's sum belongs to the position
// before. So does that of column 0, which is read one further on.
template <typename T>
__device__ __forceinline__ void multiply_positions(float (&acc)[kPositions / 2], uint32_t dz,
                                                   uint32_t weights, const Plan& p, int first) {
  wgmma_fence();
#pragma unroll
  for (int tile = 0; tile < kWeightTiles; ++tile) {
    const int row = kFilterRows - 1 - tile / 2;
    const uint64_t dz_desc = wgmma_descriptor<kDzRowBytes>(
        dz + (first + row * p.pitch.divisor() + tile % 2) * kDzRowBytes);
    const uint64_t w_desc = wgmma_descriptor<kWeightRowBytes>(weights + tile * kWeightTile);
#pragma unroll
    for (int step = 0; step < kFilters / 16; ++step) {
      Wgmma<T, kPositions>::template run<1, 0>(acc,
                                               wgmma_advance(w_desc, step * 16 * kWeightRowBytes),
                                               wgmma_advance(dz_desc, step * 32), tile + step > 0);
    }
  }
  wgmma_commit();
}

// acc[r] += the sums of filter row r over a tile, for the weight's gradient. The first position is
// the first behind the halo and the zeros before its row: then x begins at the tap's.
template <typename T>
__device__ __forceinline__ void multiply_rows(
    float (&acc)[kFilterRows][kTapColumns * kChannels / 2], uint32_t dz, uint32_t x,
    const Plan& p) {
  const int pitch = p.pitch.divisor();
  const uint64_t dz_desc = wgmma_descriptor<kDzRowBytes>(dz + (pitch + 1) * kDzRowBytes);
  const uint64_t x_desc = wgmma_descriptor<kXRowBytes>(x, kXRowBytes);
  wgmma_fence();
  for (int step = 0; step < p.steps; ++step) {
#pragma unroll
    for (int r = 0; r < kFilterRows; ++r) {
      multiply_step<T, kChannels>(acc[r], dz_desc, wgmma_advance(x_desc, r * pitch * kXRowBytes),
                                  step);
    }
  }
  wgmma_commit();
}

// The input's gradient from the sums of multiply_positions. A warp has eight channels; acc[i] and
// acc[i + 1] of a thread are two positions of column 1, the next two those of column 2. to: of the
// tile's first pixel. Called by a warpgroup.
template <typename T>
__device__ __forceinline__ void store_positions(const float (&acc)[kPositions / 2],
                                                unsigned char* staged, int barrier, const Plan& p,
                                                int rows, int first, T* to) {
  constexpr int kBlocks = kPositions / 8;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, thread = threadIdx.x % 128;
  const int next_lane = (lane & ~3) | ((lane + 1) & 3);
  const auto place = [&](int position, int chunk) {
    return staged + position * kXRowBytes + ((chunk ^ (position / 2 & 3)) << 4);
  };
  uint32_t pairs[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const float after = acc[b + 1 < kBlocks ? 4 * b + 4 : 0];
    const float next = __shfl_sync(~0u, lane % 4 == 0 ? after : acc[4 * b], next_lane);
    pairs[b] = pack_pair<T>(acc[4 * b + 2] + acc[4 * b + 1], acc[4 * b + 3] + next);
  }
  named_barrier(barrier, 128);  // nobody reads what was staged before
#pragma unroll
  for (int b = 0; b < kBlocks; b += 2) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                     shared_address(place(8 * b + lane % 16, warp))),
                 "r"(pairs[b]), "r"(pairs[b + 1])
                 : "memory");
  }
  named_barrier(barrier, 128);
#pragma unroll
  for (int i = 0; i < kPositions; i += 32) {
    const int position = i + thread / 4, c = thread % 4 * 8;
    int column;
    const int row = p.pitch.div(first + position, column);
    if (position < kResults && column < p.w && row < rows && c < p.channels) {
      *reinterpret_cast<uint4*>(to + (row * p.w + column) * p.channels + c) =
          *reinterpret_cast<const uint4*>(place(position, thread % 4));
    }
  }
}

}  // namespace
}  // namespace braze::cuda::halo::pooled
