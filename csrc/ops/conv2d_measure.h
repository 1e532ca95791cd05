// backend "benchmark": the first call of a pass measures what there is for it, as torch does under
// torch.backends.cudnn.benchmark, and the process keeps the winner. For conv2d.cpp alone.
#pragma once

#include <algorithm>
#include <chrono>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "ops/conv2d_decision.h"
#include "ops/conv2d_fft.h"
#include "ops/conv2d_torch.h"

#ifdef BRAZE_CUDA
#include <cuda_runtime.h>

#include "launchers/occupy.h"
#include "libraries/loader.h"
#endif

namespace braze {
namespace {

// `backend`, with whether it wants new passes measured.
struct Choice {
  Wish wish;
  bool measure = false;
};

Choice choice_of(const std::string& backend) {
  if (backend == kBenchmark) return {{}, true};
  return {wish_of("conv2d", backend, dev::conv2d_kernel, kConvolutionLibrary)};
}

// Of cuDNN's engines, which it lists best first; building one takes longer than timing it.
constexpr int kMeasuredEngines = 8;
constexpr int kMeasuredRuns = 3;
// By how much, at least, something has to be faster than what the rules choose.
constexpr double kLeastGain = 0.03, kLeastMicroseconds = 1;
// Short ones run behind a kernel that takes as long as the host may take to launch them.
constexpr double kShortMicroseconds = 100;
constexpr int kHeadStartMicroseconds = 60;
// A candidate that is so much slower, loading its kernel aside, is not run again; and after so
// long, or so many runs of the fastest, no more of the library's are run. Some of what takes
// grouped filters is compiled when it runs first, or runs for a fifth of a second.
constexpr double kFarBehind = 5, kLoadingMicroseconds = 2e3;
constexpr double kLongestMicroseconds = 3e4, kLongestRuns = 100;
// What a candidate may work in, besides what the rules chose: as many bytes as the pass reads and
// writes, or so many partial sums of a weight's gradient, or so much. A training step must not need
// more memory in its first call, where they are measured, than ever after.
constexpr int64_t kWorkBytes = int64_t{24} << 20, kPartialSums = 64;

// Enqueues a decision's work, with as much of the epilogue as it has fused. workspace: of as many
// bytes as it says. result: what the pass writes, or a tensor that is to take its place.
void launch(Stream stream, const Conv2dProblem& problem, const Decision& decision,
            const Conv2dEpilogue& wanted, void* workspace, Tensor& result) {
  const void* const bias = decision.bias_fused ? wanted.bias : nullptr;
#ifdef BRAZE_CUDA
  if (decision.library >= 0) {
    vendor::cudnn_conv2d(stream, problem, workspace, bias, decision.library);
    return;
  }
#else
  if (decision.library >= 0) return run_conv2d_by_torch(problem, bias, result);
#endif
  if (decision.plan.by_fft) {
    run_conv2d_by_fft(stream, problem, decision.plan, bias, result);
    return;
  }
  const bool relu = wanted.relu && decision.relu_fused;
  dev::run_conv2d(stream, problem, decision.plan, {bias, relu, wanted.moments}, workspace);
}

#ifdef BRAZE_CUDA

bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  vendor::check_cuda(cudaStreamIsCapturing(cuda_stream, &status), "conv2d: capture status");
  return status != cudaStreamCaptureStatusNone;
}

// Microseconds that a stream takes for what it is given between start() and stop().
class Stopwatch {
 public:
  explicit Stopwatch(Stream stream) : stream_(static_cast<cudaStream_t>(stream)) {
    for (cudaEvent_t& event : events_) check(cudaEventCreate(&event));
  }
  ~Stopwatch() {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  // occupied: the stream is kept busy until the host has enqueued what is measured.
  void start(bool occupied) {
    if (occupied) cuda::occupy(stream_, kHeadStartMicroseconds);
    check(cudaEventRecord(events_[0], stream_));
  }
  double stop() {
    check(cudaEventRecord(events_[1], stream_));
    check(cudaEventSynchronize(events_[1]));
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, events_[0], events_[1]));
    return milliseconds * 1e3;
  }

 private:
  static void check(cudaError_t error) { vendor::check_cuda(error, "conv2d: measuring"); }

  vendor::AllowSetupInCapture allow_;  // another thread may be capturing
  cudaStream_t stream_;
  cudaEvent_t events_[2] = {};
};

#else

bool is_capturing(Stream) { return false; }

