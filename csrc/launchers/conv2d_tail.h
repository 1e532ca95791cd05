#pragma once

#include "launchers/conv2d.h"

namespace braze::BRAZE_DEVICE {

// Of fprop: whether a kernel that does all of a Conv2dTail on the way out, so that no pass over the
// result is needed for it, is worth it, measured against another one and that pass. The plan
// becomes that kernel's. adds: whether there is an addition.
bool plan_conv2d_tail(const Conv2dProblem& problem, const Activation& activation, bool adds,
                      Conv2dPlan* plan);

}  // namespace braze::BRAZE_DEVICE
