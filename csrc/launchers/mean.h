#pragma once

#include "launchers/common/types.h"

namespace braze {

// `numel` elements in the same order in memory in all three; `from`: of both sources.
struct MeanTensor {
  const void *first, *second;
  void* to;
  int64_t numel;
  DType from;
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// The means of `count` pairs of tensors, all in one dtype, rounded once.
void mean(Stream stream, DType to, const MeanTensor* tensors, int64_t count);

}  // namespace braze::BRAZE_DEVICE
