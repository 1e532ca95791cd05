// The products of conv_gradients.cu's kernel and conv_gradients_tf32.cu's.
#pragma once

#include "conv_gradients_tile.cuh"
#include "cuda/common/registers.cuh"

namespace braze::cuda::halo::pooled {
namespace {

constexpr int kMergeLanes = 8;  // that merge a channel's partial sums
static_assert(kMergeLanes * kFilters <= kThreads);

// Registers of a thread; so many threads begin with kFirstRegisters each.
constexpr int kFirstRegisters = 65536 / kThreads / 8 * 8;
constexpr int kWeightRegisters = 176, kInputRegisters = 88, kMakerRegisters = 64;
static_assert(kWeightRegisters + kInputs * kInputRegisters + kMakers * kMakerRegisters <=
              (1 + kInputs + kMakers) * kFirstRegisters);

// What dz is made with, from the partial sums. Called by all threads; a barrier has to follow.
__device__ __forceinline__ void merge_coefficients(
    BackwardCoefficients<float> (&coefficients)[kFilters], const BackwardArgs& args,
    const GradPartial<float>* sums, int sum_parts, int64_t count) {
  if (threadIdx.x >= kMergeLanes * kFilters) return;
  const int channel = threadIdx.x / kMergeLanes;
  const BackwardCoefficients<float> merged =
      merge_grads<float, kMergeLanes>(args, sums, sum_parts, count, channel, blockIdx.x == 0);
  if (threadIdx.x % kMergeLanes == 0) coefficients[channel] = merged;
}

// The tiles of weights, [filter][2 * kChannels] each. vector(i): eight of them, from the i-th on,
// as operands. Called by all threads.
template <typename F>
__device__ __forceinline__ void load_weights(unsigned char* to, int channels, const F& vector) {
  constexpr int kChunks = kWeightRowBytes / 16;  // of eight channels
#pragma unroll 2
  for (int i = threadIdx.x; i < kWeightTiles * kFilters * kChunks; i += kThreads) {
    const int chunk = i % kChunks, filter = i / kChunks % kFilters, tile = i / kChunks / kFilters;
    const int column = tile % 2 == 0 ? 1 + chunk % 2 : 0, c = chunk / 2 * 8;
    uint4 v{};  // the neighbour of column 0 is none
    if (c < channels && (tile % 2 == 0 || chunk % 2 == 0)) {
      const int tap = (filter * kFilterRows + tile / 2) * kTapColumns + column;
      v = vector(tap * channels + c);
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

// The input's gradient at two neighbouring positions, number `b` of pairs eight positions apart,
// from the sums of multiply_positions: acc[i] and acc[i + 1] of a thread are two positions of
// column 1, the next two those of column 2; a warp has eight channels. Called by whole warps.
__device__ __forceinline__ float2 gradients_at(const float (&acc)[kPositions / 2], int b) {
  constexpr int kBlocks = kPositions / 8;
  const int lane = threadIdx.x % 32, next_lane = (lane & ~3) | ((lane + 1) & 3);
  const float after = acc[b + 1 < kBlocks ? 4 * b + 4 : 0];
  const float next = __shfl_sync(~0u, lane % 4 == 0 ? after : acc[4 * b], next_lane);
  return {acc[4 * b + 2] + acc[4 * b + 1], acc[4 * b + 3] + next};
}

}  // namespace
}  // namespace braze::cuda::halo::pooled
