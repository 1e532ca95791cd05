#pragma once

#include "launchers/common/types.h"

namespace braze {

// One parameter with its gradient and momentum buffer (null without momentum), all of `numel`
// elements in the same order in memory. Where there is a `source`, of another dtype, the gradient
// is cast from it first.
struct SgdTensor {
  void* param;
  void* grad;  // written where there is a source
  void* momentum;
  const void* source;
  int64_t numel;
};

struct SgdOptions {
  double lr;
  const void* lr_tensor;  // one element, read by the kernel in place of lr; or null
  bool lr_is_double;      // lr_tensor is float64, else float32
  double momentum;
  double dampening;
  double weight_decay;
  bool nesterov;
  bool maximize;
  bool first_step;          // momentum buffers are written, not read
  const float* grad_scale;  // gradients are multiplied by its reciprocal; or null
  const float* found_inf;   // nothing is written where it is not 0; or null
  const float* unwritten;   // where it is not 0, as first_step; or null
  DType source_dtype;       // of all sources
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// torch.optim.SGD's update of `count` tensors of one dtype:
//   g = (maximize ? -grad : grad) (1 / grad_scale) + weight_decay p
//   m = first_step or unwritten ? g : momentum m + (1 - dampening) g
//   p -= lr (momentum == 0 ? g : nesterov ? g + momentum m : m)
// 16-bit parameters are computed in float32 and rounded once.
void sgd(Stream stream, DType dtype, const SgdTensor* tensors, int64_t count,
         const SgdOptions& options);

// Whether gradients of `dtype` may have sources of that other dtype.
bool sgd_takes_sources(DType dtype, DType source_dtype);

}  // namespace braze::BRAZE_DEVICE
