// Convolutions of up to eight results a pixel: forward, as networks end (segmentation, images), and
// input gradients of few channels.
#pragma once

#include "cuda/conv2d/args.h"

namespace braze::cuda::narrow {

// Why the kernel cannot take a pass, or nullptr.
const char* output_obstacle(const Conv2dArgs& args);

void plan_output(const Conv2dArgs& args, Conv2dPlan* plan);
void run_output(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

}  // namespace braze::cuda::narrow
