#pragma once

#include "launchers/conv2d.h"

namespace braze::BRAZE_DEVICE {

// Of an input gradient: whether its kernel can add a tensor laid out as the result, aligned to 16
// bytes, on the way out, so that no pass over both is needed. The plan becomes one for that.
// from_library: a library makes the gradient otherwise, so that what the pass takes has to be more
// than it is ahead.
bool plan_conv2d_added(const Conv2dProblem& problem, bool from_library, Conv2dPlan* plan);

// As run_conv2d.
void run_conv2d_added(Stream stream, const Conv2dProblem& problem, const Conv2dPlan& plan,
                      const void* added, void* workspace);

}  // namespace braze::BRAZE_DEVICE
