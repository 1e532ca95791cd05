// All gradients of a linear layer of few rows and few outputs, 16 bits, by columns of the weight: a
// block brings the whole of dy to shared memory, with its columns of the input and of the weight,
// and makes those columns of both gradients. As tiles of two products (linear_gradients.cu) they
// read dy and the input several times and take three times as many blocks: less where a GPU is
// empty, but where several kernels share its multiprocessors each of these blocks is in the way of
// others for as long as it waits for memory.
#pragma once

#include "cuda/common/gemm_operand.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/numeric.cuh"

namespace braze::cuda::gradient_columns {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kColumns = 64;      // of a block
constexpr int kMostExtent = 128;  // rows, and outputs
constexpr int kVector = 8;        // elements of 16 bytes
constexpr int kChunks = kColumns / kVector;

// All dense and row-major: x and dx [rows][columns], dy and `result` [rows][outputs], w and dw
// [outputs][columns].
template <typename T>
struct Problem {
  MaskedOperand<T> dy;
  const T *x, *w;
  T *dx, *dw, *bias;  // bias: or nullptr
  int rows, outputs;
  int64_t columns;

  __host__ __device__ int padded_rows() const { return (rows + 15) / 16 * 16; }
  __host__ __device__ int padded_outputs() const { return (outputs + 15) / 16 * 16; }
  // A panel is 64 columns of a matrix: of dy there are so many.
  __host__ __device__ int panels() const { return (outputs + kColumns - 1) / kColumns; }
  int shared_bytes() const {
    const int panel_rows = padded_rows() * (panels() + 1) + padded_outputs();
    return panel_rows * kColumns * static_cast<int>(sizeof(T));
  }
};

// Element (row, column) of a panel, `column` a multiple of a vector. Rows are 128 bytes, whose
// vectors change places so that eight rows' are in different banks.
template <typename T>
__device__ __forceinline__ T* place(T* panel, int row, int column) {
  return panel + row * kColumns + ((column / kVector ^ row % 8) * kVector);
}

// Copies a block's columns of a matrix, zeros beyond its edges.
template <typename T>
__device__ __forceinline__ void copy_columns(T* panel, const T* from, int rows, int padded,
                                             int64_t first, int64_t columns) {
  for (int i = threadIdx.x; i < padded * kChunks; i += kThreads) {
    const int row = i / kChunks, column = i % kChunks * kVector;
    const bool valid = row < rows && first + column < columns;
    cp_async<16>(place(panel, row, column), from + row * columns + first + column, valid);
  }
}

// Fragments of 16 x 16 at (row, column) of a panel. kTransposed: of the panel's transpose, there at
// (column, row). kOuterFirst: as mma.sync wants A, else two fragments of B.
template <bool kTransposed, bool kOuterFirst, typename T>
__device__ __forceinline__ void load_fragment(uint32_t (&r)[4], T* panel, int row, int column) {
  const int lane = threadIdx.x % 32, block = lane / 8;
  const bool row_half = kOuterFirst != kTransposed ? block % 2 : block / 2;
  const bool column_half = kOuterFirst != kTransposed ? block / 2 : block % 2;
  T* const from = place(panel, row + row_half * 8 + lane % 8, column + column_half * 8);
  if constexpr (kTransposed) {
    ldmatrix_x4_trans(r, from);
  } else {
    ldmatrix_x4(r, from);
  }
}

// Sums of 16 kCount rows by the block's columns.
template <int kCount>
using Sums = float[kCount][kColumns / 8][4];

// sums += A B, of 16 kCount rows from `row` on: A of `depth` columns, panels of dy (kTransposed:
// its transpose), B a panel whose rows are the depth.
template <bool kTransposed, typename T, int kCount>
__device__ __forceinline__ void multiply(Sums<kCount>& sums, T* dy, int panel_size, T* b, int row,
                                         int depth) {
#pragma unroll 2
  for (int d = 0; d < depth; d += 16) {
    uint32_t fa[kCount][4], fb[4];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int column = kTransposed ? row + 16 * i : d, at = kTransposed ? d : row + 16 * i;
      load_fragment<kTransposed, true>(fa[i], dy + column / kColumns * panel_size, at,
                                       column % kColumns);
    }
#pragma unroll
    for (int n = 0; n < kColumns; n += 16) {
      load_fragment<true, false>(fb, b, d, n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t pair[2] = {fb[2 * half], fb[2 * half + 1]};
#pragma unroll
        for (int i = 0; i < kCount; ++i) mma_m16n8<T>(sums[i][n / 8 + half], fa[i], pair);
      }
    }
  }
}

