// Convolutions of images of up to eight channels, the first layers of networks: forward and weight
// gradient. And, with a stride of 1, both gradients of convolutions with up to eight filters, the
// last layers: the same with the result's gradient for an image.
#pragma once

#include "cuda/conv2d/args.h"

namespace braze::cuda::narrow {

// Why the kernels cannot take a pass, or nullptr.
const char* obstacle(const Conv2dArgs& args);

void plan(const Conv2dArgs& args, Conv2dPlan* plan);
void run(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

}  // namespace braze::cuda::narrow
