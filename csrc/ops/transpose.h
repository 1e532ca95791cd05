// Transposing copies for other ops' front ends, which have kernels for one order of the dimensions
// only.
#pragma once

#include "launchers/transpose.h"
#include "ops/common.h"

namespace braze {

// A tensor of `sizes` from t's memory, which is `batch` dense matrices of rows x cols, each of them
// transposed. Contiguous.
inline Tensor transposed(const DeviceContext& context, const Tensor& t,
                         const std::vector<int64_t>& sizes, int64_t batch, int64_t rows,
                         int64_t cols) {
  Tensor result = empty(sizes, t);
  dev::transpose_copy(context.stream(), dtype_of("transpose_copy", "input", t), t.const_data_ptr(),
                      result.mutable_data_ptr(), batch, rows, cols);
  return result;
}

}  // namespace braze
