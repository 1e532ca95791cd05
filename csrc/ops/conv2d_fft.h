// A pass of a convolution by torch's FFT: for what launchers have no transform of their own.
#pragma once

#include "launchers/conv2d.h"
#include "ops/common.h"

namespace braze {

// Runs what plan_by_fft planned, on torch's current stream. like: a tensor on the device. bias: of
// the result's channels, or nullptr.
void run_conv2d_by_fft(Stream stream, const Conv2dProblem& problem, const Conv2dPlan& plan,
                       const void* bias, const Tensor& like);

}  // namespace braze
