// Rung 2: the tile passes through shared memory, and the block turns it there.
//
// A warp reads rows of the tile and writes rows of its transpose: both sides of global memory are
// coalesced now. What was strided has moved into shared memory, which has no sectors but 32 banks
// of 4 bytes: the column that a warp reads lies 32 elements apart, so that for 4-byte elements all
// 32 are in the same bank and the load takes 32 passes instead of one (16 for other sizes). Still
// far better than sectors that cross to L2 and back.
#pragma once

#include "01_naive.cuh"

namespace braze::cuda::transpose_ladder {

// kPitch: elements from one row of the tile to the next in shared memory.
template <int kPitch, typename T>
__global__ void shared_tile_kernel(Matrices<T> m, TileGrid grid) {
  __shared__ T tile[kSmallTile][kPitch];
  const Tile at = tile_of_block<kSmallTile>(grid, m.rows, m.cols);
  const int lane = threadIdx.x;
  for (int r = threadIdx.y; r < kSmallTile; r += kWarps) {
    const int64_t row = at.row + r, col = at.col + lane;
    if (row < m.rows && col < m.cols) tile[r][lane] = m.in[at.matrix + row * m.cols + col];
  }
  __syncthreads();
  for (int c = threadIdx.y; c < kSmallTile; c += kWarps) {
    const int64_t row = at.row + lane, col = at.col + c;
    if (row < m.rows && col < m.cols) m.out[at.matrix + col * m.rows + row] = tile[lane][c];
  }
}

template <int kPitch, typename T>
void run_small_tiles(Stream stream, const Matrices<T>& m) {
  const TileGrid grid = tile_grid<kSmallTile>(m);
  const unsigned blocks = static_cast<unsigned>(count_tiles<kSmallTile>(m));
  const dim3 threads(kSmallTile, kWarps);
  shared_tile_kernel<kPitch><<<blocks, threads, 0, as_cuda(stream)>>>(m, grid);
}

template <typename T>
void run_shared_tile(Stream stream, const Matrices<T>& m) {
  run_small_tiles<kSmallTile>(stream, m);
}

}  // namespace braze::cuda::transpose_ladder
