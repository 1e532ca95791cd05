// Windows that lie side by side: how their elements lie in an image and in the rows of a matrix,
// whose order is that of a filter's weights.
#pragma once

#include "launchers/conv2d.h"

namespace braze {

inline int64_t weights_of_filter(const Conv2dShape& s) { return s.r * s.s * s.c; }

inline bool weights_lie_channels_last(const Conv2dShape& s, const Tensor4dRef& w) {
  return w.c == 1 && w.w == s.c && w.h == s.s * s.c && w.n == weights_of_filter(s);
}
inline bool weights_lie_contiguous(const Conv2dShape& s, const Tensor4dRef& w) {
  return w.w == 1 && w.h == s.s && w.c == s.r * s.s && w.n == weights_of_filter(s);
}

inline bool lie_side_by_side(const Conv2dShape& s) {
  const bool apart = (s.stride_h == s.r || s.p == 1) && (s.stride_w == s.s || s.q == 1);
  return apart && s.r * s.s > 1 && s.pad_h == 0 && s.pad_w == 0 && s.dilation_h == 1 &&
         s.dilation_w == 1 && s.groups == 1;
}

// Why windows are no patches that a product of matrices takes, or nullptr.
inline const char* patches_obstacle(Conv2dPass pass, const Conv2dShape& s, const Tensor4dRef& w) {
  if (!lie_side_by_side(s)) {
    return "patches takes filters as large as the stride, no padding, no dilation, one group";
  }
  if (!weights_lie_channels_last(s, w) && !weights_lie_contiguous(s, w)) {
    return "patches takes dense weights";
  }
  if (pass == Conv2dPass::kDgrad && (s.h != s.p * s.r || s.w != s.q * s.s)) {
    return "patches takes input gradients of whole patches";
  }
  return nullptr;
}

// Whether images of a single patch are the matrix as they are.
inline bool images_are_patches(const Conv2dShape& s, const Tensor4dRef& x, const Tensor4dRef& w) {
  if (s.h != s.r || s.w != s.s || x.n != weights_of_filter(s)) return false;
  return weights_lie_channels_last(s, w) ? x.c == 1 && x.w == s.c && x.h == s.s * s.c
                                         : x.w == 1 && x.h == s.s && x.c == s.r * s.s;
}

// A patch's dimensions in the order of a row, the outermost first: as many elements, so far apart
// in the image.
struct PatchExtent {
  int64_t count, stride;
};
struct PatchExtents {
  PatchExtent outer, middle, inner;
};
inline PatchExtents patch_extents(const Conv2dShape& s, const Tensor4dRef& x,
                                  const Tensor4dRef& w) {
  if (!weights_lie_channels_last(s, w)) return {{s.c, x.c}, {s.r, x.h}, {s.s, x.w}};
  if (x.c == 1 && x.w == s.c) return {{1, 0}, {s.r, x.h}, {s.s * s.c, 1}};
  return {{s.r, x.h}, {s.s, x.w}, {s.c, x.c}};
}

// The 1 x 1 convolution of patches at `matrix`, `row` elements apart.
inline Conv2dShape shape_of_patches(Conv2dShape s, int64_t row) {
  s.c = row, s.h = s.p, s.w = s.q;
  s.r = s.s = s.stride_h = s.stride_w = 1;
  return s;
}
inline Tensor4dRef patches_at(const Conv2dShape& s, const void* matrix, int64_t row) {
  return {matrix, s.p * s.q * row, 1, s.q * row, row};
}

}  // namespace braze