class Stopwatch {
 public:
  explicit Stopwatch(Stream) {}
  void start(bool) { start_ = std::chrono::steady_clock::now(); }
  double stop() {
    const std::chrono::duration<double, std::micro> passed =
        std::chrono::steady_clock::now() - start_;
    return passed.count();
  }

 private:
  std::chrono::steady_clock::time_point start_;
};

#endif

// What there is for a pass: the wish that names it, and the decision. Of our own the favourite and
// all others that are shipped, but for the one that takes everything and is far behind where it is
// not the favourite.
std::vector<std::pair<Wish, Decision>> candidates_of(const Conv2dProblem& problem,
                                                     const void* bias) {
  std::vector<std::pair<Wish, Decision>> found;
  for (int i = 0; i < kMeasuredEngines; ++i) {
    const auto decision = library_decision(problem, bias, i);
    if (!decision) break;
    found.push_back({{Wish::kLibrary, i}, *decision});
  }
  const int favourite = dev::plan_conv2d(problem, kAnyKernel).kernel;
  for (int i = 0; const KernelInfo* const info = dev::conv2d_kernel(i); ++i) {
    if (i != favourite && (!info->shipped || std::string(info->name) == "direct")) continue;
    const Conv2dPlan plan = dev::plan_conv2d(problem, i);
#ifdef BRAZE_CUDA
    // Its products of matrices follow another setting of TF32 than convolutions do.
    if (plan.by_fft && i != favourite) continue;
#endif
    if (!plan.obstacle) found.push_back({{Wish::kKernel, i}, own_decision(plan)});
  }
  return found;
}

// What a pass over a result takes, in microseconds: so long in any case, and what it reads and
// writes of it so many `times` (an H200). Kernels of the CPU's need none.
double pass_time([[maybe_unused]] const Tensor& result, [[maybe_unused]] double least,
                 [[maybe_unused]] int times) {
#ifdef BRAZE_CUDA
  const int64_t bytes = result.numel() * size_of(dtype_of("conv2d", "input", result));
  return least + times * bytes / 3.5e6;
#else
  return 0;
#endif
}

// The shortest of a few runs, in microseconds; fewer where one takes more than `limit`. The first
// loads kernels, the others find their tensors in L2 if these fit. Passes for a bias, and for
// moments that are wanted, are a part of it where the kernel leaves them.
double time_of(Stream stream, const Conv2dProblem& problem, const Decision& decision,
               const Tensor& result, const void* bias, double limit) {
  const Workspace workspace(decision.workspace_bytes, result);
  std::optional<Workspace> sets;
  if (problem.shape.wants_moments && decision.plan.moment_sets > 0) {
    const int64_t count = problem.shape.k * decision.plan.moment_sets;
    sets.emplace(count * int64_t{sizeof(Moments)}, result);
  }
  double more = problem.shape.wants_moments && !sets ? pass_time(result, 3.5, 1) : 0;
  if (bias && !decision.bias_fused) more += pass_time(result, 2.5, 2);
  Tensor written = result;
  Stopwatch watch(stream);
  double least = 0, last = 0;
  for (int i = 0; i <= kMeasuredRuns; ++i) {
    watch.start(i == 1 || (i > 1 && last < kShortMicroseconds));
    Moments* const memory = sets ? static_cast<Moments*>(sets->data()) : nullptr;
    launch(stream, problem, decision, {bias, false, memory}, workspace.data(), written);
    last = watch.stop();
    const double us = last + more;
    least = i <= 1 ? us : std::min(least, us);
    if (us > (i > 0 ? limit : kFarBehind * limit + kLoadingMicroseconds)) break;
  }
  return least;
}

int64_t most_workspace_bytes(const Conv2dShape& shape) {
  const int64_t images = shape.n * (shape.c * shape.h * shape.w + shape.k * shape.p * shape.q);
  const int64_t filters = shape.k * (shape.c / shape.groups) * shape.r * shape.s;
  return std::max({size_of(shape.dtype) * (images + filters),
                   kPartialSums * filters * int64_t{sizeof(float)}, kWorkBytes});
}

