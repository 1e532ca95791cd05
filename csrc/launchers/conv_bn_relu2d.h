// Batch norm + ReLU + 2x2 max pool of a convolution's output z: what follows a convolution in a
// block. The normalised tensor never reaches memory: forward reads z once for the pooled result,
// and before that for its statistics where the convolution left no moments; backward reads it for
// two sums per channel and once more for dz.
//
// With g the pooled gradient where ReLU lets it through, and xhat = (z - mean) rstd at the window's
// maximum, S1 = sum(g) and S2 = sum(g xhat) give
//     dbias = S1,  dweight = S2,
//     dz = weight rstd (dy - (S1 + xhat S2) / N)   in training,
//     dz = weight rstd dy                          in evaluation,
// dy being g at the maximum and 0 everywhere else.
#pragma once

#include "launchers/batch_norm.h"
#include "launchers/common/types.h"

namespace braze {

// Pooling with stride 2 and no padding: an odd extent's last row or column is in no window.
struct BnPoolShape {
  DType dtype;
  int64_t n, c, h, w;  // of z
  bool channels_last;  // layout of z
  // Whether the pooled tensors (y, dy) are in the other layout, where bn_pool_turns() allows it: a
  // linear layer wants them contiguous.
  bool turned = false;
  // Whether the forward pass leaves z's values at the windows' maxima behind the codes, so that the
  // sums of the backward pass read a quarter of z.
  bool keeps_maxima = false;

  int64_t p() const { return h / 2; }
  int64_t q() const { return w / 2; }
  int64_t pooled() const { return n * c * p() * q(); }
  // 2x2 tiles that cover z, those that are cut off included.
  int64_t tiles() const { return n * c * ((h + 1) / 2) * ((w + 1) / 2); }
  // Whether it may: codes fill whole vectors then.
  bool may_keep_maxima() const { return channels_last && c % 32 == 0; }
  BatchNormShape norm() const { return {dtype, n, c, h * w, channels_last}; }
};

// The kernels number tiles in 31 bits.
constexpr int64_t kBnPoolMostTiles = (int64_t{1} << 31) - 1;

// A 4-bit code per pooled element, in the order of a pooled tensor in z's layout, eight to a word,
// the first in the lowest bits: the position of the maximum in its window (0 to 3, in reading
// order), or 4 where ReLU stops the gradient. Behind them the maxima, in the same order, if they
// are kept.
inline int64_t bn_pool_maxima_word(const BnPoolShape& shape) { return ceil_div(shape.pooled(), 8); }
inline int64_t bn_pool_code_words(const BnPoolShape& shape) {
  const int64_t maxima = shape.keeps_maxima ? shape.pooled() * size_of(shape.dtype) / 4 : 0;
  return bn_pool_maxima_word(shape) + maxima;
}

namespace BRAZE_DEVICE {

// Whether pooled tensors may be contiguous where z is channels_last: where there is so little of
// them that single accesses cost less than another pass.
bool bn_pool_turns(const BnPoolShape& shape);

// pooled() is at least 1 and tiles() at most kBnPoolMostTiles. y: the pooled result. statistics: of
// batch_norm_coefficients.
void bn_pool_forward(Stream stream, const BnPoolShape& shape, const void* z,
                     const BatchNormStatistics& statistics, void* y, uint32_t* codes);

// dy: the pooled gradient. The rest as in batch_norm_relu_backward, the workspace's size being that
// of batch_norm_workspace_bytes for norm().
void bn_pool_backward(Stream stream, const BnPoolShape& shape, bool training, const void* dy,
                      const void* z, const uint32_t* codes, const BatchNormAffine& affine,
                      const BatchNormStatistics& statistics, void* dz, void* dweight, void* dbias,
                      void* dconstant, void* workspace);

}  // namespace BRAZE_DEVICE
}  // namespace braze
