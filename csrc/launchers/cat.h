#pragma once

#include "launchers/common/types.h"

namespace braze {

// `bytes` of each pixel, from one place to another one: pixels lie from_stride and to_stride bytes
// apart. Concatenation along channels is one of these for each tensor, and so is its gradient.
struct ChannelCopy {
  const void* from;
  void* to;
  int64_t from_stride, to_stride, bytes;
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// Copies `count` times the channels of `pixels` pixels, none of them empty, between tensors that do
// not overlap. Any number of copies; addresses and extents are multiples of 2 bytes.
void copy_channels(Stream stream, int64_t pixels, const ChannelCopy* copies, int64_t count);

}  // namespace braze::BRAZE_DEVICE
