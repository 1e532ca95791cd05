// Rung 1: each element goes straight from its place to its new one. A block takes a tile of 32 x 32
// elements, a warp a row of the tile at a time.
//
// The loads are coalesced, 32 neighbours in a row. The stores are not: neighbours in a row become
// neighbours in a column, so that a warp's store goes to 32 different sectors of 32 bytes, of which
// each lane fills 2 to 8 bytes, in as many passes of the store unit. What L2 does not put together
// again before it is written back moves a whole sector for each element.
#pragma once

#include "rung.cuh"

namespace braze::cuda::transpose_ladder {

// The tile of rungs 1 to 3: a warp for each of 8 rows of the tile, four times.
constexpr int kSmallTile = 32, kWarps = 8;

template <typename T>
__global__ void naive_kernel(Matrices<T> m, TileGrid grid) {
  const Tile at = tile_of_block<kSmallTile>(grid, m.rows, m.cols);
  const int64_t col = at.col + threadIdx.x;
  for (int r = threadIdx.y; r < kSmallTile; r += kWarps) {
    const int64_t row = at.row + r;
    if (row < m.rows && col < m.cols) {
      m.out[at.matrix + col * m.rows + row] = m.in[at.matrix + row * m.cols + col];
    }
  }
}

template <typename T>
void run_naive(Stream stream, const Matrices<T>& m) {
  const TileGrid grid = tile_grid<kSmallTile>(m);
  const unsigned blocks = static_cast<unsigned>(count_tiles<kSmallTile>(m));
  const dim3 threads(kSmallTile, kWarps);
  naive_kernel<<<blocks, threads, 0, as_cuda(stream)>>>(m, grid);
}

}  // namespace braze::cuda::transpose_ladder
