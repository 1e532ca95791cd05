#pragma once

#include "launchers/common/activation.h"
#include "launchers/common/types.h"

namespace braze::BRAZE_DEVICE {

// y[i] = activation(x[i]) over n elements.
void activation(Stream stream, DType dtype, const Activation& activation, const void* x, void* y,
                int64_t n);
// dx[i] = dy[i] activation'(x[i]).
void activation_backward(Stream stream, DType dtype, const Activation& activation, const void* dy,
                         const void* x, void* dx, int64_t n);

}  // namespace braze::BRAZE_DEVICE
