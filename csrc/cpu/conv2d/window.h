// The part of an image that a task works on, copied into a "slab": zero-padded, in the accumulation
// type, and cut into stride phases, so that every tap of the filter sees it as a shifted window
// with unit steps. A row of the implicit im2col matrix is then a run of the slab, wherever it
// starts, and no patch is ever stored.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/common/copy_matrix.h"
#include "launchers/conv2d.h"

namespace braze::cpu {

// One spatial dimension: output position i and tap t meet source position i * step + shift[t],
// which is (i + start[t]) * step + phase, outside of [0, extent) a zero.
class Axis {
 public:
  Axis(int64_t out, int64_t step, int64_t extent, const std::vector<int64_t>& shifts)
      : out(out), step(step), extent(extent) {
    for (const int64_t shift : shifts) {
      const int64_t remainder = ((shift % step) + step) % step;
      start_.push_back((shift - remainder) / step);
      const auto found = std::find(phases.begin(), phases.end(), remainder);
      phase_.push_back(found - phases.begin());
      if (found == phases.end()) phases.push_back(remainder);
    }
    if (shifts.empty()) return;
    first = *std::min_element(start_.begin(), start_.end());
    halo = *std::max_element(start_.begin(), start_.end()) - first;
  }
  int64_t taps() const { return static_cast<int64_t>(start_.size()); }
  int64_t phase_of(int64_t tap) const { return phase_[tap]; }           // index into `phases`
  int64_t offset_of(int64_t tap) const { return start_[tap] - first; }  // from the slab's start

  int64_t out, step, extent;
  int64_t first = 0;  // the slab starts that many steps from output position 0
  int64_t halo = 0;   // and is that much longer than the run of output positions
  std::vector<int64_t> phases;

 private:
  std::vector<int64_t> start_, phase_;
};

// Extents of a slab for `rows` rows of output. Pixels are numbered phase by phase, row by row.
struct SlabShape {
  SlabShape(const Axis& h, const Axis& w, int64_t rows)
      : rows(rows + h.halo),
        pitch(w.out + w.halo),
        phases_h(h.phases.size()),
        phases_w(w.phases.size()) {}
  int64_t pixels() const { return phases_h * phases_w * rows * pitch; }
  // The pixel that tap (th, tw) meets at output position (0, 0).
  int64_t pixel_of(const Axis& h, int64_t th, const Axis& w, int64_t tw) const {
    const int64_t plane = h.phase_of(th) * phases_w + w.phase_of(tw);
    return (plane * rows + h.offset_of(th)) * pitch + w.offset_of(tw);
  }

  int64_t rows, pitch, phases_h, phases_w;
};

// Fills a slab from `channels` channels of the image at src (strides s), for output rows from
// first_row on. Channel-major: pixel p of channel c at c * pixels() + p. Pixel-major: at
// p * channel_pitch + c.
template <typename T>
void fill_slab(acc_t<T>* slab, const SlabShape& shape, const Axis& h, const Axis& w, const T* src,
               const Tensor4dRef& s, int64_t channels, int64_t first_row, int64_t channel_pitch) {
  const bool pixel_major = channel_pitch > 0;
  const int64_t lanes = pixel_major ? channel_pitch : channels;
  std::memset(slab, 0, shape.pixels() * lanes * sizeof(acc_t<T>));
  for (int64_t ph = 0; ph < shape.phases_h; ++ph) {
    for (int64_t row = 0; row < shape.rows; ++row) {
      const int64_t y = (first_row + row + h.first) * h.step + h.phases[ph];
      if (y < 0 || y >= h.extent) continue;
      for (int64_t pw = 0; pw < shape.phases_w; ++pw) {
        const int64_t phase = w.phases[pw];
        const int64_t available = w.extent > phase ? ceil_div(w.extent - phase, w.step) : 0;
        const int64_t begin = std::max<int64_t>(0, -w.first);
        const int64_t count = std::min(shape.pitch, available - w.first) - begin;
        if (count <= 0) continue;
        const int64_t pixel = ((ph * shape.phases_w + pw) * shape.rows + row) * shape.pitch + begin;
        const T* from = src + y * s.h + ((begin + w.first) * w.step + phase) * s.w;
        if (pixel_major) {
          copy_matrix(slab + pixel * channel_pitch, channel_pitch, from, w.step * s.w, s.c, count,
                      channels);
        } else {
          copy_matrix(slab + pixel, shape.pixels(), from, s.c, w.step * s.w, channels, count);
        }
      }
    }
  }
}

}  // namespace braze::cpu
