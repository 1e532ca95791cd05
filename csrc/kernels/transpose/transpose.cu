// Transpose through a padded shared-memory tile, so that both the reads and the writes of global
// memory run along rows, 16 bytes a thread. Only bits move: one kernel per element size.
#include "transpose.h"

#include "kernels/common/launch.cuh"
#include "kernels/common/numeric.cuh"
#include "kernels/common/registry.h"

namespace braze::cuda {
namespace {

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

// The row pitch is kTile + 1, so that the threads of a warp reading down a column meet distinct
// banks.
template <typename T>
using TransposeTile = T[kTile][kTile + 1];

// All of a thread's loads are in flight before the first store.
template <int N, typename T>
__device__ __forceinline__ void load_tile(TransposeTile<T>& tile, const T* in, int64_t row,
                                          int64_t col, int64_t rows, int64_t cols) {
  Vec<T, N> values[kTile * kTile / (N * kThreads)];
  for_each_in_tile<N>(row, col, rows, cols, [&](int step, int, int, int64_t offset) {
    values[step] = *reinterpret_cast<const Vec<T, N>*>(in + offset);
  });
  for_each_in_tile<N>(row, col, rows, cols, [&](int step, int r, int c, int64_t) {
#pragma unroll
    for (int k = 0; k < N; ++k) tile[r][c + k] = values[step].v[k];
  });
}

template <int N, typename T>
__device__ __forceinline__ void store_transposed(const TransposeTile<T>& tile, T* out, int64_t row,
                                                 int64_t col, int64_t rows, int64_t cols) {
  for_each_in_tile<N>(row, col, rows, cols, [&](int, int r, int c, int64_t offset) {
    Vec<T, N> v;
#pragma unroll
    for (int k = 0; k < N; ++k) v.v[k] = tile[c + k][r];
    *reinterpret_cast<Vec<T, N>*>(out + offset) = v;
  });
}

// `wide_in` (`wide_out`): rows of the input (output) take 16-byte accesses.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const T* in, T* __restrict__ out, int64_t rows, int64_t cols,
                     int64_t tiles_per_row, int64_t tiles_per_matrix, bool wide_in, bool wide_out) {
  wait_for_earlier_kernels();
  constexpr int N = kVecWidth<T>;
  __shared__ TransposeTile<T> tile;
  const int64_t matrix = blockIdx.x / tiles_per_matrix;
  const int64_t in_matrix = blockIdx.x % tiles_per_matrix;
  const int64_t row = in_matrix / tiles_per_row * kTile, col = in_matrix % tiles_per_row * kTile;
  in += matrix * rows * cols;
  out += matrix * rows * cols;
  if (wide_in) {
    load_tile<N>(tile, in, row, col, rows, cols);
  } else {
    load_tile<1>(tile, in, row, col, rows, cols);
  }
  __syncthreads();
  if (wide_out) {
    store_transposed<N>(tile, out, col, row, cols, rows);
  } else {
    store_transposed<1>(tile, out, col, row, cols, rows);
  }
}

// A side far shorter than a tile leaves most of it empty: one thread per element of the output,
// the strided reads served by L1.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    transpose_narrow_kernel(const T* in, T* __restrict__ out, int64_t n, int64_t rows,
                            int64_t cols) {
  wait_for_earlier_kernels();
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < n; i += stride) {
    const int64_t row = i % rows, rest = i / rows;
    const int64_t col = rest % cols, matrix = rest / cols;
    out[i] = in[(matrix * rows + row) * cols + col];
  }
}

template <typename T>
void launch(Stream stream, const void* in, void* out, int64_t batch, int64_t rows, int64_t cols) {
  const T* source = static_cast<const T*>(in);
  T* target = static_cast<T*>(out);
  constexpr int64_t kNarrow = 16;
  const int64_t tiles_per_row = ceil_div(cols, kTile);
  const int64_t tiles_per_matrix = tiles_per_row * ceil_div(rows, kTile);
  const bool fits_grid = batch <= (int64_t{1} << 31) / tiles_per_matrix - 1;
  if (rows < kNarrow || cols < kNarrow || !fits_grid) {
    const int64_t n = batch * rows * cols;
    launch_early(transpose_narrow_kernel<T>, grid_stride_blocks(n, kThreads), kThreads, 0, stream,
                 source, target, n, rows, cols);
  } else {
    constexpr int N = kVecWidth<T>;
    const bool wide_in = cols % N == 0 && is_vec_aligned(source);
    const bool wide_out = rows % N == 0 && is_vec_aligned(target);
    launch_early(transpose_kernel<T>, static_cast<unsigned>(batch * tiles_per_matrix), kThreads, 0,
                 stream, source, target, rows, cols, tiles_per_row, tiles_per_matrix, wide_in,
                 wide_out);
  }
  check_launch("transpose_copy");
}

const KernelEntry kEntry({"transpose_copy", "shared_tile", "float64 float32 bfloat16 float16",
                          "sm_80+", true, "64 x 64 tile, 16 bytes per thread and access"});

}  // namespace

void transpose_copy(Stream stream, DType dtype, const void* in, void* out, int64_t batch,
                    int64_t rows, int64_t cols) {
  if (batch == 0 || rows == 0 || cols == 0) return;
  switch (size_of(dtype)) {
    case 8: return launch<uint64_t>(stream, in, out, batch, rows, cols);
    case 4: return launch<uint32_t>(stream, in, out, batch, rows, cols);
    default: return launch<uint16_t>(stream, in, out, batch, rows, cols);
  }
}

}  // namespace braze::cuda
