#pragma once

#include "launchers/batch_norm.h"
#include "launchers/common/registry.h"
#include "launchers/common/row_shape.h"
#include "launchers/common/types.h"

namespace braze {

// `rows` rows of `size` neighbouring elements, each normalised by itself. Statistics are kept in
// float32 (float64 for float64 input): "statistics dtype".
struct LayerNormShape {
  DType dtype;  // of x and dx
  // Of y and dy: dtype, or float32 for a 16-bit x, or of 16 bits for a float32 x.
  DType result;
  int64_t rows, size;
  // Above 1: x is [rows / inner, size, inner] in memory, as are the channels of contiguous images.
  int64_t inner = 1;

  int64_t count() const { return rows * size; }
};

// Gradients of layer_norm_backward; nullptr: not wanted. weight and bias, [size], have the dtype
// that goes with the parameters.
struct LayerNormGradients {
  void* x;
  void* weight;
  void* bias;
  DType parameter_dtype;
};

namespace BRAZE_DEVICE {

// Whether layer_norm takes rows of x that are strided by `inner`; layer_norm_backward does not.
bool layer_norm_takes(const LayerNormShape& shape, int64_t inner);

// y = (x - mean) rstd weight + bias, where rstd = 1 / sqrt(biased variance + eps). Parameters are
// [size] each, of dtype or float32, or nullptr. mean and rstd, [rows] in the statistics dtype, are
// results.
void layer_norm(Stream stream, const LayerNormShape& shape, const void* x,
                const BatchNormAffine& affine, double eps, void* y, void* mean, void* rstd);

int64_t layer_norm_workspace_bytes(const LayerNormShape& shape);

// With xhat = (x - mean) rstd and g = dy weight:
//     dweight = sum(dy xhat), dbias = sum(dy) over the rows,
//     dx = rstd (g - (sum(g) + xhat sum(g xhat)) / size), sums along the row.
// affine.bias is not read. The workspace is for the parameters' gradients.
void layer_norm_backward(Stream stream, const LayerNormShape& shape, const void* dy, const void* x,
                         const BatchNormAffine& affine, const void* mean, const void* rstd,
                         const LayerNormGradients& gradients, void* workspace);

}  // namespace BRAZE_DEVICE
}  // namespace braze
