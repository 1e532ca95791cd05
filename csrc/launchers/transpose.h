#pragma once

#include "launchers/common/types.h"

namespace braze::BRAZE_DEVICE {

// out[b][c][r] = in[b][r][c] for `batch` dense rows x cols matrices. kernel: a name that
// is registered for this device, or "auto".
void transpose_copy(Stream stream, DType dtype, const void* in, void* out, int64_t batch,
                    int64_t rows, int64_t cols, const std::string& kernel = "auto");

}  // namespace braze::BRAZE_DEVICE
