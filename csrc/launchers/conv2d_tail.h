#pragma once

#include "launchers/conv2d.h"

namespace braze::BRAZE_DEVICE {

// Of fprop: whether a kernel that does all of a Conv2dTail on the way out, so that no pass over the
// result is needed for it, is worth it, measured against another one and that pass. The plan
// becomes that kernel's. adds: whether there is an addition.
bool plan_conv2d_tail(const Conv2dProblem& problem, const Activation& activation, bool adds,
                      Conv2dPlan* plan);

// Where no kernel is: whether run_tail_pass() takes rows of so many channels, dense and aligned to
// 16 bytes, and is faster than batch norm's coefficients and its pass. There may be an addition.
bool takes_tail_pass(DType dtype, int64_t rows, int64_t channels, const Activation& activation);

// y: what the tail makes of z, the results of a convolution without its bias. It may be z.
void run_tail_pass(Stream stream, DType dtype, int64_t rows, int64_t channels,
                   const Conv2dTail& tail, const void* z, void* y);

}  // namespace braze::BRAZE_DEVICE
