// How many of a GPU's multiprocessors a launch may count on. No CUDA here: exports.cpp includes
// this.
#pragma once

#include <atomic>
#include <climits>

namespace braze {

// Fewer than there are where other launches run beside it: grids are sized, and plans made, for
// this number (cuda/common/launch.cuh, sm_count()). Of all devices and threads, since a backward
// pass runs in threads of its own.
inline std::atomic<int> multiprocessor_limit{INT_MAX};

inline bool are_multiprocessors_shared() {
  return multiprocessor_limit.load(std::memory_order_relaxed) < INT_MAX;
}

}  // namespace braze
