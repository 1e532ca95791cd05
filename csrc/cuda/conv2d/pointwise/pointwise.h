// 1 x 1 convolutions as matrix products of pixels and channels, by the kernels of matmul/.
#pragma once

#include "cuda/conv2d/args.h"
#include "launchers/conv2d_norm_grad.h"

namespace braze::cuda::pointwise {

// Any stride, no padding, one group, every dtype, channels last or contiguous (the weight gradient
// of the latter: 16 bits and TF32, whole 16 bytes of pixels). Why it cannot take the arguments, or
// nullptr.
const char* obstacle(const Conv2dArgs& args);
void plan(const Conv2dArgs& args, Conv2dPlan* plan);
void run(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

// Whether an input gradient that it takes can have another tensor added: the plan for that.
bool plan_added(const Conv2dArgs& args, Conv2dPlan* plan);
void run_added(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, const void* added,
               void* workspace);

// An input gradient with a Conv2dNormGrad, strided, which is added to another: whether it takes
// that, and the rest of the plan.
bool plan_norm_grad(const Conv2dArgs& args, Conv2dPlan* plan);
void run_norm_grad(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan,
                   const Conv2dNormGrad& norm, void* workspace);

}  // namespace braze::cuda::pointwise