// Sums as T, which are to wait in half the registers; a lane has two neighbours of a row at a time.
template <typename T, int kCount>
struct Results {
  Vec<T, 2> pairs[kCount][kColumns / 8][2];

  __device__ __forceinline__ explicit Results(const Sums<kCount>& sums) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const float(&four)[4] = sums[i][n];
        pairs[i][n][0] = {convert<T>(four[0]), convert<T>(four[1])};
        pairs[i][n][1] = {convert<T>(four[2]), convert<T>(four[3])};
      }
    }
  }

  // To a panel.
  __device__ __forceinline__ void stage(T* panel, int row, int rows) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (row + 16 * i >= rows) break;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          T* const to = place(panel, row + 16 * i + half * 8 + lane / 4, n * 8) + lane % 4 * 2;
          *reinterpret_cast<Vec<T, 2>*>(to) = pairs[i][n][half];
        }
      }
    }
  }
};

template <typename T>
__device__ __forceinline__ void store_columns(T* panel, T* to, int rows, int64_t first,
                                              int64_t columns) {
  for (int i = threadIdx.x; i < rows * kChunks; i += kThreads) {
    const int row = i / kChunks, column = i % kChunks * kVector;
    if (first + column >= columns) continue;
    *reinterpret_cast<uint4*>(to + row * columns + first + column) =
        *reinterpret_cast<const uint4*>(place(panel, row, column));
  }
}

// kInput: fragments of 16 rows of dx that a warp makes; of dw it makes two.
template <typename T, int kInput>
__global__ void __launch_bounds__(kThreads, 4 - kInput / 2)
    gradient_columns_kernel(const __grid_constant__ Problem<T> p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int rows = p.padded_rows(), outputs = p.padded_outputs(), panel_size = rows * kColumns;
  T* const dy = reinterpret_cast<T*>(shared);
  T* const x = dy + p.panels() * panel_size;
  T* const w = x + panel_size;
  const int64_t first = int64_t{blockIdx.x} * kColumns;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  wait_for_earlier_kernels();
  copy_columns(x, p.x, p.rows, rows, first, p.columns);
  copy_columns(w, p.w, p.outputs, outputs, first, p.columns);
  cp_async_commit();
  const int vectors = outputs / kVector;
#pragma unroll 4
  for (int i = threadIdx.x; i < rows * vectors; i += kThreads) {
    const int row = i / vectors, column = (i - row * vectors) * kVector;
    Vec<T, kVector> v{};
    if (row < p.rows && column < p.outputs) {
      const T* const from = p.dy.data + row * p.outputs + column;
      v = p.dy.mask != 0 ? p.dy.template behind_relu<kVector>(from, p.dy.result_at(from))
                         : load_vec<kVector>(from);
    }
    store_vec(place(dy + column / kColumns * panel_size, row, column % kColumns), v);
  }
  cp_async_wait<0>();
  __syncthreads();

  if (p.bias) {  // every block has a few outputs
    const int share = (p.outputs + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
    const int end = min(p.outputs, (static_cast<int>(blockIdx.x) + 1) * share);
    for (int o = static_cast<int>(blockIdx.x) * share + warp; o < end; o += kWarps) {
      T* const panel = dy + o / kColumns * panel_size;
      float sum = 0;
      for (int row = lane; row < p.rows; row += 32) {
        sum += convert<float>(place(panel, row, o % kColumns / kVector * kVector)[o % kVector]);
      }
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
      if (lane == 0) p.bias[o] = convert<T>(sum);
    }
  }
  const int input_row = warp * 16 * kInput, weight_row = warp * 32;
  Sums<kInput> dx_sums{};
  if (input_row < rows) multiply<false>(dx_sums, dy, panel_size, w, input_row, outputs);
  const Results<T, kInput> dx(dx_sums);
  __syncthreads();  // the weight has been read: dw takes its place, and dx that of the input
  Sums<2> dw_sums{};
  if (weight_row < outputs) {
    multiply<true>(dw_sums, dy, panel_size, x, weight_row, rows);
    Results<T, 2>(dw_sums).stage(w, weight_row, outputs);
  }
  __syncthreads();
  if (input_row < rows) dx.stage(x, input_row, rows);
  store_columns(w, p.dw, p.outputs, first, p.columns);
  __syncthreads();
  store_columns(x, p.dx, p.rows, first, p.columns);
}

}  // namespace braze::cuda::gradient_columns
