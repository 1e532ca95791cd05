// Depthwise convolution (as many groups as channels, one filter each), every pass.
#pragma once

#include "cuda/conv2d/args.h"

namespace braze::cuda::depthwise {

// Whether the kernels take a pass: filters of 3 x 3, 5 x 5 or 7 x 7, stride 1 or 2, no dilation,
// less padding than the filter is wide, all but fp64; channels last (rows, images and pixels may be
// apart) or contiguous, the same for input and output; contiguous rows that fit shared memory.
bool supports(const Conv2dArgs& args);

// Whether a pass that they take can have a tail without an addition.
bool takes_tail(const Conv2dArgs& args);

// Whether a pass that they take goes by tiles, not by a walk over rows.
bool goes_by_tiles(const Conv2dArgs& args);

// Of the weight gradient, the workspace; others need none.
void plan(const Conv2dArgs& args, Conv2dPlan* plan);
void run(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

}  // namespace braze::cuda::depthwise
