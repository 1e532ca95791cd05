#pragma once

#include "launchers/common/types.h"

namespace braze::BRAZE_DEVICE {

// y[i] = x[i] < 0 ? 0 : x[i] over n elements; NaN stays NaN. x may equal y.
void relu(Stream stream, DType dtype, const void* x, void* y, int64_t n);

// dx[i] = y[i] <= 0 ? 0 : dy[i], y being the forward's result: a NaN result lets the gradient pass,
// as in torch.
void relu_backward(Stream stream, DType dtype, const void* dy, const void* y, void* dx, int64_t n);

}  // namespace braze::BRAZE_DEVICE
