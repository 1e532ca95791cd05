// Convolutions of one filter a channel: depthwise_in_place.h, depthwise_wgrad_in_place.h, and with
// copies depthwise.h, depthwise_wgrad.h.
#include "cpu/conv2d/depthwise.h"

#include "cpu/conv2d/depthwise_in_place.h"
#include "cpu/conv2d/depthwise_wgrad.h"
#include "cpu/conv2d/depthwise_wgrad_in_place.h"
#include "cpu/conv2d/kernels.h"

namespace braze::cpu {
namespace {

// Whether tensors are in the accumulation type and channels_last, of a vector of channels at least.
template <typename T>
bool goes_in_place(const Conv2dProblem& problem) {
  return std::is_same_v<T, acc_t<T>> && problem.x.c == 1 && problem.y.c == 1 &&
         problem.shape.groups >= kLanes<acc_t<T>>;
}

}  // namespace

const char* depthwise_obstacle(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  return s.groups == s.c && s.groups == s.k ? nullptr : "depthwise takes one filter a channel";
}

void plan_depthwise(const Conv2dProblem& problem, Conv2dPlan* plan) {
  dispatch(problem.shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (problem.pass == Conv2dPass::kWgrad) {
      const WeightGradient gradient = wgrad_of(problem);
      if (goes_in_place<T>(problem)) {
        plan->workspace_bytes = DepthwiseWgradInPlace<acc_t<T>>::bytes(gradient);
        return;
      }
      const DepthwiseWgradPlan<T> tiling(gradient);
      plan->tiling.set(tiling);
      plan->workspace_bytes = tiling.bytes();
      return;
    }
    const auto convolutions = convolutions_of(problem, nullptr);
    if (goes_in_place<T>(problem)) {
      plan->workspace_bytes = DepthwiseInPlace<acc_t<T>>::bytes(convolutions);
      return;
    }
    for (const Convolution& conv : convolutions) {
      plan->workspace_bytes = std::max(plan->workspace_bytes, DepthwisePlan<T>(conv).bytes());
    }
  });
}

void run_depthwise(const Conv2dProblem& problem, const Conv2dPlan& plan, const void* bias,
                   void* workspace) {
  dispatch(problem.shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (problem.pass == Conv2dPass::kWgrad) {
      const WeightGradient gradient = wgrad_of(problem);
      if (goes_in_place<T>(problem)) {
        return DepthwiseWgradInPlace<acc_t<T>>(gradient, workspace).run();
      }
      const auto& tiling = plan.tiling.get<DepthwiseWgradPlan<T>>();
      return DepthwiseWgrad<T>(gradient, tiling, workspace).run();
    }
    const auto convolutions = convolutions_of(problem, bias);
    if (goes_in_place<T>(problem)) {
      return DepthwiseInPlace<acc_t<T>>(convolutions, workspace).run();
    }
    for (const Convolution& conv : convolutions) {
      Depthwise<T>(conv, DepthwisePlan<T>(conv), workspace).run();
    }
  });
}

}  // namespace braze::cpu
