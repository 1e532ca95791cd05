#pragma once

#include "launchers/conv_bn_pool_backward.h"
#include "cuda/batch_norm/channel.cuh"

namespace braze::cuda::halo::pooled {

// What the kernels of conv_bn_pool_backward.h are launched with, beside the problem.
struct Launch {
  const GradPartial<float>* sums;  // of batch norm's gradients, sum_parts of each channel
  int sum_parts;
  bool early;           // all else may be read before earlier kernels are done
  float* weight_parts;  // of the weight's gradient, as store_partial (conv2d/halo) leaves them
};

// conv_gradients.cu, in 16 bits, and conv_gradients_tf32.cu: the tiles of a problem, one or more to
// a block, or 0 where it is none for that kernel.
int conv_gradients_tiles(const ConvBnPoolBackward& problem);
int conv_gradients_tf32_tiles(const ConvBnPoolBackward& problem);

void conv_gradients(Stream stream, const ConvBnPoolBackward& problem, const Launch& launch);
void conv_gradients_tf32(Stream stream, const ConvBnPoolBackward& problem, const Launch& launch);

}  // namespace braze::cuda::halo::pooled
