// Convolutions whose windows lie side by side, as matrix products of patches.
#pragma once

#include "cuda/conv2d/args.h"

namespace braze::cuda::patches {

// Filters as large as the stride, no padding, one group, every dtype, channels last or contiguous:
// what pointwise takes with a patch for a pixel. Why it cannot take the arguments, or nullptr.
const char* obstacle(const Conv2dArgs& args);
void plan(const Conv2dArgs& args, Conv2dPlan* plan);
void run(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

}  // namespace braze::cuda::patches
