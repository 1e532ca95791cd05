// The convolutions of a pass, those with the most taps first, as one pool of tasks.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/conv2d/passes.h"
#include "cpu/matmul/gemm.h"

namespace braze::cpu {

// Kernel(convolution, plan, packed): packs its weights, panels() parts of them, into room for
// plan.packed_size elements, then runs tasks(), each with plan.scratch() bytes of its own.
template <typename Acc, typename Plan, typename Kernel>
class ConvolutionPool {
 public:
  ConvolutionPool(const Conv2dProblem& problem, const void* bias)
      : convolutions_(convolutions_of(problem, bias)) {
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

  // Returns what ran, of each convolution.
  std::vector<Kernel> run(void* workspace) const {
    Acc* packed = static_cast<Acc*>(workspace);
    char* const scratch = reinterpret_cast<char*>(packed + packed_size_);
    std::vector<Kernel> parts;
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
    return parts;
  }

 private:
  std::vector<Convolution> convolutions_;
  std::vector<Plan> plans_;
  int64_t packed_size_ = 0, scratch_ = 0;
};

}  // namespace braze::cpu
