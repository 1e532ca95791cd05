// Weight gradients of few input channels (narrow_input.h).
#include "cpu/conv2d/narrow_input.h"

#include "cpu/conv2d/kernels.h"

namespace braze::cpu {

const char* narrow_input_obstacle(const Conv2dProblem& problem) {
  if (problem.pass != Conv2dPass::kWgrad) return "narrow_input has weight gradients only";
  const Conv2dShape& s = problem.shape;
  constexpr int64_t kMostChannels = 16;
  if (s.groups > 1 || s.c > kMostChannels) {
    return "narrow_input takes one group of up to 16 channels";
  }
  return nullptr;
}

void plan_narrow_input(const Conv2dProblem& problem, Conv2dPlan* plan) {
  dispatch(problem.shape.dtype, [&](auto tag) {
    const NarrowInputPlan<typename decltype(tag)::type> tiling(wgrad_of(problem));
    plan->tiling.set(tiling);
    plan->workspace_bytes = tiling.bytes();
  });
}

void run_narrow_input(const Conv2dProblem& problem, const Conv2dPlan& plan, const void*,
                      void* workspace) {
  dispatch(problem.shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const WeightGradient g = wgrad_of(problem);
    NarrowInput<T>(g, plan.tiling.get<NarrowInputPlan<T>>(), workspace).run();
  });
}

}  // namespace braze::cpu
