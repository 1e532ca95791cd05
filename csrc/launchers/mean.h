#pragma once

#include "launchers/common/types.h"

namespace braze {

// `numel` elements in the same order in memory in all three.
struct MeanTensor {
  const void *first, *second;
  void* to;
  int64_t numel;
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// The means of `count` pairs of tensors of one dtype, in another one, rounded once.
void mean(Stream stream, DType from, DType to, const MeanTensor* tensors, int64_t count);

}  // namespace braze::BRAZE_DEVICE
