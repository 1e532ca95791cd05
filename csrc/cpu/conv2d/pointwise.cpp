// 1 x 1 filters of any stride as products (pointwise.h, pointwise_wgrad.h). A strided dgrad is the
// product at the pixels that the filter meets, and zeros (or the bias) elsewhere.
#include "cpu/conv2d/pointwise.h"

#include <algorithm>

#include "cpu/conv2d/kernels.h"
#include "cpu/conv2d/pointwise_wgrad.h"
#include "cpu/conv2d/steps.h"

namespace braze::cpu {
namespace {

// A residue of a strided dgrad that no filter reaches.
template <typename T>
void store_bias(const Convolution& conv) {
  const Tensor4dRef& d = conv.dst_strides;
  const T* const bias = static_cast<const T*>(conv.bias);
  const int64_t filters = conv.groups * conv.filters;
  parallel_for(0, conv.images * conv.h.out, ceil_div(16384, conv.w.out * filters + 1),
               [&](int64_t first, int64_t last) {
                 for (int64_t i = first; i < last; ++i) {
                   T* const row =
                       static_cast<T*>(conv.dst) + i / conv.h.out * d.n + i % conv.h.out * d.h;
                   const auto store = [&](int64_t j, int64_t f) {
                     row[j * d.w + f * d.c] = bias ? bias[f] : T(0);
                   };
                   if (d.c == 1) {
                     for (int64_t j = 0; j < conv.w.out; ++j) {
                       for (int64_t f = 0; f < filters; ++f) store(j, f);
                     }
                   } else {
                     for (int64_t f = 0; f < filters; ++f) {
                       for (int64_t j = 0; j < conv.w.out; ++j) store(j, f);
                     }
                   }
                 }
               });
}

}  // namespace

const char* pointwise_obstacle(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  if (s.r != 1 || s.s != 1 || s.pad_h != 0 || s.pad_w != 0) {
    return "pointwise takes 1 x 1 filters without padding";
  }
  bool inside = true;
  if (problem.pass == Conv2dPass::kWgrad) {
    const WeightGradient g = wgrad_of(problem);
    inside = stays_inside(g.h) && stays_inside(g.w);
  } else {
    with_convolutions(problem, nullptr, [&](const Convolution& conv) {
      if (conv.taps() > 0) inside &= stays_inside(conv.h) && stays_inside(conv.w);
    });
  }
  return inside ? nullptr : "pointwise takes results that end where the input does";
}

void plan_pointwise(const Conv2dProblem& problem, Conv2dPlan* plan) {
  with_steps(problem.shape.dtype, [&](auto tag, auto step) {
    if (problem.pass == Conv2dPass::kWgrad) {
      using Plan = PointwiseWgradPlan<typename decltype(tag)::type, typename decltype(step)::type>;
      const WeightGradient g = wgrad_of(problem);
      const Plan tiling(g);
      plan->tiling.set(tiling);
      plan->workspace_bytes = tiling.bytes(g);
      return;
    }
    with_convolutions(problem, nullptr, [&](const Convolution& conv) {
      if (conv.taps() == 0) return;
      using Plan = PointwisePlan<typename decltype(tag)::type, typename decltype(step)::type>;
      const Plan tiling(conv);
      plan->tiling.set(tiling);
      plan->workspace_bytes = tiling.bytes();
    });
  });
}

void run_pointwise(const Conv2dProblem& problem, const Conv2dPlan& plan, const void* bias,
                   void* workspace) {
  with_steps(problem.shape.dtype, [&](auto tag, auto step) {
    using T = typename decltype(tag)::type;
    using Step = typename decltype(step)::type;
    if (problem.pass == Conv2dPass::kWgrad) {
      const auto& tiling = plan.tiling.get<PointwiseWgradPlan<T, Step>>();
      return PointwiseWgrad<T, Step>(wgrad_of(problem), tiling, workspace).run();
    }
    with_convolutions(problem, bias, [&](const Convolution& conv) {
      if (conv.taps() == 0) return store_bias<T>(conv);
      Pointwise<T, Step>(conv, plan.tiling.get<PointwisePlan<T, Step>>(), workspace).run();
    });
  });
}

}  // namespace braze::cpu
