// The backward pass of conv_bn_relu2d with pooling, for a GPU, of a 3x3 convolution in training:
// one kernel makes dz, the gradient of the convolution's output, tile by tile in shared memory, and
// both gradients of the convolution from each tile. dz is never in memory.
#pragma once

#include "launchers/conv2d.h"
#include "launchers/conv_bn_relu2d.h"

namespace braze {

struct ConvBnPoolBackward {
  Conv2dShape conv;
  BnPoolShape pool;       // of z, the convolution's output
  Tensor4dRef x, w, dw;   // the convolution's operands; a result
  void* dx;               // a result, dense in channels_last
  const void *dy, *z;     // the pooled gradient
  const uint32_t* codes;  // of bn_pool_forward
  BatchNormAffine affine;
  BatchNormStatistics statistics;
  void *dweight, *dbias, *dconstant;  // of batch norm and of the convolution's bias; or nullptr
};

namespace BRAZE_DEVICE {

// Whether the kernel takes the problem and was measured ahead of the passes one after the other.
bool conv_bn_pool_backward_pays(const ConvBnPoolBackward& problem);

// What follows asks for that.
int64_t conv_bn_pool_backward_workspace_bytes(const ConvBnPoolBackward& problem);

// All but dw, of which the workspace has parts then.
void conv_bn_pool_backward(Stream stream, const ConvBnPoolBackward& problem, void* workspace);

// dw, deterministic: parts are added up in a fixed order.
void finish_conv_bn_pool_backward(Stream stream, const ConvBnPoolBackward& problem,
                                  void* workspace);

}  // namespace BRAZE_DEVICE
}  // namespace braze
