// Convolutions of many channels on Hopper's tensor cores: implicit GEMM by TMA's im2col mode.
#pragma once

#include "cuda/conv2d/args.h"

namespace braze::cuda::im2col {

// All passes of bfloat16, float16 and, as TF32, float32, one group, channels last. Why it cannot
// take the arguments, or nullptr.
const char* obstacle(const Conv2dArgs& args);
void plan(const Conv2dArgs& args, Conv2dPlan* plan);
void run(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

}  // namespace braze::cuda::im2col
