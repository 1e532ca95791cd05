#pragma once

#include "launchers/common/registry.h"
#include "launchers/common/types.h"

namespace braze::BRAZE_DEVICE {

// The kernel of that number, or nullptr beyond the last.
const KernelInfo* vector_add_kernel(int number);

// out[i] = a[i] + b[i] over n elements; 16-bit elements are added in fp32 and rounded once.
// kernel: a number, or kAnyKernel.
void vector_add(Stream stream, DType dtype, const void* a, const void* b, void* out, int64_t n,
                int kernel);

}  // namespace braze::BRAZE_DEVICE
