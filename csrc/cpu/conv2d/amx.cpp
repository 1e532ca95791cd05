// Convolutions in bf16 on AMX (amx.h, amx_wgrad.h).
#include "cpu/conv2d/amx.h"

#include "cpu/conv2d/amx_wgrad.h"
#include "cpu/conv2d/convolution_pool.h"
#include "cpu/conv2d/convolve.h"
#include "cpu/conv2d/kernels.h"
#include "cpu/conv2d/wgrad.h"

namespace braze::cpu {

const char* amx_obstacle(const Conv2dProblem& problem) {
  if (problem.shape.dtype != DType::kBFloat16 || !amx_available()) {
    return "amx takes bfloat16, on a processor and a system with AMX";
  }
  return nullptr;
}

#ifdef BRAZE_HAS_AMX

using AmxConvolutions = ConvolutionPool<float, AmxPlan, AmxConvolution>;

void plan_amx(const Conv2dProblem& problem, Conv2dPlan* plan) {
  if (problem.pass == Conv2dPass::kWgrad) {
    const WeightGradient g = wgrad_of(problem);
    const AmxWgradPlan tiling(g);
    plan->tiling.set(tiling);
    plan->workspace_bytes = std::max(tiling.bytes(g), WeightGradientPlan<float>(g).bytes(g));
    return;
  }
  plan->workspace_bytes = AmxConvolutions(problem, nullptr).bytes();
  with_convolutions(problem, nullptr, [&](const Convolution& conv) {
    const ConvolutionPlan<float> again(image_of(conv, 0, problem.shape.dtype));
    plan->workspace_bytes = std::max(plan->workspace_bytes, again.bytes());
  });
}

void run_amx(const Conv2dProblem& problem, const Conv2dPlan& plan, const void* bias,
             void* workspace) {
  if (problem.pass == Conv2dPass::kWgrad) {
    const WeightGradient g = wgrad_of(problem);
    if (AmxWgrad(g, plan.tiling.get<AmxWgradPlan>(), workspace).run()) return;
    return ComputeWeightGradient<BFloat16>(g, WeightGradientPlan<float>(g), workspace).run();
  }
  const AmxConvolutions pool(problem, bias);
  std::vector<Convolution> again;
  for (const AmxConvolution& part : pool.run(workspace)) {
    for (const int64_t image : part.spoilt()) {
      again.push_back(image_of(part.convolution(), image, problem.shape.dtype));
    }
  }
  for (const Convolution& one : again) {
    Convolve<BFloat16>(one, ConvolutionPlan<float>(one), workspace).run();
  }
}

#else

void plan_amx(const Conv2dProblem&, Conv2dPlan*) {}
void run_amx(const Conv2dProblem&, const Conv2dPlan&, const void*, void*) {}

#endif

}  // namespace braze::cpu
