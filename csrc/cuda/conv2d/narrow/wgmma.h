// Convolutions of images of up to four channels on Hopper's tensor cores: fprop and wgrad.
#pragma once

#include "cuda/conv2d/args.h"

namespace braze::cuda::narrow {

// Why the kernel cannot take a pass, or nullptr.
const char* wgmma_obstacle(const Conv2dArgs& args);

void plan_wgmma(const Conv2dArgs& args, Conv2dPlan* plan);
void run_wgmma(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

}  // namespace braze::cuda::narrow
