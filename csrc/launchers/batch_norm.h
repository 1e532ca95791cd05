#pragma once

#include <optional>

#include "launchers/common/moments.h"
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

// What an input was normalised with, [c] each in the statistics dtype: y = (x - mean) * scale +
// shift, where scale is rstd * weight, and rstd = 1 / sqrt(biased variance + eps).
struct BatchNormStatistics {
  void* mean;
  void* rstd;
  void* scale;
  void* shift;
};

namespace BRAZE_DEVICE {

int64_t batch_norm_workspace_bytes(const BatchNormShape& shape);

// y = (x - mean) * rstd * weight + bias with the batch's own statistics, which are also returned,
// in the statistics dtype. rstd = 1 / sqrt(biased variance + eps). count() is at least 1, c too.
void batch_norm_training(Stream stream, const BatchNormShape& shape, const void* x,
                         const BatchNormAffine& affine, const BatchNormBuffers& buffers, double eps,
                         void* y, void* mean, void* rstd, void* workspace);

// The same with the statistics in `buffers`, which stay as they are.
void batch_norm_evaluation(Stream stream, const BatchNormShape& shape, const void* x,
                           const BatchNormAffine& affine, const BatchNormBuffers& buffers,
                           double eps, void* y, void* mean, void* rstd);

// What the two above normalise with, for kernels that do more in the same pass. Training updates
// the buffers, and reads x only where there are no moments of it; evaluation needs neither x nor a
// workspace.
void batch_norm_coefficients(Stream stream, const BatchNormShape& shape, bool training,
                             const void* x, const ChannelMoments& moments,
                             const BatchNormAffine& affine, const BatchNormBuffers& buffers,
                             double eps, const BatchNormStatistics& statistics, void* workspace);

// y = max(0, (x - mean) * scale + shift).
void batch_norm_relu(Stream stream, const BatchNormShape& shape, const void* x,
                     const BatchNormStatistics& statistics, void* y);

// Results that are nullptr are left out. mean and rstd as the forward returned them; `training`
// tells whether they depend on x. dweight and dbias have affine.dtype.
void batch_norm_backward(Stream stream, const BatchNormShape& shape, bool training, const void* dy,
                         const void* x, const BatchNormAffine& affine, const void* mean,
                         const void* rstd, void* dx, void* dweight, void* dbias, void* workspace);

// The same for batch_norm_relu. dconstant: the gradient of a constant added to each channel of x,
// in shape.dtype: 0 in training, where it cancels.
void batch_norm_relu_backward(Stream stream, const BatchNormShape& shape, bool training,
                              const void* dy, const void* x, const BatchNormAffine& affine,
                              const BatchNormStatistics& statistics, void* dx, void* dweight,
                              void* dbias, void* dconstant, void* workspace);

}  // namespace BRAZE_DEVICE
}  // namespace braze
