// What is decided about a problem, kept for when it comes again: a call in eager mode then costs a
// look-up in the place of planning. No torch here: exports.cpp includes this.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "launchers/common/hash_words.h"

namespace braze {

// How often plans were made, in all caches, for tests.
inline std::atomic<int64_t> plans_made{0};

// Part of every key: whoever changes what plans follow from, as tuning does, counts it up.
inline std::atomic<int64_t> plan_generation{0};

// How addresses count in a key: by the largest power of two that divides them, up to what any
// kernel or library asks for.
inline int64_t alignment_of(const void* data) {
#ifdef BRAZE_CUDA
  constexpr uintptr_t kMost = 256;
#else
  constexpr uintptr_t kMost = 16;
#endif
  const auto address = reinterpret_cast<uintptr_t>(data) | kMost;
  return static_cast<int64_t>(address & -address);
}

// The latest plans, at most kWays * kSets; of those whose keys have the same hash modulo kSets the
// last kWays: with two, some of a ResNet-50's 69 passes drive each other out at every step. Any
// thread may ask; one that would have to wait for another plans for itself, so that nothing is ever
// held up, not even a child that was forked in the middle of it.
template <size_t kWords, typename Plan>
class PlanCache {
 public:
  using Key = std::array<int64_t, kWords>;

  // The plan kept under the key, else what make() returns, which is kept unless it throws.
  template <typename Make>
  Plan get(const Key& key, const Make& make) {
    const size_t index = HashWords()(key) % kSets;
    {
      const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
      if (lock && !sets_.empty()) {
        for (const Entry& entry : sets_[index]) {
          if (entry.used && entry.key == key) return entry.plan;
        }
      }
    }
    const Plan plan = make();
    ++plans_made;
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock) {
      if (sets_.empty()) sets_.resize(kSets);
      auto& set = sets_[index];
      std::move_backward(set.begin(), set.end() - 1, set.end());
      set.front() = {true, key, plan};
    }
    return plan;
  }

 private:
  static constexpr size_t kSets = 256, kWays = 4;
  struct Entry {
    bool used = false;
    Key key;
    Plan plan;
  };

  std::mutex mutex_;
  std::vector<std::array<Entry, kWays>> sets_;
};

}  // namespace braze
