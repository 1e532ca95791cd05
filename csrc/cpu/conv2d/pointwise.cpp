// 1 x 1 filters of any stride as products (pointwise.h, pointwise_wgrad.h). A strided dgrad is the
// product at the pixels that the filter meets, and zeros (or the bias) elsewhere. A few images of
// one pixel go by matmul's few_rows.h.
#include "cpu/conv2d/pointwise.h"

#include <algorithm>

#include "cpu/conv2d/kernels.h"
#include "cpu/conv2d/pointwise_wgrad.h"
#include "cpu/conv2d/steps.h"
#include "cpu/matmul/few_rows.h"

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

// A plan's variant: passes over the image's pixels, or a product.
enum Variant { kPixels, kProduct };

// The pass over images of one pixel, which are matrices.
MatmulArgs product_of(const Conv2dProblem& problem, const void* bias) {
  const Conv2dShape& s = problem.shape;
  const Tensor4dRef &x = problem.x, &w = problem.w, &y = problem.y;
  MatmulArgs p{};
  p.dtype = s.dtype, p.batch = 1, p.bias = bias;
  p.c = const_cast<void*>(problem.result().data);
  switch (problem.pass) {
    case Conv2dPass::kFprop:
      p.m = s.n, p.n = s.k, p.k = s.c;
      p.a = {x.data, 0, x.n, x.c}, p.b = {w.data, 0, w.c, w.n};
      break;
    case Conv2dPass::kDgrad:
      p.m = s.n, p.n = s.c, p.k = s.k;
      p.a = {y.data, 0, y.n, y.c}, p.b = {w.data, 0, w.n, w.c};
      break;
    case Conv2dPass::kWgrad:
      p.m = s.k, p.n = s.c, p.k = s.n;
      p.a = {y.data, 0, y.c, y.n}, p.b = {x.data, 0, x.n, x.c};
      break;
  }
  return p;
}

}  // namespace

bool has_few_pixels(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  if (s.h * s.w != 1 || s.p * s.q != 1 || s.groups != 1) return false;
  const Tensor4dRef& result = problem.result();
  const MatmulArgs p = product_of(problem, nullptr);
  const bool is_dense = result.n == p.n && result.c == 1;
  return is_dense && few_rows_of(p) != FewRows::kNone;
}

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
  plan->variant = has_few_pixels(problem) ? kProduct : kPixels;
  if (plan->variant == kProduct) {
    plan->product = plan_matmul(product_of(problem, nullptr), kAnyKernel);
    plan->workspace_bytes = plan->product.workspace_bytes;
    return;
  }
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
  if (plan.variant == kProduct) {
    return run_matmul({}, product_of(problem, bias), plan.product, workspace);
  }
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
