// What the ops on a convolution's input patches (launchers/conv_bn_relu_max_pool2d.h) have in
// common.
#pragma once

#include "launchers/conv_bn_relu_max_pool2d.h"
#include "ops/common.h"

namespace braze {

// The patches of a 4-D input for r x s filters; k is left to the caller.
inline SmallKShape patches_of(const Tensor& x, DType dtype, int64_t r, int64_t s, int64_t pad_h,
                              int64_t pad_w) {
  SmallKShape a{};
  a.dtype = dtype;
  a.n = x.size(0), a.c = x.size(1), a.h = x.size(2), a.w = x.size(3);
  a.x_n = x.stride(0), a.x_c = x.stride(1), a.x_h = x.stride(2), a.x_w = x.stride(3);
  a.r = r, a.s = s, a.pad_h = pad_h, a.pad_w = pad_w;
  a.p = a.h + 2 * pad_h - r + 1, a.q = a.w + 2 * pad_w - s + 1;
  return a;
}

// Doubles of one batch's moments.
inline int64_t moments_size(const SmallKShape& patches) {
  return kSmallKMostSets * small_k_moments(patches);
}

// groups: of batches whose moments lie one behind the other, in a dimension in front; 0: one batch,
// without that dimension.
inline void check_moments(const char* op, const Tensor& moments, const SmallKShape& patches,
                          const Tensor& input, int64_t groups = 0) {
  check_same_device(op, "moments", moments, "input", input);
  const int64_t at = groups > 0;
  BRAZE_CHECK(moments.scalar_type() == ScalarType::Double && moments.is_contiguous() &&
                  moments.dim() == at + 2 && moments.size(at) == kSmallKMostSets &&
                  moments.size(at + 1) == small_k_moments(patches),
              op, ": expected contiguous float64 moments of shape [", kSmallKMostSets, ", ",
              small_k_moments(patches), "], but got ", scalar_type_name(moments.scalar_type()), " ",
              shape_string(moments));
}

}  // namespace braze
