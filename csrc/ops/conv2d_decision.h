// What runs a pass of a convolution: decided once for a problem, by conv2d.cpp alone.
#pragma once

#include <algorithm>

#include "launchers/conv2d.h"
#include "ops/backend.h"
#include "ops/plan_cache.h"

namespace braze {
namespace {

// What runs a pass: an algorithm of cuDNN's (library is not negative), or a kernel of ours.
struct Decision {
  int library = -1;
  bool bias_fused = true;  // cuDNN adds it; else it is still to be added
  int64_t workspace_bytes = 0;
  Conv2dPlan plan;
};

// "auto" takes the faster one of our own and cuDNN, where that is there and has an engine; names of
// kernels and of libraries are obeyed or refused. wants_moments: of fprop's result.
Decision decide(const Conv2dProblem& problem, const Wish& wish, [[maybe_unused]] const void* bias,
                [[maybe_unused]] bool wants_moments) {
  Decision decision;
  Conv2dPlan& plan = decision.plan;
  if (wish.kind != Wish::kLibrary) plan = dev::plan_conv2d(problem, wish.kernel());
#ifdef BRAZE_CUDA
  const bool named = wish.kind == Wish::kLibrary;
  const std::string name = "cudnn" + (wish.number > 0 ? ":" + std::to_string(wish.number) : "");
  const std::string& missing = vendor::cudnn_missing();
  if (named) {
    BRAZE_CHECK(missing.empty(), "conv2d: backend ", name, " cannot be used: ", missing);
  }
  const bool own =
      wants_moments ? plan.beats_library || plan.beats_library_with_moments : plan.beats_library;
  if (named || (wish.kind == Wish::kAuto && missing.empty() && !own)) {
    const int candidate = std::max(0, wish.number);
    auto bytes = vendor::cudnn_plan(problem, bias, candidate);
    if (!bytes && bias) {
      decision.bias_fused = false;
      bytes = vendor::cudnn_plan(problem, nullptr, candidate);
    }
    if (bytes) {
      decision.library = candidate;
      decision.workspace_bytes = *bytes;
      return decision;
    }
    BRAZE_CHECK(!named, "conv2d: backend ", name,
                " has no engine for these shapes, strides and dtype");
  }
#endif
  BRAZE_CHECK(!plan.obstacle, "conv2d: kernel ", dev::conv2d_kernel(plan.kernel)->name,
              " cannot take these arguments: ", plan.obstacle);
  decision.workspace_bytes = plan.workspace_bytes;
  return decision;
}

// The same, found again where the problem is not new.
Decision decided(int64_t context, const Conv2dProblem& problem, const Wish& wish, const void* bias,
                 bool wants_moments) {
  using Cache = PlanCache<41, Decision>;
  static auto& cache = *new Cache;  // never destroyed: threads may outlive static objects
  const auto& [pass, s, x, w, y] = problem;
  const Cache::Key key{plan_generation,
                       context,
                       wish.kind,
                       wish.number,
                       static_cast<int64_t>(pass),
                       static_cast<int64_t>(s.dtype),
                       s.n,
                       s.c,
                       s.h,
                       s.w,
                       s.k,
                       s.r,
                       s.s,
                       s.p,
                       s.q,
                       s.stride_h,
                       s.stride_w,
                       s.pad_h,
                       s.pad_w,
                       s.dilation_h,
                       s.dilation_w,
                       s.groups,
                       s.allow_tf32,
                       s.deterministic,
                       wants_moments,
                       x.n,
                       x.c,
                       x.h,
                       x.w,
                       alignment_of(x.data),
                       w.n,
                       w.c,
                       w.h,
                       w.w,
                       alignment_of(w.data),
                       y.n,
                       y.c,
                       y.h,
                       y.w,
                       alignment_of(y.data),
                       bias ? alignment_of(bias) : 0};
  return cache.get(key, [&] { return decide(problem, wish, bias, wants_moments); });
}

}  // namespace
}  // namespace braze