// Runs the candidates on the tensors themselves (the result is written again afterwards), what the
// rules have chosen first, and returns the fastest; that one, where nothing is faster by far enough
// to be sure.
Wish fastest(Stream stream, const Conv2dProblem& problem, const Tensor& result, const void* bias) {
  const Decision by_rules = decided(result, problem, {}, bias);
  const auto rules_have = [&](const Decision& d) {
    return d.library == by_rules.library &&
           (d.library >= 0 || d.plan.kernel == by_rules.plan.kernel);
  };
  constexpr double kForever = std::numeric_limits<double>::infinity();
  double least = kForever, before = kForever;
  Wish best;
  auto candidates = candidates_of(problem, bias);
  std::stable_partition(candidates.begin(), candidates.end(),
                        [&](const auto& c) { return rules_have(c.second); });
  const int64_t most = most_workspace_bytes(problem.shape);
  const auto start = std::chrono::steady_clock::now();
  for (const auto& [wish, decision] : candidates) {
    const std::chrono::duration<double, std::micro> passed =
        std::chrono::steady_clock::now() - start;
    const bool is_late = passed.count() > std::max(kLongestMicroseconds, kLongestRuns * least);
    if (is_late && decision.library >= 0) continue;  // ours have nothing to compile
    if (decision.workspace_bytes > most && !rules_have(decision)) continue;
    try {
      const double us = time_of(stream, problem, decision, result, bias, 2 * least);
      if (us < least) least = us, best = wish;
      if (rules_have(decision)) before = us;
    } catch (const std::runtime_error&) {
      continue;  // no memory for its workspace, or it cannot do it after all
    }
  }
  const double gain = before - least;
  return gain >= kLeastGain * before && gain >= kLeastMicroseconds ? best : Wish();
}

// The winners so far.
class Measured {
 public:
  std::optional<Wish> find(const ConvolutionPass& pass) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = winners_.find(pass);
    return found == winners_.end() ? std::nullopt : std::optional(found->second);
  }
  void keep(const ConvolutionPass& pass, const Wish& wish) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (winners_.size() >= kMost) winners_.clear();  // shapes that change all the time
    winners_[pass] = wish;
  }

 private:
  static constexpr size_t kMost = 4096;
  std::mutex mutex_;
  std::unordered_map<ConvolutionPass, Wish, HashWords> winners_;
};

// Whether it is the kernel of depthwise filters where that was measured to be far ahead: building
// cuDNN's engines for them takes one to three seconds a layer.
bool is_depthwise_and_ahead([[maybe_unused]] const Decision& decision) {
#ifdef BRAZE_CUDA
  return decision.library < 0 && decision.plan.beats_library && !decision.plan.by_fft &&
         std::string(dev::conv2d_kernel(decision.plan.kernel)->name) == "depthwise";
#else
  return false;
#endif
}

// The decision under "benchmark": what tuning chose, else what was measured, else what is measured
// now. Rules decide for what cannot be tuned either, for a new pass within a capture, where
// measured choices are to be ignored, where they have a kernel leave moments that are wanted, for
// most depthwise filters, and where other work shares the GPU: by itself the kernel wins that takes
// all of it.
Decision benchmarked(Stream stream, const Conv2dProblem& problem, const Tensor& result,
                     const void* bias) {
  // Never destroyed: threads may outlive static objects.
  static auto* const with_and_without = new Measured[2];
  Measured& measured = with_and_without[problem.shape.wants_moments];
  const Decision by_rules = decided(result, problem, {}, bias);
  if (problem.shape.deterministic || are_multiprocessors_shared() ||
      (problem.shape.wants_moments && leaves_moments(by_rules.plan)) ||
      is_depthwise_and_ahead(by_rules)) {
    return by_rules;
  }
  const auto pass = convolution_pass_of(problem, bias != nullptr, result.get_device_index());
  if (!pass) return by_rules;
  if (tuned_convolutions.in_use && !tuned_convolutions.choice(*pass, false).empty()) {
    return by_rules;
  }
  std::optional<Wish> wish = measured.find(*pass);
  if (!wish) {
    if (is_capturing(stream)) return by_rules;
    wish = fastest(stream, problem, result, bias);
    measured.keep(*pass, *wish);
  }
  return decided(result, problem, *wish, bias);
}

// In the place of a decision for whose workspace there is no memory: one that needs none.
std::optional<Decision> decision_without_workspace(const Conv2dProblem& problem, const void* bias) {
  for (const auto& [wish, decision] : candidates_of(problem, bias)) {
    if (decision.workspace_bytes == 0 && !decision.plan.by_fft) return decision;
  }
  for (int i = 0; dev::conv2d_kernel(i); ++i) {
    const Conv2dPlan plan = dev::plan_conv2d(problem, i);
    if (plan.obstacle || plan.by_fft) continue;
    if (plan.workspace_bytes == 0) return own_decision(plan);
  }
  return std::nullopt;
}

}  // namespace
}  // namespace braze
