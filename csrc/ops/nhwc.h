// Images in NHWC order whose channels may be some of another tensor's.
#pragma once

#include "ops/common.h"

namespace braze {
namespace {

// How many elements lie between pixels that follow each other, of a tensor in NHWC order whose
// channels may be some of another tensor's; 0 where the order is another one.
int64_t pixel_stride(const Tensor& t) {
  const int64_t n = t.size(0), c = t.size(1), h = t.size(2), w = t.size(3);
  const int64_t step = w > 1 ? t.stride(3) : h > 1 ? t.stride(2) : n > 1 ? t.stride(0) : c;
  const bool fits = step >= c && (c == 1 || t.stride(1) == 1) &&
                    (h == 1 || t.stride(2) == w * step) && (n == 1 || t.stride(0) == h * w * step);
  return fits ? step : 0;
}

Tensor as_nhwc(const Tensor& t) {
  if (pixel_stride(t) > 0) return t;
  Tensor copy = empty_4d(sizes_of(t), t, true);
  torch::stable::copy_(copy, t);
  return copy;
}

}  // namespace
}  // namespace braze
