#pragma once

#include "cuda/conv2d/args.h"

namespace braze::cuda::halo {

// Whether the kernels take this pass: stride 1, dilation 1, one group, channels last (fp32 results:
// any strides), compute capability 9.0, all but fp64; weights and a tile of input that fit shared
// memory together; for the weight gradient filters of one to three rows and three columns.
bool supports(const Conv2dArgs& args);

// Where it is supported. Of fprop the plan leaves moments of the results as they are stored.
void plan(const Conv2dArgs& args, Conv2dPlan* plan);
void run(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

// The input gradient for up to 32 channels, for which the kernel above would waste half of the
// products: filters of one to three rows and three columns, whose number fills rows of 128 bytes
// (fp32 in parts: of 256); all tensors channels last. Asks only what supports() does not.
bool supports_narrow_dgrad(const Conv2dArgs& args);
void plan_narrow_dgrad(const Conv2dArgs& args, Conv2dPlan* plan);
void run_narrow_dgrad(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan,
                      void* workspace);

// The weight gradient. Deterministic: blocks leave partial sums, added up in a fixed order.
bool supports_wgrad(const Conv2dArgs& args);
void plan_wgrad(const Conv2dArgs& args, Conv2dPlan* plan);
void run_wgrad(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

}  // namespace braze::cuda::halo
