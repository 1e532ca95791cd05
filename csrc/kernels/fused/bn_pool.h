// Batch norm + ReLU + 2x2 max pool of a convolution's output z: what follows a convolution in a
// block. The normalised tensor never reaches memory: forward reads z for its statistics and once
// more for the pooled result; backward reads it for two sums per channel and once more for dz.
//
// With g the pooled gradient where ReLU lets it through, and xhat = (z - mean) rstd at the window's
// maximum, S1 = sum(g) and S2 = sum(g xhat) give
//     dbias = S1,  dweight = S2,
//     dz = weight rstd (dy - (S1 + xhat S2) / N)   in training,
//     dz = weight rstd dy                          in evaluation,
// dy being g at the maximum and 0 everywhere else.
#pragma once

#include "kernels/batch_norm/batch_norm.h"
#include "kernels/common/types.h"

namespace braze {

// Pooling with stride 2 and no padding: an odd extent's last row or column is in no window.
struct BnPoolShape {
  DType dtype;
  int64_t n, c, h, w;  // of z
  bool channels_last;  // layout of all 4-D tensors

  int64_t p() const { return h / 2; }
  int64_t q() const { return w / 2; }
  int64_t pooled() const { return n * c * p() * q(); }
  // 2x2 tiles that cover z, those that are cut off included.
  int64_t tiles() const { return n * c * ((h + 1) / 2) * ((w + 1) / 2); }
  BatchNormShape norm() const { return {dtype, n, c, h * w, channels_last}; }
};

// The kernels number tiles in 31 bits.
constexpr int64_t kBnPoolMostTiles = (int64_t{1} << 31) - 1;

// A 4-bit code per pooled element, in the order of the pooled tensor in memory, eight to a word,
// the first in the lowest bits: the position of the maximum in its window (0 to 3, in reading
// order), or 4 where ReLU stops the gradient.
inline int64_t bn_pool_code_words(const BnPoolShape& shape) { return ceil_div(shape.pooled(), 8); }

namespace BRAZE_DEVICE {

int64_t bn_pool_workspace_bytes(const BnPoolShape& shape);

// pooled() is at least 1 and tiles() at most kBnPoolMostTiles. y: the pooled result. mean, rstd:
// what z was normalised with, in the statistics dtype of batch_norm.h; `buffers` as there.
void bn_pool_forward(Stream stream, const BnPoolShape& shape, bool training, const void* z,
                     const BatchNormAffine& affine, const BatchNormBuffers& buffers, double eps,
                     void* y, uint32_t* codes, void* mean, void* rstd, void* workspace);

// dy: the pooled gradient. Results that are nullptr are left out; dweight and dbias have
// affine.dtype.
void bn_pool_backward(Stream stream, const BnPoolShape& shape, bool training, const void* dy,
                      const void* z, const uint32_t* codes, const BatchNormAffine& affine,
                      const void* mean, const void* rstd, void* dz, void* dweight, void* dbias,
                      void* workspace);

}  // namespace BRAZE_DEVICE
}  // namespace braze
