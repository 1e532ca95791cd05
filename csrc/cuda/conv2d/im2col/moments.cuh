// fprop in TF32 that leaves batch norm's moments of what it stores, so that nobody reads the result
// again for them. Each cluster stays in one column of tiles: its warps' running sums of these
// filters stay in shared memory, and what is left in the end is one set for 64 rows of a tile of
// each block, however many pixels there are.
#pragma once

#include "copies.cuh"
#include "cuda/matmul/hopper/epilogue.cuh"
#include "launchers/common/moments.h"

namespace braze::cuda::im2col {

struct MomentArgs : ColumnArgs {
  static constexpr bool kScattered = true;  // scatter_direct() below stores

  int cluster_rows, first_rows;  // of a cluster's tile, a power of two; of all clusters' first ones
  Moments* moments;              // [filter][first_rows / 64]
};

// Sums of the filters of a block's tiles, by consumer and warp. Deviations are from the warp's
// first result, so that squares do not cancel.
template <int kColumns>
struct RunningSums {
  float shift[2][4][kColumns], sum[2][4][kColumns], square_sum[2][4][kColumns];
  int count[2][4];
};

// The four warps' sums of one column.
template <int kColumns>
__device__ __forceinline__ Moments merged(const RunningSums<kColumns>& s, int group, int column) {
  Moments all{0, 0, 0};
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) {
    const float count = static_cast<float>(s.count[group][warp]);
    if (count == 0) continue;
    const float sum = s.sum[group][warp][column], mean = sum / count;
    const float m2 = s.square_sum[group][warp][column] - mean * sum;
    const float change = s.shift[group][warp][column] + mean - all.mean, total = all.count + count;
    all.mean += change * (count / total);
    all.m2 += (m2 < 0 ? 0 : m2) + change * change * (all.count * (count / total));
    all.count = total;
  }
  return all;
}

// Stores 64 rows of a tile and adds them to the sums; behind the block's last tile, leaves these.
// All of a consumer's threads call it; `row` and `column` are the place of acc[0] in the product.
template <typename T, int kCount>
__device__ __forceinline__ void scatter_direct(const MomentArgs& a, int, const float (&acc)[kCount],
                                               int row, int column) {
  constexpr int kColumns = 2 * kCount, kStep = 32;  // columns at a time, for lack of registers
  static_assert(kColumns % kStep == 0);
  hopper::store_direct<T, false>(static_cast<T*>(a.c), a.c_ld, a.rows, a.columns, acc, row, column);

  __shared__ RunningSums<kColumns> s;
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int warp_row = row - lane / 4, tile_row = warp_row - warp * 16;
  const int own = lane % 4 * 2, tile_column = column - own;
  const bool is_first = tile_row < a.first_rows;
  const bool has_upper = row < a.rows, has_lower = row + 8 < a.rows;
  if (is_first) {
    if (lane < 4) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        *reinterpret_cast<float2*>(&s.shift[group][warp][i * 2 + own]) = {acc[i], acc[i + 1]};
      }
    }
    __syncwarp();
  }
  if (lane == 0) {
    const int count = min(max(a.rows - warp_row, 0), 16);
    s.count[group][warp] = is_first ? count : s.count[group][warp] + count;
  }
#pragma unroll
  for (int first = 0; first < kColumns; first += kStep) {
    float sum[8], square_sum[8];  // of columns first + j / 2 * 8 + own + j % 2
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const int i = first / 2 + j * 2;
      const float2 shift =
          *reinterpret_cast<const float2*>(&s.shift[group][warp][first + j * 4 + own]);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const float from = v ? shift.y : shift.x;
        const float upper = has_upper ? acc[i + v] - from : 0.0f;
        const float lower = has_lower ? acc[i + v + 2] - from : 0.0f;
        sum[j + v] = upper + lower;
        square_sum[j + v] = fmaf(upper, upper, lower * lower);
      }
    }
    // Eight lanes have the same columns; each goes on with one of them.
    int j = hopper::share_sums<16, 4>(sum);
    j += hopper::share_sums<8, 2>(sum);
    j += hopper::share_sums<4, 1>(sum);
    hopper::share_sums<16, 4>(square_sum);
    hopper::share_sums<8, 2>(square_sum);
    hopper::share_sums<4, 1>(square_sum);
    const int c = first + j / 2 * 8 + own + j % 2;
    float &all = s.sum[group][warp][c], &squares = s.square_sum[group][warp][c];
    all = is_first ? sum[0] : all + sum[0];
    squares = is_first ? square_sum[0] : squares + square_sum[0];
  }
  // Of this cluster; the block's other tiles are `first_rows` apart.
  const int cluster_row = tile_row & ~(a.cluster_rows - 1);
  if (cluster_row + a.first_rows < a.rows) return;
  named_barrier(1 + group, 128);
  const int sets = a.first_rows / 64, set = tile_row % a.first_rows / 64;
  for (int c = threadIdx.x % 128; c < kColumns && tile_column + c < a.columns; c += 128) {
    a.moments[int64_t{tile_column + c} * sets + set] = merged(s, group, c);
  }
}

}  // namespace braze::cuda::im2col
