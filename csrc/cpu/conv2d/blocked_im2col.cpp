// Filters of any size as products of patches that are copied block by block (blocked_im2col.h,
// blocked_im2col_wgrad.h).
#include "cpu/conv2d/blocked_im2col.h"

#include "cpu/conv2d/blocked_im2col_wgrad.h"
#include "cpu/conv2d/convolution_pool.h"
#include "cpu/conv2d/kernels.h"
#include "cpu/conv2d/steps.h"

namespace braze::cpu {
namespace {

template <typename T, typename Step>
using Convolutions = ConvolutionPool<acc_t<T>, BlockedIm2colPlan<T, Step>, BlockedIm2col<T, Step>>;

}  // namespace

void plan_blocked_im2col(const Conv2dProblem& problem, Conv2dPlan* plan) {
  with_steps(problem.shape.dtype, [&](auto tag, auto step) {
    using T = typename decltype(tag)::type;
    using Step = typename decltype(step)::type;
    if (problem.pass == Conv2dPass::kWgrad) {
      const WeightGradient g = wgrad_of(problem);
      const BlockedIm2colWgradPlan<T, Step> tiling(g);
      plan->tiling.set(tiling);
      plan->workspace_bytes = tiling.bytes(g);
      return;
    }
    plan->workspace_bytes = Convolutions<T, Step>(problem, nullptr).bytes();
  });
}

bool blocked_im2col_reads_in_place(const Conv2dProblem& problem) {
  if (problem.pass != Conv2dPass::kWgrad || problem.shape.dtype != DType::kFloat32) return false;
  const BlockedIm2colWgradPlan<float, float> plan(wgrad_of(problem));
  return plan.is_inside && (plan.x_in_place || plan.dy_in_place);
}

void run_blocked_im2col(const Conv2dProblem& problem, const Conv2dPlan& plan, const void* bias,
                        void* workspace) {
  with_steps(problem.shape.dtype, [&](auto tag, auto step) {
    using T = typename decltype(tag)::type;
    using Step = typename decltype(step)::type;
    if (problem.pass == Conv2dPass::kWgrad) {
      const auto& tiling = plan.tiling.get<BlockedIm2colWgradPlan<T, Step>>();
      return BlockedIm2colWgrad<T, Step>(wgrad_of(problem), tiling, workspace).run();
    }
    Convolutions<T, Step>(problem, bias).run(workspace);
  });
}

}  // namespace braze::cpu
