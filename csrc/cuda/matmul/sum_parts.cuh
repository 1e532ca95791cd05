// The sums of C's columns and rows (MatmulArgs): the tiles of a kernel leave parts of them at the
// front of its workspace, which a second launch adds up in a fixed order.
#pragma once

#include "cuda/common/ordered_sum.cuh"
#include "launchers/matmul.h"

namespace braze::cuda {

// How many parts there are of each column's sum, and of each row's.
struct SumParts {
  int64_t of_column, of_row;

  // Their share of the workspace, which what follows is aligned by.
  int64_t bytes(const MatmulArgs& p) const {
    const int64_t sums = (p.column_sums ? of_column * p.n : 0) + (p.row_sums ? of_row * p.m : 0);
    return (sums * (p.dtype == DType::kFloat64 ? 8 : 4) + 255) / 256 * 256;
  }
  // Where the kernel leaves them: [part][column], [part][row]; nullptr if they are not wanted.
  template <typename Acc>
  Acc* columns(const MatmulArgs& p, void* workspace) const {
    return p.column_sums ? static_cast<Acc*>(workspace) : nullptr;
  }
  template <typename Acc>
  Acc* rows(const MatmulArgs& p, void* workspace) const {
    if (!p.row_sums) return nullptr;
    return static_cast<Acc*>(workspace) + (p.column_sums ? of_column * p.n : 0);
  }

  template <typename T>
  void add_up(Stream stream, const MatmulArgs& p, void* workspace) const {
    using Acc = acc_t<T>;
    if (p.column_sums) {
      launch_ordered_sum(stream, columns<Acc>(p, workspace), static_cast<int>(of_column), p.n,
                         static_cast<T*>(p.column_sums));
    }
    if (p.row_sums) {
      launch_ordered_sum(stream, rows<Acc>(p, workspace), static_cast<int>(of_row), p.m,
                         static_cast<T*>(p.row_sums));
    }
  }
};

}  // namespace braze::cuda
