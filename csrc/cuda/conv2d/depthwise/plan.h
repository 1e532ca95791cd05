// How a depthwise problem is cut into blocks.
#pragma once

#include "args.h"

namespace braze::cuda::depthwise {

// What the cut aims at.
struct Tuning {
  int threads;       // of a block, at most
  int stage_bytes;   // of a stage in shared memory, as far as it can be had
  int shared_bytes;  // NHWC: of a block, as far as it can be had
  int group_rows;    // NCHW: rows per thread
};
Tuning tuning_of(const Kernel& kernel);

// The kernel for a pass, task by task.
Kernel kernel_of(Conv2dPass pass, const Conv2dShape& shape, bool channels_last);

Function function_of(const Kernel& kernel);

// Whether tiles.cuh takes a problem and is faster than the walk over rows.
bool fits_tiles(const Kernel& kernel, const Args& args);

// False where shared memory is too small for a tile. `args` has the problem, and gets the plan.
bool make_plan(const Kernel& kernel, const Tuning& tuning, Args* args);

// The problem's part of the arguments.
Args problem_of(const Kernel& kernel, Conv2dPass pass, const Conv2dShape& shape,
                const Tensor4dRef& x, const Tensor4dRef& w, const Tensor4dRef& y, const void* bias,
                void* workspace);

// Runs a plan; dw: where the weight gradient goes.
void run_planned(Stream stream, const Kernel& kernel, const Args& args, void* dw);

}  // namespace braze::cuda::depthwise
