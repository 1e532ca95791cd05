#pragma once

#include "launchers/common/types.h"

namespace braze {

struct NormTensor {
  const void* values;
  int64_t numel;
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// Doubles of workspace for these tensors.
int64_t grad_norm_workspace(const NormTensor* tensors, int64_t count);

// The sums of squares of parts of `count` dense tensors of one dtype, into the first of
// grad_norm_workspace() doubles. If `norm` is not null, also the root of the sum of all `sums`
// doubles at `all`, which end with these, divided by *grad_scale where there is one. The order of
// all additions is fixed. ticket: on a GPU, a zero, and zero again afterwards.
void grad_norm(Stream stream, DType dtype, const NormTensor* tensors, int64_t count,
               double* workspace, const double* all, int64_t sums, const float* grad_scale,
               double* norm, unsigned* ticket);

}  // namespace braze::BRAZE_DEVICE
