#pragma once

#include "launchers/batch_norm.h"
#include "launchers/conv2d.h"

namespace braze {

// What an input gradient's kernel does on the way out for the batch norm, in training, that made
// the convolution's input: it stores the gradient before that one's activation, a clamp, in the
// place of the gradient, and leaves the sums that batch_norm_backward begins with. Tensors are laid
// out as the gradient, channels last, and aligned to 16 bytes.
struct Conv2dNormGrad {
  const void* added;    // another gradient of the same tensor, or nullptr
  const void* before;   // what was normalised
  const uint8_t* mask;  // of batch_norm_apply, where there was a residual; else nullptr
  Activation activation;
  BatchNormStatistics statistics;
  float* sums;  // [c][the plan's moment_sets][2]: of the gradient, and of it times before - mean
};

namespace BRAZE_DEVICE {

// Of an input gradient that the given plan runs, or, from_library, a library: whether a kernel that
// does all of this is worth it against that and the passes. The plan becomes that kernel's.
bool plan_conv2d_norm_grad(const Conv2dProblem& problem, bool from_library, bool has_mask,
                           bool adds, Conv2dPlan* plan);

// As run_conv2d.
void run_conv2d_norm_grad(Stream stream, const Conv2dProblem& problem, const Conv2dPlan& plan,
                          const Conv2dNormGrad& norm, void* workspace);

}  // namespace BRAZE_DEVICE
}  // namespace braze
