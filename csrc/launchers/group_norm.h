#pragma once

#include "launchers/batch_norm.h"
#include "launchers/common/activation.h"
#include "launchers/common/registry.h"
#include "launchers/common/types.h"

namespace braze {

// n images of c channels with `inner` elements each, [n, c, inner] in memory or, channels_last,
// [n, inner, c]; each of `groups` runs of neighbouring channels is normalised by itself in each
// image. Statistics are kept in float32 (float64 for float64 input): "statistics dtype".
struct GroupNormShape {
  DType dtype;   // of x and dx
  DType result;  // of y and dy: dtype, or float32 for a 16-bit x where that is taken
  int64_t n, c, inner, groups;
  bool channels_last = false;
  Activation activation = kIdentity;  // of what is normalised; others where they are taken

  int64_t planes() const { return n * c; }
  int64_t rows() const { return n * groups; }
  int64_t channels() const { return c / groups; }  // of a group
  int64_t size() const { return channels() * inner; }
};

// Gradients of group_norm_backward; nullptr: not wanted. weight and bias, [c], have the dtype that
// goes with the parameters.
struct GroupNormGradients {
  void* x;
  void* weight;
  void* bias;
  DType parameter_dtype;
};

namespace BRAZE_DEVICE {

// Whether the functions below take channels_last tensors, which are aligned to 16 bytes then.
bool group_norm_takes_channels_last();

// Whether the functions below take activations of tensors of such a shape, and float32 results of
// 16-bit ones; not both at once.
bool group_norm_takes_activation(const GroupNormShape& shape);
bool group_norm_takes_float32(const GroupNormShape& shape);

// y = f(v) with v = (x - mean) rstd weight + bias, where rstd = 1 / sqrt(biased variance + eps) and
// f is the activation. Parameters are [c] each, or nullptr. mean and rstd, [n, groups] in the
// statistics dtype, are results.
void group_norm(Stream stream, const GroupNormShape& shape, const void* x,
                const BatchNormAffine& affine, double eps, void* y, void* mean, void* rstd,
                void* workspace);

// Moments of each plane, where a group is too long for threads to hold, or of parts of each channel
// of channels_last images; else 0.
int64_t group_norm_forward_workspace_bytes(const GroupNormShape& shape);

// Sums of each plane of `inner` elements, and what dx is made with.
int64_t group_norm_workspace_bytes(const GroupNormShape& shape);

// With xhat = (x - mean) rstd, dv = dy f'(v) and g = dv weight:
//     dweight = sum(dv xhat), dbias = sum(dv) over images and the channel's elements,
//     dx = rstd (g - (sum(g) + xhat sum(g xhat)) / size), sums over the group in the image.
// affine.bias is read for f' only.
void group_norm_backward(Stream stream, const GroupNormShape& shape, const void* dy, const void* x,
                         const BatchNormAffine& affine, const void* mean, const void* rstd,
                         const GroupNormGradients& gradients, void* workspace);

}  // namespace BRAZE_DEVICE
}  // namespace braze
