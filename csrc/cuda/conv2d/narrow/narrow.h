// Convolutions of images of up to four channels, the first layers of networks: forward and weight
// gradient.
#pragma once

#include "cuda/conv2d/args.h"

namespace braze::cuda::narrow {

// Why the kernels cannot take a pass, or nullptr.
const char* obstacle(const Conv2dArgs& args);

void plan(const Conv2dArgs& args, Conv2dPlan* plan);
void run(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

}  // namespace braze::cuda::narrow
