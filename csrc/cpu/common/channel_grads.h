// Gradients of a parameter per channel, of tensors [outer, channels, inner]: a task takes some
// channels and all of their elements, so that sums have the same order for any number of threads.
#pragma once

#include <algorithm>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"

namespace braze::cpu {

constexpr int64_t kChannelBlock = 16;  // channels of a task: a line of the cache

// f(offset) is called for each element and gives what it adds to the sum of its channel;
// store(channel, sum) gets the sums.
template <typename F, typename Store>
void channel_sums(int64_t outer, int64_t channels, int64_t inner, const F& f, const Store& store) {
  parallel_for(0, ceil_div(channels, kChannelBlock), 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t begin = block * kChannelBlock;
      const int64_t count = std::min(kChannelBlock, channels - begin);
      double sums[kChannelBlock] = {};
      for (int64_t o = 0; o < outer; ++o) {
        if (inner == 1) {
          const int64_t offset = o * channels + begin;
#pragma omp simd
          for (int64_t c = 0; c < count; ++c) sums[c] += f(offset + c);
          continue;
        }
        for (int64_t c = 0; c < count; ++c) {
          const int64_t offset = (o * channels + begin + c) * inner;
          for (int64_t i = 0; i < inner; ++i) sums[c] += f(offset + i);
        }
      }
      for (int64_t c = 0; c < count; ++c) store(begin + c, sums[c]);
    }
  });
}

// Calls f(tag) with the type of a parameter: that of its op's tensors, T, or float.
template <typename T, typename F>
void dispatch_parameter(DType dtype, const F& f) {
  if constexpr (sizeof(T) == 2) {
    if (dtype == DType::kFloat32) return f(TypeTag<float>{});
  }
  f(TypeTag<T>{});
}

}  // namespace braze::cpu
