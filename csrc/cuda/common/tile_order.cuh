// In which order blocks take the tiles of a matrix: down groups of 8 rows of tiles before the next
// column of tiles, so that the blocks in flight share rows and columns in L2. The divisors are
// fixed for a launch: a block that divided by itself would begin with some hundred instructions
// that wait for each other.
#pragma once

#include <algorithm>

#include "fast_div.cuh"

namespace braze::cuda {

class TileOrder {
 public:
  TileOrder() = default;
  // rows * columns < 2^31, in tiles
  TileOrder(int64_t rows, int64_t columns)
      : matrix_(rows * columns),
        group_(std::min<int64_t>(kGroup, rows) * columns),
        last_rows_(rows % kGroup == 0 ? kGroup : rows % kGroup),
        rows_(static_cast<int>(rows)) {}

  // Which matrix tile `index` is of, and where in it, in tiles.
  __device__ __forceinline__ int place(int index, int& row, int& column) const {
    int in_matrix, in_group;
    const int matrix = matrix_.div(index, in_matrix);
    const int group = group_.div(in_matrix, in_group);
    if ((group + 1) * kGroup <= rows_) {
      column = in_group / kGroup, row = in_group % kGroup;
    } else {
      column = last_rows_.div(in_group, row);
    }
    row += group * kGroup;
    return matrix;
  }

 private:
  static constexpr int kGroup = 8;      // rows
  FastDiv matrix_, group_, last_rows_;  // tiles of a matrix, of a group; rows of the last group
  int rows_ = 0;
};

}  // namespace braze::cuda
