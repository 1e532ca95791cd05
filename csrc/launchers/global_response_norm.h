#pragma once

#include "launchers/channel_scale.h"
#include "launchers/common/registry.h"

namespace braze {

// weight and bias, [c] each, of the images' dtype or float32 beside 16 bits.
struct ResponseNormParameters {
  const void* weight;
  const void* bias;
  DType dtype;
};

// Gradients of global_response_norm_backward; nullptr: not wanted. weight and bias, [c], have the
// parameters' dtype.
struct ResponseNormGradients {
  void* x;
  void* weight;
  void* bias;
};

namespace BRAZE_DEVICE {

// With g = sqrt(sum of x^2 over the pixels) of each channel of each image, and r = 1 / (mean of g
// over the image's channels + eps): y = x (1 + weight g r) + bias. norms, [n, c], and scales, [n],
// are results: g and r, in float32 (float64 for float64 images).
void global_response_norm(Stream stream, const ChannelScaleShape& shape, const void* x,
                          const ResponseNormParameters& parameters, double eps, void* y,
                          void* norms, void* scales);

// With S = sum of dy x over the pixels: dbias = sum of dy over images and pixels,
// dweight = sum of g r S over the images, and
//     dx = dy (1 + weight g r) + x (weight S r - r^2 mean(weight S g)) / g,
// the mean over the image's channels; 0 for the last term where g is 0.
void global_response_norm_backward(Stream stream, const ChannelScaleShape& shape, const void* dy,
                                   const void* x, const ResponseNormParameters& parameters,
                                   const void* norms, const void* scales,
                                   const ResponseNormGradients& gradients, void* workspace);

int64_t global_response_norm_backward_workspace_bytes(const ChannelScaleShape& shape);

}  // namespace BRAZE_DEVICE
}  // namespace braze
