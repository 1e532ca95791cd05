#pragma once

#include "launchers/common/registry.h"
#include "launchers/common/types.h"

namespace braze {

// `rows` filters of `size` neighbouring elements each. Statistics are kept in float32 (float64 for
// float64 weights): "statistics dtype".
struct FiltersShape {
  DType dtype;   // of the weight, its gain and their gradients
  DType result;  // of y and dy: dtype, or of 16 bits for a float32 weight
  int64_t rows, size;
};

namespace BRAZE_DEVICE {

// y = (w - mean) rstd gain scale in each filter, where rstd = 1 / sqrt(biased variance + eps).
// gain, [rows], may be nullptr: 1. mean and rstd, [rows] in the statistics dtype, are results.
void weight_standardization(Stream stream, const FiltersShape& shape, const void* w,
                            const void* gain, double scale, double eps, void* y, void* mean,
                            void* rstd);

// With xhat = (w - mean) rstd: dgain = scale sum(dy xhat), and
//     dw = rstd gain scale (dy - (sum(dy) + xhat sum(dy xhat)) / size), sums over the filter.
// dw or dgain: nullptr where it is not wanted.
void weight_standardization_backward(Stream stream, const FiltersShape& shape, const void* dy,
                                     const void* w, const void* gain, double scale,
                                     const void* mean, const void* rstd, void* dw, void* dgain);

}  // namespace BRAZE_DEVICE
}  // namespace braze
