// Which pixels of a 1 x 1 convolution can be taken one after the other.
#pragma once

#include "cpu/conv2d/passes.h"

namespace braze::cpu {

// Pixels that are evenly spaced in the tensor that the filter is moved over (`from`) and in the
// other one (`to`): rows of an image, whole images or the whole batch, whichever is the longest.
// There are images * rows runs of them.
struct PixelRuns {
  PixelRuns(int64_t images, const Axis& h, const Axis& w, const Tensor4dRef& from,
            const Tensor4dRef& to)
      : images(images), rows(h.out), length(w.out), from(w.step * from.w), to(to.w) {
    if (rows != 1 && (h.step * from.h != length * this->from || to.h != length * this->to)) return;
    length *= rows;
    rows = 1;
    if (images != 1 && (from.n != length * this->from || to.n != length * this->to)) return;
    length *= images;
    this->images = 1;
  }
  int64_t count() const { return images * rows; }

  int64_t images, rows, length;
  int64_t from, to;  // elements from pixel to pixel
};

// Whether every output position meets a source position, and no padding.
inline bool stays_inside(const Axis& axis) {
  const int64_t last = (axis.out - 1 + axis.first) * axis.step + axis.phases[0];
  return axis.first >= 0 && last < axis.extent;
}

// The element that the filter meets at output position (0, 0), from the image's first.
inline int64_t first_pixel(const Axis& h, const Axis& w, const Tensor4dRef& from) {
  return (h.first * h.step + h.phases[0]) * from.h + (w.first * w.step + w.phases[0]) * from.w;
}

}  // namespace braze::cpu
