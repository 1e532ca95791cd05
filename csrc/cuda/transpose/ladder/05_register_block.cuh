// Rung 5, shipped where all rows are multiples of 16 bytes: 16 bytes an access in shared memory
// too.
//
// A thread loads square blocks of the matrix, N vectors of N elements from N rows below each other,
// and transposes each in its registers, where elements of 4 and 8 bytes cost no instruction at all
// and 2-byte ones a byte permutation for every two. What it then stores to shared memory are whole
// vectors of the transposed tile: of 2-byte elements one store and one load where rung 4 has eight
// of each. Rows of the tile are not padded, which would misalign vectors, but swizzled: a vector's
// place in its row is its index XOR the number of the block that its row belongs to. So the eight
// lanes that shared memory serves at a time, which store to one column of vectors and load from one
// row, meet different banks both times. And a thread has eight loads in flight whatever the
// element, 128 bytes.
#pragma once

#include "04_vectorized.cuh"

namespace braze::cuda::transpose_ladder {

// rows: N vectors below each other. Returns the vector of their k-th elements.
template <typename T, int N>
__device__ __forceinline__ uint4 column_of(const Vec<T, N> (&rows)[N], int k) {
  Vec<T, N> column;
#pragma unroll
  for (int j = 0; j < N; ++j) column.v[j] = rows[j].v[k];
  return *reinterpret_cast<const uint4*>(&column);
}

// Threads for 8 vectors each.
template <typename T>
constexpr int kRegisterThreads = kTile * kTile / kVecWidth<T> / 8;

template <typename T>
__global__ void __launch_bounds__(kRegisterThreads<T>)
    register_block_kernel(Matrices<T> m, TileGrid grid) {
  wait_for_earlier_kernels();
  constexpr int N = kVecWidth<T>;
  constexpr int kPerRow = kTile / N;  // vectors in a row of the tile, and blocks in a row of blocks
  constexpr int kBlocks = 8 / N;      // of a thread
  __shared__ uint4 tile[kTile][kPerRow];  // transposed
  const Tile at = tile_of_block<kTile>(grid, m.rows, m.cols);
  const int across = threadIdx.x % kPerRow, down = threadIdx.x / kPerRow;
  constexpr int kDownStep = kRegisterThreads<T> / kPerRow;

  Vec<T, N> rows[kBlocks][N];
  const int64_t col = at.col + across * N;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const int64_t row = at.row + (down + i * kDownStep) * N;
    if (row < m.rows && col < m.cols) {
      const T* const from = m.in + at.matrix + row * m.cols + col;
#pragma unroll
      for (int j = 0; j < N; ++j) rows[i][j] = load_vec<N>(from + j * m.cols);
    }
  }
  // What lies outside of the matrix has garbage here, which is not stored in the end.
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const int block = down + i * kDownStep;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      tile[across * N + k][block ^ across % 8] = column_of(rows[i], k);
    }
  }
  __syncthreads();

  uint4 vectors[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = down + i * kDownStep;
    vectors[i] = tile[r][across ^ r / N % 8];
  }
  const int64_t out_col = at.row + across * N;
  int64_t out_row = at.col + down;
  T* to = m.out + at.matrix + out_row * m.rows + out_col;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (out_row < m.cols && out_col < m.rows) store_raw(reinterpret_cast<uint4*>(to), vectors[i]);
    out_row += kDownStep;
    to += kDownStep * m.rows;
  }
}

// Whether it takes these matrices.
template <typename T>
bool takes_register_blocks(const Matrices<T>& m) {
  return is_wide_in(m) && is_wide_out(m);
}

template <typename T>
void run_register_block(Stream stream, const Matrices<T>& m) {
  if (!takes_register_blocks(m)) {
    throw std::runtime_error(
        "transpose_copy: kernel 05_register_block cannot take these arguments: it takes rows and "
        "columns that begin at multiples of 16 bytes and are as long");
  }
  const TileGrid grid = tile_grid<kTile>(m);
  const unsigned blocks = static_cast<unsigned>(count_tiles<kTile>(m));
  launch_early(register_block_kernel<T>, blocks, kRegisterThreads<T>, 0, stream, m, grid);
}

}  // namespace braze::cuda::transpose_ladder
