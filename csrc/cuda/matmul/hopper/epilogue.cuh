// The full epilogue (MatmulArgs) of the Hopper kernels, on accumulators: residual, ReLU, the ReLU's
// gradient, and what a tile adds to the sums of C's columns and rows. Kernels get it with FullArgs
// in the place of Args.
#pragma once

#include "pipeline.cuh"
#include "cuda/common/predicated.cuh"

namespace braze::cuda::hopper {

struct FullArgs : Args {
  static constexpr bool kFull = true;
  const void *residual, *relu_result;  // laid out as C, or nullptr
  bool pairs;                          // they are read, in not swapped products, two at a time
  // Sums of the product's columns and rows, which swapped are C's rows and columns; or nullptr:
  // [row / 64][column], and one part of every row for each of a tile's blocks.
  float *column_parts, *row_parts;
};

// visit(i, x) with the value x of another matrix laid out as C where acc[i] lies; 0 outside. `row`
// and `column` are the place of acc[0] in the product.
template <typename T, bool kSwap, int kCount, typename Visit>
__device__ __forceinline__ void for_each_value(const FullArgs& a, const void* data, int row,
                                               int column, Visit visit) {
  // For row, for row + 8, and for the column after column, which are 8 further on with every 4
  // elements.
  const int64_t down = kSwap ? 1 : a.c_ld, right = kSwap ? a.c_ld : 1;
  const T* upper = advanced(static_cast<const T*>(data), row * down + column * right);
  const T* lower = advanced(upper, 8 * down);
  const bool has_upper = row < a.rows, has_lower = row + 8 < a.rows;
  // Asked for together: each round waits for memory, but more than registers hold would, too.
  constexpr int kBatch = kCount % 48 == 0 ? 48 : kCount % 32 == 0 ? 32 : kCount;
#pragma unroll
  for (int first = 0; first < kCount; first += kBatch) {
    Vec<T, 2> v[kBatch / 2];
    const auto load_all = [&](auto load) {
#pragma unroll
      for (int i = 0; i < kBatch; i += 4) {
        const int j = column + (first + i) * 2;
        v[i / 2] = load(upper, has_upper, j);
        v[i / 2 + 1] = load(lower, has_lower, j);
        upper = advanced(upper, 8 * right), lower = advanced(lower, 8 * right);
      }
    };
    // Either loop as a whole: a choice at each load would wait for it.
    if (!kSwap && a.pairs) {
      load_all([&](const T* at, bool inside, int j) {
        return load_inside<2>(at, inside && j < a.columns);
      });
    } else {
      load_all([&](const T* at, bool inside, int j) {
        const T x = load_inside<1>(at, inside && j < a.columns).v[0];
        return Vec<T, 2>{x, load_inside<1>(at + right, inside && j + 1 < a.columns).v[0]};
      });
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) visit(first + i, convert<float>(v[i / 2].v[i % 2]));
  }
}

template <typename T, bool kSwap, int kCount>
__device__ __forceinline__ void finish_full(const FullArgs& a, float (&acc)[kCount], int row,
                                            int column) {
  add_bias<T, kSwap>(a, acc, row, column);
  if (a.residual) {
    for_each_value<T, kSwap, kCount>(a, a.residual, row, column,
                                     [&](int i, float x) { acc[i] += x; });
  }
  apply_relu(a, acc);
  if (a.relu_result) {
    for_each_value<T, kSwap, kCount>(a, a.relu_result, row, column, [&](int i, float x) {
      if (x <= 0) acc[i] = 0;  // NaN passes
    });
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int r = row + i / 2 % 2 * 8, j = column + i / 4 * 8 + i % 2;
    acc[i] = r < a.rows && j < a.columns ? convert<float>(convert<T>(acc[i])) : 0.0f;
  }
  // Else what rounding made would be kept, beside what it was converted back to, for the store.
  wgmma_touch(acc);
}

// The two rows' sums over the columns that the four lanes of a row have together.
__device__ __forceinline__ void store_row_part(const FullArgs& a, float (&sums)[2], int row,
                                               int part) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int lanes = 2; lanes > 0; lanes /= 2) {
      sums[half] += __shfl_xor_sync(0xffffffff, sums[half], lanes);
    }
    const int r = row + half * 8;
    if (threadIdx.x % 4 == 0 && r < a.rows) a.row_parts[int64_t{part} * a.rows + r] = sums[half];
  }
}

// The sums of a consumer's 64 rows, which its warps have left in `sums` for `count` columns from
// `column` on. All of the consumer's threads call it.
template <int kColumns>
__device__ __forceinline__ void store_column_part(const FullArgs& a, const float (*sums)[kColumns],
                                                  int row, int column, int count) {
  named_barrier(1 + threadIdx.x / 128, 128);
  for (int i = threadIdx.x % 128; i < count && column + i < a.columns; i += 128) {
    a.column_parts[int64_t{row / 64} * a.columns + column + i] =
        (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
  }
}

// A step of a sum over lanes of all v[i]: the lanes that are `kLanes` apart go on with one half of
// them each. Gives which.
template <int kLanes, int kHalf, int kCount>
__device__ __forceinline__ int share_sums(float (&v)[kCount]) {
  const bool upper = threadIdx.x & kLanes;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float kept = upper ? v[i + kHalf] : v[i], given = upper ? v[i] : v[i + kHalf];
    v[i] = kept + __shfl_xor_sync(0xffffffff, given, kLanes);
  }
  return upper ? kHalf : 0;
}

// The parts of 64 finished rows of a tile: `row` and `column` are their first ones, which column of
// tiles they are in is `part`. All of a consumer's threads call it.
template <int kColumns>
__device__ __forceinline__ void sum_tile(const FullArgs& a, const float (&acc)[kColumns / 2],
                                         int row, int column, int part) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  if (a.row_parts) {
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 2) sums[i / 2 % 2] += acc[i] + acc[i + 1];
    store_row_part(a, sums, row + warp * 16 + lane / 4, part);
  }
  if (!a.column_parts) return;
  __shared__ float shared[2][4][kColumns];
  float(*const sums)[kColumns] = shared[threadIdx.x / 128];
  named_barrier(1 + threadIdx.x / 128, 128);  // the last tile's sums have been read
  // Eight lanes have the same columns. A part of the tile at a time, for lack of registers.
  constexpr int kParts = 2, kCount = kColumns / 4 / kParts;
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    float v[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int from = (p * kCount + i) / 2 * 4 + i % 2;
      v[i] = acc[from] + acc[from + 2];
    }
    int first = p * kCount;  // of the columns that the lane ends up with
    first += share_sums<16, kCount / 2>(v);
    first += share_sums<8, kCount / 4>(v);
    first += share_sums<4, kCount / 8>(v);
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
      const int c = first + i;
      sums[warp][c / 2 * 8 + lane % 4 * 2 + c % 2] = v[i];
    }
  }
  store_column_part<kColumns>(a, sums, row, column, kColumns);
}

}  // namespace braze::cuda::hopper
