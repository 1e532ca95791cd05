// The kernel for every convolution: implicit GEMM (convolve.h, wgrad.h).
#include <algorithm>

#include "cpu/conv2d/convolve.h"
#include "cpu/conv2d/kernels.h"
#include "cpu/conv2d/wgrad.h"

namespace braze::cpu {
namespace {

// An input gradient of a stride greater than 1 is several convolutions, planned one by one as they
// run; all others are one, whose plan is kept.
bool is_single(const Conv2dProblem& problem) {
  return problem.pass != Conv2dPass::kDgrad ||
         (problem.shape.stride_h == 1 && problem.shape.stride_w == 1);
}

}  // namespace

void plan_implicit_gemm(const Conv2dProblem& problem, Conv2dPlan* plan) {
  dispatch(problem.shape.dtype, [&](auto tag) {
    using Acc = acc_t<typename decltype(tag)::type>;
    const auto add = [&](const auto& tiling, int64_t bytes) {
      plan->tiling.set(tiling);
      plan->workspace_bytes = std::max(plan->workspace_bytes, bytes);
    };
    if (problem.pass == Conv2dPass::kWgrad) {
      const WeightGradient g = wgrad_of(problem);
      const WeightGradientPlan<Acc> tiling(g);
      return add(tiling, tiling.bytes(g));
    }
    const auto add_convolution = [&](const Convolution& conv) {
      const ConvolutionPlan<Acc> tiling(conv);
      add(tiling, tiling.bytes());
    };
    if (problem.pass == Conv2dPass::kFprop) return add_convolution(fprop_of(problem, nullptr));
    for_each_dgrad(problem, nullptr, add_convolution);
  });
}

void run_implicit_gemm(const Conv2dProblem& problem, const Conv2dPlan& plan, const void* bias,
                       void* workspace) {
  dispatch(problem.shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Acc = acc_t<T>;
    if (problem.pass == Conv2dPass::kWgrad) {
      const auto& tiling = plan.tiling.get<WeightGradientPlan<Acc>>();
      return ComputeWeightGradient<T>(wgrad_of(problem), tiling, workspace).run();
    }
    const auto& tiling = plan.tiling.get<ConvolutionPlan<Acc>>();
    if (problem.pass == Conv2dPass::kFprop) {
      const Convolution conv = fprop_of(problem, bias);
      return Convolve<T>(conv, tiling, workspace).run();
    }
    for_each_dgrad(problem, bias, [&](const Convolution& conv) {
      Convolve<T>(conv, is_single(problem) ? tiling : ConvolutionPlan<Acc>(conv), workspace).run();
    });
  });
}

}  // namespace braze::cpu
