// Convolutions of many channels on Hopper's tensor cores: implicit GEMM by TMA's im2col mode.
#pragma once

#include "cuda/conv2d/args.h"
#include "launchers/conv2d_norm_grad.h"

namespace braze::cuda::im2col {

// All passes of bfloat16, float16 and float32 (as TF32, or in fp16 parts at its own accuracy), one
// group, channels last. Why it cannot take the arguments, or nullptr.
const char* obstacle(const Conv2dArgs& args);
void plan(const Conv2dArgs& args, Conv2dPlan* plan);
void run(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

// A plan for fprop in 16 bits or TF32 becomes one with a Conv2dTail.
void plan_tail(const Conv2dArgs& args, Conv2dPlan* plan);

// Where it takes the pixels that a filter's row meets for one pixel: the share of its rows of
// shared memory that is filled. Else 0.
double rows_filled(const Conv2dArgs& args);

// Whether an input gradient that it takes can have another tensor added.
bool takes_added(const Conv2dArgs& args);
void run_added(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, const void* added,
               void* workspace);

// An input gradient with a Conv2dNormGrad: whether it takes that, and the plan.
bool plan_norm_grad(const Conv2dArgs& args, bool has_mask, Conv2dPlan* plan);
void run_norm_grad(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan,
                   const Conv2dNormGrad& norm, void* workspace);

// Of float32 in parts.
const char* split_obstacle(const Conv2dArgs& args);
void plan_split(const Conv2dArgs& args, Conv2dPlan* plan);
void run_split(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

}  // namespace braze::cuda::im2col
