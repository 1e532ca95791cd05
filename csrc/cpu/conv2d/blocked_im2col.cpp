// Filters of any size as products of patches that are copied block by block (blocked_im2col.h,
// blocked_im2col_wgrad.h).
#include "cpu/conv2d/blocked_im2col.h"

#include <algorithm>
#include <vector>

#include "cpu/conv2d/blocked_im2col_wgrad.h"
#include "cpu/conv2d/kernels.h"
#include "cpu/conv2d/steps.h"

namespace braze::cpu {
namespace {

// The convolutions of a pass, those with the most taps first, as one pool of tasks.
template <typename T, typename Step>
class Convolutions {
  using Acc = acc_t<T>;
  using Plan = BlockedIm2colPlan<T, Step>;

 public:
  Convolutions(const Conv2dProblem& problem, const void* bias) {
    with_convolutions(problem, bias, [&](const Convolution& c) { convolutions_.push_back(c); });
    std::stable_sort(
        convolutions_.begin(), convolutions_.end(),
        [](const Convolution& a, const Convolution& b) { return a.taps() > b.taps(); });
    for (const Convolution& c : convolutions_) {
      plans_.emplace_back(c);
      packed_size_ += plans_.back().packed_size;
      scratch_ = std::max(scratch_, plans_.back().scratch());
    }
  }
  int64_t bytes() const { return packed_size_ * sizeof(Acc) + num_threads() * scratch_; }

  void run(void* workspace) const {
    Acc* packed = static_cast<Acc*>(workspace);
    char* const scratch = reinterpret_cast<char*>(packed + packed_size_);
    std::vector<BlockedIm2col<T, Step>> parts;
    parts.reserve(plans_.size());
    std::vector<int64_t> panels{0}, tasks{0};  // of those before each
    for (size_t i = 0; i < plans_.size(); ++i) {
      parts.emplace_back(convolutions_[i], plans_[i], packed);
      packed += plans_[i].packed_size;
      panels.push_back(panels.back() + parts[i].panels());
      tasks.push_back(tasks.back() + parts[i].tasks());
    }
    const auto part_of = [](const std::vector<int64_t>& before, int64_t i) {
      return std::upper_bound(before.begin(), before.end(), i) - before.begin() - 1;
    };
    const int64_t panel_size = packed_size_ / std::max<int64_t>(1, panels.back());
    parallel_for(0, panels.back(), ceil_div(16384, panel_size + 1),
                 [&](int64_t first, int64_t last) {
                   for (int64_t i = first; i < last; ++i) {
                     const auto part = part_of(panels, i);
                     parts[part].pack(i - panels[part]);
                   }
                 });
    for_each_task(tasks.back(), [&](int64_t worker, int64_t i) {
      const auto part = part_of(tasks, i);
      parts[part].run(scratch + worker * scratch_, i - tasks[part]);
    });
  }

 private:
  std::vector<Convolution> convolutions_;
  std::vector<Plan> plans_;
  int64_t packed_size_ = 0, scratch_ = 0;
};

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
