// What the rungs share: which tile of which matrix a block owns.
#pragma once

#include <climits>

#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"

namespace braze::cuda::transpose_ladder {

// `batch` dense rows x cols matrices and where their transposes go. T: an integer of the elements'
// size, because only bits move.
template <typename T>
struct Matrices {
  const T* in;
  T* out;
  int64_t batch, rows, cols;
};

// Tiles of kTile x kTile; in 32 bits, because 64-bit divisions would delay every block's start.
struct TileGrid {
  unsigned per_row, per_matrix;
};

struct Tile {
  int64_t matrix;    // the offset of its matrix, in elements
  int64_t row, col;  // its first row and column, in the matrix that is read
};

template <int kTile>
__device__ __forceinline__ Tile tile_of_block(const TileGrid& grid, int64_t rows, int64_t cols) {
  const unsigned matrix = blockIdx.x / grid.per_matrix;
  const unsigned in_matrix = blockIdx.x - matrix * grid.per_matrix;
  const unsigned row = in_matrix / grid.per_row;
  return {matrix * rows * cols, int64_t{row} * kTile,
          int64_t{in_matrix - row * grid.per_row} * kTile};
}

// A block for every tile; how many there are has to be in the range of the grid.
template <int kTile, typename T>
int64_t count_tiles(const Matrices<T>& m) {
  return m.batch * ceil_div(m.rows, kTile) * ceil_div(m.cols, kTile);
}

template <int kTile, typename T>
TileGrid tile_grid(const Matrices<T>& m) {
  if (count_tiles<kTile>(m) > INT_MAX) {
    throw std::runtime_error("transpose_copy: more than 2^31 - 1 tiles");
  }
  const int64_t per_row = ceil_div(m.cols, kTile);
  return {static_cast<unsigned>(per_row), static_cast<unsigned>(per_row * ceil_div(m.rows, kTile))};
}

}  // namespace braze::cuda::transpose_ladder
