// 1 x 1 convolutions as matrix products of pixels and channels, by the kernels of matmul/.
#pragma once

#include "cuda/conv2d/args.h"

namespace braze::cuda::pointwise {

// Stride 1, no padding, one group, every dtype, channels last or contiguous (the weight gradient:
// channels last, or one image). Why it cannot take the arguments, or nullptr.
const char* obstacle(const Conv2dArgs& args);
void plan(const Conv2dArgs& args, Conv2dPlan* plan);
void run(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

}  // namespace braze::cuda::pointwise
