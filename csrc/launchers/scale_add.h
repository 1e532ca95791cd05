#pragma once

#include "launchers/common/types.h"

namespace braze {

// Tensors [outer, channels, inner] in memory: inner is 1 for channels_last and for channels that
// are the last dimension.
struct ScaleAddShape {
  DType dtype;     // of x and dx
  DType result;    // of y and dy: dtype, or float32 where that has 16 bits
  DType residual;  // dtype or result
  DType scale;     // likewise; dscale's too
  int64_t outer, channels, inner;

  int64_t count() const { return outer * channels * inner; }
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// y = residual + scale[c] * x, rounded once. Of at least one element, as below.
void scale_add(Stream stream, const ScaleAddShape& shape, const void* x, const void* scale,
               const void* residual, void* y);

// dx = dy * scale[c] and dscale[c] = sum of dy * x, either of them nullptr if it is not wanted.
void scale_add_backward(Stream stream, const ScaleAddShape& shape, const void* dy, const void* x,
                        const void* scale, void* dx, void* dscale, void* workspace);
int64_t scale_add_workspace_bytes(const ScaleAddShape& shape);

}  // namespace braze::BRAZE_DEVICE
