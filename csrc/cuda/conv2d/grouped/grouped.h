// Convolutions in groups of few to some hundred channels, channels last, all three passes: a block
// copies a tile of pixels of some groups' channels to shared memory, with what the filter's taps
// reach beyond it, and multiplies there.
#pragma once

#include "cuda/conv2d/args.h"

namespace braze::cuda::grouped {

const char* obstacle(const Conv2dArgs& args);
void plan(const Conv2dArgs& args, Conv2dPlan* plan);
void run(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

}  // namespace braze::cuda::grouped
