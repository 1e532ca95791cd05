// Convolutions of one filter a channel: depthwise_in_place.h, depthwise_wgrad_in_place.h, and with
// copies depthwise.h, depthwise_wgrad.h. Those of groups of a few: the two in place.
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
        plan->workspace_bytes = DepthwiseWgradInPlace<acc_t<T>, false>::bytes(gradient);
        return;
      }
      const DepthwiseWgradPlan<T> tiling(gradient);
      plan->tiling.set(tiling);
      plan->workspace_bytes = tiling.bytes();
      return;
    }
    const auto convolutions = convolutions_of(problem, nullptr);
    if (goes_in_place<T>(problem)) {
      plan->workspace_bytes =
          ConvolutionInPlace<acc_t<T>, InPlaceGroups::kDepthwise>::bytes(convolutions);
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
        return DepthwiseWgradInPlace<acc_t<T>, false>(gradient, workspace).run();
      }
      const auto& tiling = plan.tiling.get<DepthwiseWgradPlan<T>>();
      return DepthwiseWgrad<T>(gradient, tiling, workspace).run();
    }
    const auto convolutions = convolutions_of(problem, bias);
    if (goes_in_place<T>(problem)) {
      return ConvolutionInPlace<acc_t<T>, InPlaceGroups::kDepthwise>(convolutions, workspace).run();
    }
    for (const Convolution& conv : convolutions) {
      Depthwise<T>(conv, DepthwisePlan<T>(conv), workspace).run();
    }
  });
}

const char* grouped_obstacle(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  if (s.dtype != DType::kFloat32 && s.dtype != DType::kFloat64) {
    return "grouped takes float32 and float64";
  }
  if (problem.x.c != 1 || problem.y.c != 1) return "grouped takes channels-last tensors";
  const int64_t lanes = kVecBytes / size_of(s.dtype), width = s.c / s.groups;
  const bool is_narrow = width >= 2 && lanes % width == 0 && s.c >= lanes;
  if (s.c != s.k || !(is_narrow || width > lanes)) {
    return "grouped takes as many filters as channels, in groups that a vector has several or one "
           "of, or that have more than a vector";
  }
  if (problem.pass == Conv2dPass::kWgrad && !is_narrow) {
    return "grouped takes no weight gradients of groups of more channels than a vector has";
  }
  return nullptr;
}

namespace {

// f(a number of the problem's type, integral constant of its groups).
template <typename F>
void with_groups(const Conv2dProblem& problem, const F& f) {
  const bool wide =
      problem.shape.c / problem.shape.groups >= kVecBytes / size_of(problem.shape.dtype);
  const auto of_type = [&](auto number) {
    if (wide) {
      f(number, std::integral_constant<InPlaceGroups, InPlaceGroups::kWide>{});
    } else {
      f(number, std::integral_constant<InPlaceGroups, InPlaceGroups::kNarrow>{});
    }
  };
  if (problem.shape.dtype == DType::kFloat32) {
    of_type(float{});
  } else {
    of_type(double{});
  }
}

}  // namespace

void plan_grouped(const Conv2dProblem& problem, Conv2dPlan* plan) {
  with_groups(problem, [&](auto number, auto groups) {
    using Acc = decltype(number);
    if (problem.pass == Conv2dPass::kWgrad) {
      plan->workspace_bytes = DepthwiseWgradInPlace<Acc, true>::bytes(wgrad_of(problem));
      return;
    }
    const auto convolutions = convolutions_of(problem, nullptr);
    plan->workspace_bytes = ConvolutionInPlace<Acc, groups>::bytes(convolutions);
  });
}

void run_grouped(const Conv2dProblem& problem, const Conv2dPlan&, const void* bias,
                 void* workspace) {
  with_groups(problem, [&](auto number, auto groups) {
    using Acc = decltype(number);
    if (problem.pass == Conv2dPass::kWgrad) {
      const WeightGradient gradient = wgrad_of(problem);
      return DepthwiseWgradInPlace<Acc, true>(gradient, workspace).run();
    }
    const auto convolutions = convolutions_of(problem, bias);
    ConvolutionInPlace<Acc, groups>(convolutions, workspace).run();
  });
}

}  // namespace braze::cpu
