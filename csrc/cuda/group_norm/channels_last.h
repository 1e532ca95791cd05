// Group norm of channels_last images.
#pragma once

#include "launchers/group_norm.h"

namespace braze::cuda {

// What group_norm() and group_norm_backward() do with shape.channels_last, whose tensors are
// aligned to 16 bytes. The parameters' gradients are left to the caller: sums of dy xhat and of dy
// for each image and channel, at dot[image * pitch + channel] and sum[...], of acc_t<T>; nullptr:
// not wanted.
struct ImageSums {
  void* dot;
  void* sum;
  int64_t pitch;
};

int64_t images_forward_workspace_bytes(const GroupNormShape& shape);
void normalise_images(Stream stream, const GroupNormShape& shape, const void* x,
                      const BatchNormAffine& affine, double eps, void* y, void* mean, void* rstd,
                      void* workspace);

int64_t images_backward_workspace_bytes(const GroupNormShape& shape);
void image_gradients(Stream stream, const GroupNormShape& shape, const void* dy, const void* x,
                     const BatchNormAffine& affine, const void* mean, const void* rstd, void* dx,
                     const ImageSums& sums, void* workspace);

}  // namespace braze::cuda
