// 3 x 3 filters of stride 1 by Winograd's algorithm (winograd.h, winograd_wgrad.h).
#include "cpu/conv2d/winograd.h"

#include "cpu/conv2d/kernels.h"
#include "cpu/conv2d/wgrad.h"
#include "cpu/conv2d/winograd_wgrad.h"

namespace braze::cpu {
namespace {

// float64 has no kernel: what it is there for is accuracy.
template <typename F>
void with_type(DType dtype, const F& f) {
  dispatch(dtype, [&](auto tag) {
    if constexpr (!std::is_same_v<typename decltype(tag)::type, double>) f(tag);
  });
}

}  // namespace

const char* winograd_obstacle(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  if (s.dtype == DType::kFloat64) return "winograd takes float32, bfloat16 and float16";
  if (s.r != 3 || s.s != 3 || s.stride_h != 1 || s.stride_w != 1 || s.dilation_h != 1 ||
      s.dilation_w != 1) {
    return "winograd takes 3 x 3 filters of stride and dilation 1";
  }
  return nullptr;
}

void plan_winograd(const Conv2dProblem& problem, Conv2dPlan* plan) {
  with_type(problem.shape.dtype, [&](auto tag) {
    using Acc = float;
    if (problem.pass == Conv2dPass::kWgrad) {
      const WeightGradient g = wgrad_of(problem);
      const WinogradWgradPlan<Acc> tiling(g);
      plan->tiling.set(tiling);
      plan->workspace_bytes = std::max(tiling.bytes(g), WeightGradientPlan<Acc>(g).bytes(g));
      return;
    }
    with_convolutions(problem, nullptr, [&](const Convolution& conv) {
      const WinogradPlan<Acc> tiling(conv);
      plan->tiling.set(tiling);
      const ConvolutionPlan<Acc> again(image_of(conv, 0, problem.shape.dtype));
      plan->workspace_bytes = std::max(tiling.bytes(conv), again.bytes());
    });
  });
}

void run_winograd(const Conv2dProblem& problem, const Conv2dPlan& plan, const void* bias,
                  void* workspace) {
  with_type(problem.shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Acc = float;
    if (problem.pass == Conv2dPass::kWgrad) {
      const WeightGradient g = wgrad_of(problem);
      if (WinogradWgrad<T>(g, plan.tiling.get<WinogradWgradPlan<Acc>>(), workspace).run()) return;
      return ComputeWeightGradient<T>(g, WeightGradientPlan<Acc>(g), workspace).run();
    }
    with_convolutions(problem, bias, [&](const Convolution& conv) {
      const auto& tiling = plan.tiling.get<WinogradPlan<Acc>>();
      for (const int64_t image : Winograd<T>(conv, tiling, workspace).run()) {
        const Convolution one = image_of(conv, image, problem.shape.dtype);
        Convolve<T>(one, ConvolutionPlan<Acc>(one), workspace).run();
      }
    });
  });
}

}  // namespace braze::cpu
