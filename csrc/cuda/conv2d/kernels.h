// What choose.cu has to choose from. Each kernel plans where it has no obstacle (choose.cu says
// which one), and runs as planned.
#pragma once

#include "args.h"

namespace braze::cuda {

void plan_direct(const Conv2dArgs& args, Conv2dPlan* plan);
void run_direct(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

void plan_simt(const Conv2dArgs& args, Conv2dPlan* plan);
void run_simt(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

void plan_mma(const Conv2dArgs& args, Conv2dPlan* plan);
void run_mma(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace);

}  // namespace braze::cuda
