#pragma once

#include "launchers/conv_bn_relu2d.h"

namespace braze::cuda {

// The sums that every gradient behind batch norm waits for, in parts: GradPartial of each channel
// (cuda/batch_norm/channel.cuh), as many as it returns. partials: the workspace of a backward.
int bn_pool_grad_sums(Stream stream, const BnPoolShape& shape, const void* dy, const void* z,
                      const uint32_t* codes, const void* mean, void* partials);

}  // namespace braze::cuda
