// Convolutions of one filter a channel (depthwise.h, depthwise_wgrad.h).
#include "cpu/conv2d/depthwise.h"

#include "cpu/conv2d/depthwise_wgrad.h"
#include "cpu/conv2d/kernels.h"

namespace braze::cpu {

const char* depthwise_obstacle(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  return s.groups == s.c && s.groups == s.k ? nullptr : "depthwise takes one filter a channel";
}

void plan_depthwise(const Conv2dProblem& problem, Conv2dPlan* plan) {
  dispatch(problem.shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (problem.pass == Conv2dPass::kWgrad) {
      const DepthwiseWgradPlan<T> tiling(wgrad_of(problem));
      plan->tiling.set(tiling);
      plan->workspace_bytes = tiling.bytes();
      return;
    }
    with_convolutions(problem, nullptr, [&](const Convolution& conv) {
      plan->workspace_bytes = std::max(plan->workspace_bytes, DepthwisePlan<T>(conv).bytes());
    });
  });
}

void run_depthwise(const Conv2dProblem& problem, const Conv2dPlan& plan, const void* bias,
                   void* workspace) {
  dispatch(problem.shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (problem.pass == Conv2dPass::kWgrad) {
      const auto& tiling = plan.tiling.get<DepthwiseWgradPlan<T>>();
      return DepthwiseWgrad<T>(wgrad_of(problem), tiling, workspace).run();
    }
    with_convolutions(problem, bias, [&](const Convolution& conv) {
      Depthwise<T>(conv, DepthwisePlan<T>(conv), workspace).run();
    });
  });
}

}  // namespace braze::cpu
