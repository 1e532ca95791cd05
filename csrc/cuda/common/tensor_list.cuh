// Work on many tensors in one launch: their pointers travel as kernel parameters, so that there is
// no table to copy to the device first and a captured graph holds them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "launchers/common/types.h"

namespace braze::cuda {

// Tensors (anything with `numel`) that share a launch; a block takes kBlockElements of one of them.
// kTensors: what fits into the 4 KB of kernel parameters that every architecture has.
template <typename Tensor, int kTensors, int64_t kBlockElements>
struct TensorList {
  int count;
  int first_block[kTensors + 1];  // blocks of tensor i: [first_block[i], first_block[i + 1])
  Tensor tensors[kTensors];

  unsigned blocks() const { return static_cast<unsigned>(first_block[count]); }
  __device__ int blocks_of(int tensor) const {
    return first_block[tensor + 1] - first_block[tensor];
  }

  // The tensor of a block, and the elements that are the block's.
  __device__ const Tensor& of_block(unsigned block, int64_t* begin, int64_t* end) const {
    // The last tensor whose first block is not after this one.
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (first_block[middle] <= static_cast<int>(block)) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    *begin = (int64_t{block} - first_block[low]) * kBlockElements;
    *end = min(*begin + kBlockElements, tensors[low].numel);
    return tensors[low];
  }

  // Calls launch() each time the list is full, and at the end; the list is this object. Tensors
  // without elements are left out, or have a block where kWithEmpty.
  template <bool kWithEmpty = false, typename Launch>
  void for_each_launch(const Tensor* all, int64_t all_count, Launch&& launch) {
    constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
    count = first_block[0] = 0;
    for (int64_t i = 0; i < all_count; ++i) {
      if (all[i].numel == 0 && !kWithEmpty) continue;
      const int64_t more = std::max<int64_t>(1, ceil_div(all[i].numel, kBlockElements));
      if (count == kTensors || (count > 0 && first_block[count] + more > kMostBlocks)) {
        launch();
        count = 0;
      }
      tensors[count] = all[i];
      first_block[count + 1] = static_cast<int>(first_block[count] + more);
      ++count;
    }
    if (count > 0) launch();
  }
};

}  // namespace braze::cuda
