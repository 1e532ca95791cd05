#pragma once

#include "kernels/common/types.h"

namespace braze::BRAZE_DEVICE {

// out[b][c][r] = in[b][r][c] for `batch` dense rows x cols matrices.
void transpose_copy(Stream stream, DType dtype, const void* in, void* out, int64_t batch,
                    int64_t rows, int64_t cols);

}  // namespace braze::BRAZE_DEVICE
