// The kernels of the convolution on the CPU: what the table in conv2d.cpp is made of.
#pragma once

#include "launchers/conv2d.h"

namespace braze::cpu {

// *_obstacle: why the kernel cannot take a problem, or nullptr; where there is none, it takes all.
// plan_*: fills the tiling and the bytes of workspace. run_*: `bias` is of the result's channels,
// or nullptr.
#define BRAZE_CONV2D_KERNEL(name)                                                         \
  void plan_##name(const Conv2dProblem& problem, Conv2dPlan* plan);                       \
  void run_##name(const Conv2dProblem& problem, const Conv2dPlan& plan, const void* bias, \
                  void* workspace);

BRAZE_CONV2D_KERNEL(direct)
BRAZE_CONV2D_KERNEL(implicit_gemm)
BRAZE_CONV2D_KERNEL(blocked_im2col)
// Whether it reads an operand of a weight gradient of 1 x 1 filters where it is, in order.
bool blocked_im2col_reads_in_place(const Conv2dProblem& problem);

const char* amx_obstacle(const Conv2dProblem& problem);
BRAZE_CONV2D_KERNEL(amx)

const char* depthwise_obstacle(const Conv2dProblem& problem);
BRAZE_CONV2D_KERNEL(depthwise)

const char* grouped_obstacle(const Conv2dProblem& problem);
BRAZE_CONV2D_KERNEL(grouped)

const char* im2col_obstacle(const Conv2dProblem& problem);
BRAZE_CONV2D_KERNEL(im2col)

const char* narrow_input_obstacle(const Conv2dProblem& problem);
BRAZE_CONV2D_KERNEL(narrow_input)

// Of what pointwise takes: whether it reads or writes the weights once, and little else.
bool has_few_pixels(const Conv2dProblem& problem);
const char* pointwise_obstacle(const Conv2dProblem& problem);
BRAZE_CONV2D_KERNEL(pointwise)

const char* winograd_obstacle(const Conv2dProblem& problem);
BRAZE_CONV2D_KERNEL(winograd)

#undef BRAZE_CONV2D_KERNEL

}  // namespace braze::cpu
