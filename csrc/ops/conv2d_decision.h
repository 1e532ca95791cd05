// What runs a pass of a convolution: decided once for a problem, by conv2d.cpp alone.
#pragma once

#include <algorithm>
#include <optional>

#include "launchers/conv2d.h"
#include "launchers/conv2d_added.h"
#include "ops/backend.h"
#include "ops/plan_cache.h"
#include "ops/tuned.h"

namespace braze {
namespace {

#ifdef BRAZE_CUDA
constexpr const char* kConvolutionLibrary = "cudnn";
#else
constexpr const char* kConvolutionLibrary = "torch";
#endif

// What runs a pass: an algorithm of the vendor's library (library is not negative), which is cuDNN
// or on a CPU what torch itself runs, or a kernel of ours.
struct Decision {
  int library = -1;
  bool bias_fused = true;   // what runs adds it; else it is still to be added
  bool relu_fused = false;  // what runs applies it to fprop's results, if it is asked to
  int64_t workspace_bytes = 0;
  Conv2dPlan plan;
  std::optional<Conv2dPlan> adding;  // of an input gradient that the kernel can add something to
};

// An engine of cuDNN's, if that is there and has it; on a CPU torch's own convolution, the only
// candidate. cuDNN fuses no bias with groups: what it lists first then takes ten times as long for
// depthwise filters.
std::optional<Decision> library_decision([[maybe_unused]] const Conv2dProblem& problem,
                                         [[maybe_unused]] const void* bias,
                                         [[maybe_unused]] int candidate) {
#ifdef BRAZE_CUDA
  Decision decision;
  const bool fuses = !bias || problem.shape.groups == 1;
  auto bytes = fuses ? vendor::cudnn_plan(problem, bias, candidate) : std::nullopt;
  if (!bytes && bias) {
    decision.bias_fused = false;
    bytes = vendor::cudnn_plan(problem, nullptr, candidate);
  }
  if (bytes) {
    decision.library = candidate;
    decision.workspace_bytes = *bytes;
    return decision;
  }
  return std::nullopt;
#else
  if (candidate > 0) return std::nullopt;
  Decision decision;
  decision.library = candidate;
  decision.bias_fused = problem.pass == Conv2dPass::kFprop;
  return decision;
#endif
}

Decision own_decision(const Conv2dPlan& plan) {
  return {-1, plan.adds_bias, plan.applies_relu, plan.workspace_bytes, plan};
}

// What tuning found to be the fastest, where it knows the pass and that takes it: another version
// of a library may leave fewer candidates. Determinism leaves others, so that their numbers mean
// nothing.
std::optional<Decision> tuned_decision(const Conv2dProblem& problem, const void* bias, int device) {
  const auto pass = convolution_pass_of(problem, bias != nullptr, device);
  if (!pass) return std::nullopt;
  const bool deterministic = problem.shape.deterministic;
  const std::string choice = tuned_convolutions.choice(*pass, deterministic);
  if (choice.empty()) return std::nullopt;
  Wish wish;
  try {
    wish = wish_of("conv2d", choice, dev::conv2d_kernel, kConvolutionLibrary);
  } catch (const std::runtime_error&) {
    return std::nullopt;  // a kernel of another version
  }
  if (wish.leaves_choice()) return std::nullopt;
  if (wish.kind == Wish::kLibrary) {
    return deterministic ? std::nullopt : library_decision(problem, bias, wish.number);
  }
  const Conv2dPlan plan = dev::plan_conv2d(problem, wish.kernel());
  return plan.obstacle ? std::nullopt : std::optional(own_decision(plan));
}

// Whether the rules have fprop run a kernel that leaves its result's moments, which saves a pass
// over it: tuning knows nothing of that.
bool leaves_moments(const Conv2dPlan& plan) {
  return plan.moment_sets > 0 && (plan.beats_library || plan.beats_library_with_moments);
}

// "auto" takes what tuning found, else the faster one of our own and the library, where that is
// there and has an engine; names of kernels and of libraries are obeyed or refused.
Decision decide(const Conv2dProblem& problem, const Wish& wish, const void* bias, int device) {
#ifdef BRAZE_CUDA
  if (wish.kind == Wish::kLibrary) {
    const std::string name = "cudnn" + (wish.number > 0 ? ":" + std::to_string(wish.number) : "");
    const std::string& missing = vendor::cudnn_missing();
    BRAZE_CHECK(missing.empty(), "conv2d: backend ", name, " cannot be used: ", missing);
    const auto decision = library_decision(problem, bias, wish.number);
    BRAZE_CHECK(decision, "conv2d: backend ", name,
                " has no engine for these shapes, strides and dtype");
    return *decision;
  }
#else
  if (wish.kind == Wish::kLibrary) return *library_decision(problem, bias, wish.number);
#endif
  const Conv2dPlan plan = dev::plan_conv2d(problem, wish.kernel());
  const bool for_moments = problem.shape.wants_moments && leaves_moments(plan);
  if (wish.kind == Wish::kAuto && !for_moments) {
    if (tuned_convolutions.in_use) {
      if (const auto tuned = tuned_decision(problem, bias, device)) return *tuned;
    }
    if (!plan.beats_library) {
      if (const auto decision = library_decision(problem, bias, 0)) return *decision;
    }
  }
  BRAZE_CHECK(!plan.obstacle, "conv2d: kernel ", dev::conv2d_kernel(plan.kernel)->name,
              " cannot take these arguments: ", plan.obstacle);
  return own_decision(plan);
}

// What would add something to the result: the decision's kernel, or one in a library's place.
std::optional<Conv2dPlan> adding_plan([[maybe_unused]] const Conv2dProblem& problem,
                                      [[maybe_unused]] const Wish& wish,
                                      [[maybe_unused]] const Decision& decision) {
#ifdef BRAZE_CUDA
  const bool from_library = decision.library >= 0;
  if (from_library && (wish.kind != Wish::kAuto || problem.pass != Conv2dPass::kDgrad)) {
    return std::nullopt;
  }
  Conv2dPlan plan = from_library ? dev::plan_conv2d(problem, kAnyKernel) : decision.plan;
  if (!plan.by_fft && dev::plan_conv2d_added(problem, from_library, &plan)) return plan;
#endif
  return std::nullopt;
}

// decide(), found again where the problem is not new.
// like: a tensor on the device.
Decision decided(const Tensor& like, const Conv2dProblem& problem, const Wish& wish,
                 const void* bias) {
  using Cache = PlanCache<41, Decision>;
  static auto& cache = *new Cache;  // never destroyed: threads may outlive static objects
  const auto& [pass, s, x, w, y] = problem;
  const Cache::Key key{plan_generation,
                       plan_context(like),
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
                       s.wants_moments,
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
  return cache.get(key, [&] {
    Decision decision = decide(problem, wish, bias, like.get_device_index());
    decision.adding = adding_plan(problem, wish, decision);
    return decision;
  });
}

}  // namespace
}  // namespace braze
