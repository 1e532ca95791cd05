// How the kernels over pixels of channels share them out. A thread keeps to one vector of N
// channels and walks down the pixels, "rows" here; a block takes part of the rows for a tile of
// vectors of channels. A line of threads is as long as the tile, made up to a power of two.
#pragma once

#include "cuda/batch_norm/channel.cuh"

namespace braze::cuda {

// 80 registers a thread.
constexpr int kRowThreads = 768;
constexpr int kRowTile = 32;  // vectors of channels per block, at most

// Threads in a line.
inline int64_t row_pitch(int64_t vectors, int64_t tile) {
  int64_t pitch = 1;
  while (pitch < std::min(vectors, tile)) pitch *= 2;
  return pitch;
}

struct RowShape {
  int64_t rows, c;
  int splits;           // blocks per tile
  int tile = kRowTile;  // vectors of channels per block, at most; a power of two
};

// Where a thread stands: vector `column` of the block's tile, row `line` of those that the block
// takes at a time.
template <int N>
struct RowPlace {
  int width;      // vectors in the tile
  int height;     // rows the block takes at a time
  int log_pitch;  // of the threads in a line
  int column, line;
  int tile_channels;   // channels in the tile
  int64_t tile_begin;  // first channel of the tile
  int64_t begin, end;  // the block's rows

  __device__ explicit RowPlace(const RowShape& shape) {
    const int64_t left = shape.c / N - int64_t{blockIdx.y} * shape.tile;
    width = static_cast<int>(left < shape.tile ? left : shape.tile);
    log_pitch = 32 - __clz(width - 1);
    height = static_cast<int>(blockDim.x) >> log_pitch;
    column = static_cast<int>(threadIdx.x) & ((1 << log_pitch) - 1);
    line = static_cast<int>(threadIdx.x) >> log_pitch;
    tile_begin = int64_t{blockIdx.y} * shape.tile * N;
    tile_channels = width * N;
    begin = split_begin(shape.rows, blockIdx.x, shape.splits);
    end = split_begin(shape.rows, blockIdx.x + 1, shape.splits);
  }

  // Not the threads behind the end of the tile.
  __device__ bool works() const { return column < width; }
  __device__ int64_t channel() const { return tile_begin + column * N; }
};

// Shared memory of row_block_sum: a line of up to 32 vectors from each warp.
template <typename A, int N>
using RowSums = A[kRowThreads / 32][N][32];

// v[k] = sum over the block's lines, per column, in every thread: within warps, then over warps.
// The order is fixed.
template <typename A, int N>
__device__ void row_block_sum(A (&v)[N], RowSums<A, N>& shared, const RowPlace<N>& place) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pitch = 1 << place.log_pitch;
  for (int lanes = pitch; lanes < 32; lanes *= 2) {
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] += __shfl_xor_sync(~0u, v[k], lanes);
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (lane < pitch) shared[warp][k][lane] = v[k];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < N * pitch; i += blockDim.x) {
    const int k = i >> place.log_pitch, column = i & (pitch - 1);
    A sum = 0;
#pragma unroll
    for (int w = 0; w < kRowThreads / 32; ++w) {
      if (w < static_cast<int>(blockDim.x / 32)) sum += shared[w][k][column];
    }
    shared[0][k][column] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < N; ++k) v[k] = shared[0][k][place.column];
  __syncthreads();
}

// The coefficients of the tile's channels, a team of kLanes lanes to each; f(channel) is called by
// whole teams and returns them in the first lane.
template <int kLanes = 32, typename Coefficients, int N, typename F>
__device__ void tile_coefficients(Coefficients* shared, const RowPlace<N>& place, const F& f) {
  for (int i = threadIdx.x / kLanes; i < place.tile_channels; i += blockDim.x / kLanes) {
    const Coefficients result = f(place.tile_begin + i);
    if (threadIdx.x % kLanes == 0) shared[i] = result;
  }
  __syncthreads();
}

}  // namespace braze::cuda
