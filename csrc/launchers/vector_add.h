#pragma once

#include "launchers/common/types.h"

namespace braze::BRAZE_DEVICE {

// out[i] = a[i] + b[i] over n elements; 16-bit elements are added in fp32 and rounded once.
// kernel: a name that is registered for this device, or "auto".
void vector_add(Stream stream, DType dtype, const void* a, const void* b, void* out, int64_t n,
                const std::string& kernel);

}  // namespace braze::BRAZE_DEVICE
