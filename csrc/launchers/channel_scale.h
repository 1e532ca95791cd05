#pragma once

#include "launchers/common/types.h"

namespace braze {

// A dense tensor of n images of c channels, its pixels innermost (contiguous) or its channels
// (channels_last); beside it n * c factors, those of an image together.
struct ChannelScaleShape {
  DType dtype;
  int64_t n, c, pixels;
  bool channels_last;
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// y = x * scale + spread / pixels, a factor and what is spread over the pixels for each channel of
// each image. spread may be null; y may be x.
void channel_scale(Stream stream, const ChannelScaleShape& shape, const void* x, const void* scale,
                   const void* spread, void* y);

// out = the sum of a * b over the pixels, for each channel of each image; in a fixed order.
void channel_dot(Stream stream, const ChannelScaleShape& shape, const void* a, const void* b,
                 void* out);

// out = the mean of x over the pixels, likewise.
void channel_mean(Stream stream, const ChannelScaleShape& shape, const void* x, void* out);

}  // namespace braze::BRAZE_DEVICE
