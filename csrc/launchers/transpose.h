#pragma once

#include "launchers/common/registry.h"
#include "launchers/common/types.h"

namespace braze::BRAZE_DEVICE {

// The kernel of that number, or nullptr beyond the last.
const KernelInfo* transpose_kernel(int number);

// out[b][c][r] = in[b][r][c] for `batch` dense rows x cols matrices. kernel: a number, or
// kAnyKernel.
void transpose_copy(Stream stream, DType dtype, const void* in, void* out, int64_t batch,
                    int64_t rows, int64_t cols, int kernel = kAnyKernel);

}  // namespace braze::BRAZE_DEVICE
