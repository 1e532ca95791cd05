#pragma once

#include "launchers/common/types.h"

namespace braze {

// Of each pixel: result[j * groups + i] = input[i * (channels / groups) + j]. Pixels of the input
// lie `step` elements apart, those of the result are dense. There is at least one.
struct ChannelShuffleArgs {
  DType dtype;
  int64_t pixels, channels, groups, step;
  const void* input;
  void* result;
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

void channel_shuffle(Stream stream, const ChannelShuffleArgs& args);

}  // namespace braze::BRAZE_DEVICE
