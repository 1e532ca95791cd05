#pragma once

#include <optional>

#include "launchers/common/activation.h"
#include "launchers/common/moments.h"
#include "launchers/common/registry.h"
#include "launchers/common/types.h"

namespace braze {

// n images of c channels with `inner` elements each, in memory either [n, c, inner] or, where
// channels_last, [n, inner, c]. Statistics are over the n * inner elements of a channel and kept in
// float32 (float64 for float64 input): below, "statistics dtype".
struct BatchNormShape {
  DType dtype;
  int64_t n, c, inner;
  bool channels_last;

  int64_t count() const { return n * inner; }
};

// [c] each, or nullptr: 1 and 0. dtype is that of both.
struct BatchNormAffine {
  const void* weight;
  const void* bias;
  DType dtype;
};

// [c] each, updated as running = (1 - momentum) * running + momentum * batch, with the unbiased
// variance; nullptr: not kept. Without a momentum it is 1 / (number of batches so far, this one
// included). *batches, where given, counts them.
struct BatchNormBuffers {
  void* mean;
  void* var;
  DType dtype;
  int64_t* batches;
  std::optional<double> momentum;
};

// What an input was normalised with, [c] each in the statistics dtype: (x - mean) * scale + shift,
// where scale is rstd * weight, and rstd = 1 / sqrt(biased variance + eps). A backward pass without
// an activation reads no scale and shift, which may be nullptr then.
struct BatchNormStatistics {
  void* mean;
  void* rstd;
  void* scale;
  void* shift;
};

// What comes behind the normalisation: y = activation(normalised + residual).
struct BatchNormTail {
  Activation activation = kIdentity;
  const void* residual = nullptr;  // as x
};

// Gradients of batch_norm_backward; nullptr: not wanted.
struct BatchNormGradients {
  void* x;
  // Where there is a residual and an activation it is made in any case: x's gradient is made of it.
  void* residual;
  void* weight;  // this and bias have affine.dtype
  void* bias;
  // Of a constant added to each channel of x, in shape.dtype: 0 in training, where it cancels.
  void* constant;
};

// Mean of a part of a channel, the sum of squares about it, and the number of elements. In float64,
// since parts are merged by subtracting means.
struct MomentsPartial {
  double mean, squares, count;
};

// Sums of dy and of dy * (x - mean) over a part of a channel.
struct GradSums {
  double sum, dot;
};

namespace BRAZE_DEVICE {

int64_t batch_norm_workspace_bytes(const BatchNormShape& shape);

// Of what batch_norm_apply leaves for the backward pass in the place of the residual, in whatever
// order: where the activation is a clamp that is not the identity, whether it lets the gradient
// through. 0: it leaves nothing, the backward pass reads the residual.
int64_t batch_norm_mask_bytes(const BatchNormShape& shape, const BatchNormTail& tail);

// What x is normalised with. Training updates the buffers, and reads x only where there are no
// moments of it; evaluation takes the statistics in the buffers and needs neither x nor a
// workspace. count() and c are at least 1.
void batch_norm_coefficients(Stream stream, const BatchNormShape& shape, bool training,
                             const void* x, const ChannelMoments& moments,
                             const BatchNormAffine& affine, const BatchNormBuffers& buffers,
                             double eps, const BatchNormStatistics& statistics, void* workspace);

// y = activation((x - mean) * scale + shift + residual). Tensors are aligned to 16 bytes here and
// below.
void batch_norm_apply(Stream stream, const BatchNormShape& shape, const void* x,
                      const BatchNormTail& tail, const BatchNormStatistics& statistics, void* y,
                      void* mask);

// Both, in training and of x.
void batch_norm_train(Stream stream, const BatchNormShape& shape, const void* x,
                      const BatchNormAffine& affine, const BatchNormBuffers& buffers, double eps,
                      const BatchNormTail& tail, const BatchNormStatistics& statistics, void* y,
                      void* mask, void* workspace);

// The kernels of the forward pass in training, without a tail: the rungs of the ladder, where the
// device has one, and what ships. nullptr beyond the last.
const KernelInfo* batch_norm_rung_info(int number);

// batch_norm_train without a tail, by the kernel of that number, or kAnyKernel. Throws where the
// kernel does not take the arguments.
void batch_norm_rung(Stream stream, const BatchNormShape& shape, const void* x,
                     const BatchNormAffine& affine, const BatchNormBuffers& buffers, double eps,
                     const BatchNormStatistics& statistics, void* y, void* workspace, int kernel);

// statistics: of the forward pass; `training` tells whether they depend on x. tail.residual may be
// nullptr where there is a mask. With g = dy activation', over the `count` elements of a channel:
//     dresidual = g,  dbias = sum(g),  dweight = sum(g xhat),  xhat = (x - mean) rstd,
//     dx = weight rstd (g - (dbias + xhat dweight) / count)  in training,
//     dx = weight rstd g                                     in evaluation.
void batch_norm_backward(Stream stream, const BatchNormShape& shape, bool training, const void* dy,
                         const void* x, const BatchNormTail& tail, const void* mask,
                         const BatchNormAffine& affine, const BatchNormStatistics& statistics,
                         const BatchNormGradients& gradients, void* workspace);

// batch_norm_backward in training, of sums that what made dy has left: [c][sets][2], of dy and of
// dy * (x - mean), where dy is the gradient before the activation. Not of float64.
void batch_norm_backward_of_sums(Stream stream, const BatchNormShape& shape, const void* dy,
                                 const void* x, const float* sums, int sets,
                                 const BatchNormAffine& affine,
                                 const BatchNormStatistics& statistics,
                                 const BatchNormGradients& gradients, void* workspace);

// Batch norm over the batches of several processes, in steps between which they exchange what is
// here [c]. The forward pass in training: what follows from the moments of all `parts` of each
// channel, [c][parts], of which some may be of no elements; *total is their number. Where there is
// none nothing follows.
void batch_norm_moments(Stream stream, const BatchNormShape& shape, const void* x,
                        MomentsPartial* moments, void* workspace);
void batch_norm_merge(Stream stream, const BatchNormShape& shape, const MomentsPartial* moments,
                      int parts, const BatchNormAffine& affine, const BatchNormBuffers& buffers,
                      double eps, const BatchNormStatistics& statistics, double* total);

// The backward pass: this process's sums, of which it makes its parameters' gradients (nullptr: not
// wanted), and the gradient of its input by the sums over all `*total` elements.
void batch_norm_sums(Stream stream, const BatchNormShape& shape, const void* dy, const void* x,
                     const BatchNormAffine& affine, const BatchNormStatistics& statistics,
                     GradSums* sums, void* dweight, void* dbias, void* workspace);
void batch_norm_input_grad(Stream stream, const BatchNormShape& shape, const void* dy,
                           const void* x, const BatchNormAffine& affine,
                           const BatchNormStatistics& statistics, const GradSums* sums,
                           const double* total, void* dx, void* workspace);

}  // namespace BRAZE_DEVICE
}  // namespace braze
