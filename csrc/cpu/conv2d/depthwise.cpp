// Convolutions of one filter a channel (depthwise.h, depthwise_wgrad.h).
#include "cpu/conv2d/depthwise.h"

#include "cpu/conv2d/depthwise_in_place.h"
#include "cpu/conv2d/depthwise_wgrad.h"
#include "cpu/conv2d/depthwise_wgrad_in_place.h"
#include "cpu/conv2d/kernels.h"

namespace braze::cpu {
namespace {

std::vector<Convolution> convolutions_of(const Conv2dProblem& problem, const void* bias) {
  std::vector<Convolution> result;
  with_convolutions(problem, bias, [&](const Convolution& conv) { result.push_back(conv); });
  return result;
}

template <typename T>
bool all_go_in_place(const std::vector<Convolution>& convolutions) {
  if (convolutions.empty()) return false;
  const Convolution& conv = convolutions[0];
  return goes_in_place<T>(conv.src, conv.dst_strides, conv.groups);
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
      if (goes_in_place<T>(gradient.x, gradient.dy, gradient.groups)) {
        plan->workspace_bytes = DepthwiseWgradInPlace<acc_t<T>>::bytes(gradient);
        return;
      }
      const DepthwiseWgradPlan<T> tiling(gradient);
      plan->tiling.set(tiling);
      plan->workspace_bytes = tiling.bytes();
      return;
    }
    const auto convolutions = convolutions_of(problem, nullptr);
    if (all_go_in_place<T>(convolutions)) {
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
      if (goes_in_place<T>(gradient.x, gradient.dy, gradient.groups)) {
        return DepthwiseWgradInPlace<acc_t<T>>(gradient, workspace).run();
      }
      const auto& tiling = plan.tiling.get<DepthwiseWgradPlan<T>>();
      return DepthwiseWgrad<T>(gradient, tiling, workspace).run();
    }
    const auto convolutions = convolutions_of(problem, bias);
    if (all_go_in_place<T>(convolutions)) {
      return DepthwiseInPlace<acc_t<T>>(convolutions, workspace).run();
    }
    for (const Convolution& conv : convolutions) {
      Depthwise<T>(conv, DepthwisePlan<T>(conv), workspace).run();
    }
  });
}

}  // namespace braze::cpu
