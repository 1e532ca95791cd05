#pragma once

#include "launchers/common/types.h"

namespace braze {

// `numel` elements in the same order in memory on both sides.
struct CastTensor {
  const void* from;
  void* to;
  int64_t numel;
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// Converts `count` tensors of one dtype to another one, rounding to nearest even; to the same one
// bit by bit, whatever the bits mean.
void cast(Stream stream, DType from, DType to, const CastTensor* tensors, int64_t count);

}  // namespace braze::BRAZE_DEVICE
