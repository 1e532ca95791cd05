#pragma once

#include "launchers/common/activation.h"
#include "launchers/common/types.h"

namespace braze {

// Of [rows, channels], contiguous, with a bias for each channel.
struct BiasActivationShape {
  DType dtype;  // of all but the bias
  DType bias;   // of the bias and its gradient: dtype, or float32 where that has 16 bits
  int64_t rows, channels;
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// y = activation(x + bias[c]). Of at least one element, as below.
void bias_activation(Stream stream, const BiasActivationShape& shape, const Activation& activation,
                     const void* x, const void* bias, void* y);

// dx = dy activation'(x + bias[c]) and dbias[c] = sum of that over the rows, either of them nullptr
// if it is not wanted.
void bias_activation_backward(Stream stream, const BiasActivationShape& shape,
                              const Activation& activation, const void* dy, const void* x,
                              const void* bias, void* dx, void* dbias, void* workspace);
int64_t bias_activation_workspace_bytes(const BiasActivationShape& shape);

}  // namespace braze::BRAZE_DEVICE
