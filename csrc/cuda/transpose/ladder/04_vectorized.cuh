// Rung 4, shipped for matrices of which a side is no multiple of 16 bytes: tiles of 64 x 64, and 16
// bytes a thread and access in global memory wherever rows are multiples of that.
//
// A warp's access grows to 512 bytes for an instruction's cost, and all of a thread's loads are in
// flight before it stores the first. Shared memory still takes single elements, 8 loads and 8
// stores for what is one access of 2-byte elements outside, and these are now the most of what the
// kernel executes. Vectors also bring conflicts back: lanes are a vector apart in a row, so that
// two to four of them meet in a bank.
#pragma once

#include "rung.cuh"

namespace braze::cuda::transpose_ladder {

constexpr int kTile = 64;
constexpr int kThreads = 256;

// A thread's accesses to the part [first_row, +kTile) x [first_col, +kTile) of a rows x cols
// matrix, N elements each: consecutive threads take consecutive elements of a row. Calls f(step,
// row in the tile, column in the tile, offset in the matrix).
template <int N, typename F>
__device__ __forceinline__ void for_each_in_tile(int64_t first_row, int64_t first_col, int64_t rows,
                                                 int64_t cols, F&& f) {
  constexpr int kPerRow = kTile / N, kRowsAtOnce = kThreads / kPerRow;
  const int col = threadIdx.x % kPerRow * N;
#pragma unroll
  for (int step = 0; step < kTile / kRowsAtOnce; ++step) {
    const int row = threadIdx.x / kPerRow + step * kRowsAtOnce;
    if (first_row + row < rows && first_col + col < cols) {
      f(step, row, col, (first_row + row) * cols + first_col + col);
    }
  }
}

template <typename T>
using PaddedTile = T[kTile][kTile + 1];

// All of a thread's loads are in flight before the first store.
template <int N, typename T>
__device__ __forceinline__ void load_tile(PaddedTile<T>& tile, const T* in, int64_t row,
                                          int64_t col, int64_t rows, int64_t cols) {
  Vec<T, N> values[kTile * kTile / (N * kThreads)];
  for_each_in_tile<N>(row, col, rows, cols, [&](int step, int, int, int64_t offset) {
    values[step] = load_vec<N>(in + offset);
  });
  for_each_in_tile<N>(row, col, rows, cols, [&](int step, int r, int c, int64_t) {
#pragma unroll
    for (int k = 0; k < N; ++k) tile[r][c + k] = values[step].v[k];
  });
}

template <int N, typename T>
__device__ __forceinline__ void store_transposed(const PaddedTile<T>& tile, T* out, int64_t row,
                                                 int64_t col, int64_t rows, int64_t cols) {
  for_each_in_tile<N>(row, col, rows, cols, [&](int, int r, int c, int64_t offset) {
    Vec<T, N> v;
#pragma unroll
    for (int k = 0; k < N; ++k) v.v[k] = tile[c + k][r];
    store_vec(out + offset, v);
  });
}

// `wide_in` (`wide_out`): rows of the input (output) take 16-byte accesses.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    vectorized_kernel(Matrices<T> m, TileGrid grid, bool wide_in, bool wide_out) {
  wait_for_earlier_kernels();
  constexpr int N = kVecWidth<T>;
  __shared__ PaddedTile<T> tile;
  const Tile at = tile_of_block<kTile>(grid, m.rows, m.cols);
  const T* const in = m.in + at.matrix;
  T* const out = m.out + at.matrix;
  if (wide_in) {
    load_tile<N>(tile, in, at.row, at.col, m.rows, m.cols);
  } else {
    load_tile<1>(tile, in, at.row, at.col, m.rows, m.cols);
  }
  __syncthreads();
  if (wide_out) {
    store_transposed<N>(tile, out, at.col, at.row, m.cols, m.rows);
  } else {
    store_transposed<1>(tile, out, at.col, at.row, m.cols, m.rows);
  }
}

// Whether all rows of the input (output) begin at multiples of 16 bytes and are as long.
template <typename T>
bool is_wide_in(const Matrices<T>& m) {
  return m.cols % kVecWidth<T> == 0 && is_vec_aligned(m.in);
}
template <typename T>
bool is_wide_out(const Matrices<T>& m) {
  return m.rows % kVecWidth<T> == 0 && is_vec_aligned(m.out);
}

template <typename T>
void run_vectorized(Stream stream, const Matrices<T>& m) {
  const TileGrid grid = tile_grid<kTile>(m);
  const unsigned blocks = static_cast<unsigned>(count_tiles<kTile>(m));
  launch_early(vectorized_kernel<T>, blocks, kThreads, 0, stream, m, grid, is_wide_in(m),
               is_wide_out(m));
}

}  // namespace braze::cuda::transpose_ladder
