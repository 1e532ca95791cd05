// Patches of some output pixels as rows of a matrix in the cache: [pixel][tap][channel]. The part
// of the image that they meet is first copied into a slab, zero-padded and with channels adjacent,
// whatever the image's layout; a patch is then a few runs of the slab, for adjacent taps one.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

#include "cpu/common/simd.h"
#include "cpu/conv2d/window.h"
#include "cpu/matmul/dot_bf16.h"
#include "cpu/matmul/gemm.h"

namespace braze::cpu {

// Where the taps of one dimension lie: tap t meets position i * step + shift(t).
class TapShifts {
 public:
  explicit TapShifts(const Axis& axis) : order(axis.taps()) {
    std::iota(order.begin(), order.end(), int64_t{0});
    const auto shift = [&](int64_t t) {
      return (axis.first + axis.offset_of(t)) * axis.step + axis.phases[axis.phase_of(t)];
    };
    std::sort(order.begin(), order.end(),
              [&](int64_t a, int64_t b) { return shift(a) < shift(b); });
    for (const int64_t t : order) shifts.push_back(shift(t));
  }
  int64_t first() const { return shifts.empty() ? 0 : shifts.front(); }
  // From the first to the last of the positions that `outputs` output positions in a row meet.
  static int64_t reach(const Axis& axis, int64_t outputs) {
    const TapShifts taps(axis);
    return taps.shifts.empty() ? 0
                               : (outputs - 1) * axis.step + taps.shifts.back() - taps.first() + 1;
  }

  // Whether one of `outputs` output positions meets the position that is so far behind the first.
  // Dilated taps leave some out.
  bool meets(const Axis& axis, int64_t position, int64_t outputs) const {
    return std::any_of(shifts.begin(), shifts.end(), [&](int64_t shift) {
      const int64_t from = position - (shift - first());
      return from >= 0 && from % axis.step == 0 && from / axis.step < outputs;
    });
  }

  // Of the taps by their shifts those that meet a position of the axis' source at one of outputs
  // [first, last]: [begin, end). The others meet padding alone.
  struct Range {
    int64_t begin, end;
  };
  Range inside(const Axis& axis, int64_t first, int64_t last) const {
    const auto is_inside = [&](int64_t shift) {
      return last * axis.step + shift >= 0 && first * axis.step + shift < axis.extent;
    };
    const auto begin = std::find_if(shifts.begin(), shifts.end(), is_inside);
    const auto end = std::find_if_not(begin, shifts.end(), is_inside);
    return {begin - shifts.begin(), end - shifts.begin()};
  }

  std::vector<int64_t> order, shifts;  // taps by their shifts
};

// `channels` of some pixels in a row, of a tensor of those strides, to rows `ld` apart.
// Element: T, or what T accumulates in.
template <typename T, typename Element>
void copy_pixels(Element* to, int64_t ld, const T* from, const Tensor4dRef& strides, int64_t pixels,
                 int64_t channels) {
  const int64_t stride = strides.w, between = strides.c;
  if constexpr (std::is_same_v<Element, acc_t<T>>) {
    copy_matrix(to, ld, from, stride, between, pixels, channels);
  } else if (between == 1 && stride == channels && ld == channels) {
    std::memcpy(&to->bits, &from->bits, pixels * channels * sizeof(T));
  } else if (channels % 2 == 0 && ld % 2 == 0) {
    copy_pairs(reinterpret_cast<uint32_t*>(to), ld / 2, reinterpret_cast<const uint16_t*>(from),
               stride, between, pixels, channels);
  } else {
    for (int64_t i = 0; i < pixels; ++i) {
      for (int64_t c = 0; c < channels; ++c) to[i * ld + c] = from[i * stride + c * between];
    }
  }
}

// Element: T, or what T accumulates in.
template <typename T, typename Element>
class Patches {
 public:
  // Elements that a copy may write behind what it was asked for.
  static constexpr int64_t kSlack = kVecBytes / sizeof(Element);

  // `channels` of an image with those strides.
  Patches(const Axis& h, const Axis& w, const Tensor4dRef& strides, int64_t channels)
      : taps_h(h),
        taps_w(w),
        h_(h),
        w_(w),
        strides_(strides),
        channels_(channels),
        width_(TapShifts::reach(w, w.out)) {
    for (const int64_t offset : tap_offsets()) {
      if (!runs_.empty() && runs_.back().offset + runs_.back().length == offset) {
        runs_.back().length += channels;
      } else {
        runs_.push_back({offset, channels});
      }
    }
  }
  int64_t depth() const {
    return static_cast<int64_t>(taps_h.shifts.size() * taps_w.shifts.size()) * channels_;
  }

  // Of a slab for `pixels` output pixels in a row, at most.
  static int64_t slab_size(const Axis& h, const Axis& w, int64_t channels, int64_t pixels) {
    const int64_t rows = std::min(h.out, ceil_div(pixels, w.out) + 1);
    return TapShifts::reach(h, rows) * TapShifts::reach(w, w.out) * channels + kSlack;
  }

  // Rows of output, all of them or a half, a quarter, ..., that fill `most` elements of their slab
  // at most; one row where none do.
  static int64_t rows_within(const Axis& h, const Axis& w, int64_t channels, int64_t most) {
    const TapShifts taps(h);
    const int64_t row_size = TapShifts::reach(w, w.out) * channels;
    const auto filled = [&](int64_t rows) {
      const int64_t reach = TapShifts::reach(h, rows);
      int64_t count = 0;
      for (int64_t i = 0; i < reach; ++i) count += taps.meets(h, i, rows);
      return count * row_size;
    };
    int64_t rows = h.out;
    while (rows > 1 && filled(rows) > most) rows = ceil_div(rows, 2);
    return rows;
  }

  // Fills a slab with what pixels [begin, end) of an image at `src` meet. It is written up to
  // kSlack beyond its end.
  void fill(Element* slab, const T* src, int64_t begin, int64_t end) const {
    if (!runs_.empty() && begin < end) {
      fill_rows(slab, src, begin / w_.out, (end - 1) / w_.out + 1);
    }
  }

  // The patches of those pixels, of which the slab was filled, to rows at `to`, `ld` apart, written
  // up to kSlack beyond their ends; where the depth is odd, the element behind it is zero.
  void copy(const Element* slab, int64_t begin, int64_t end, Element* to, int64_t ld) const {
    if (runs_.empty()) return;
    const int64_t depth_here = depth();
    int64_t i = 0, j = begin % w_.out;
    for (int64_t pixel = begin; pixel < end; ++pixel, to += ld) {
      const Element* const window = slab + row_offset(i) + j * w_.step * channels_;
      Element* out = to;
      for (const Run& run : runs_) {
        copy_run(out, window + run.offset, run.length);
        out += run.length;
      }
      if (depth_here % 2) to[depth_here] = Element(0.0f);
      if (++j == w_.out) j = 0, ++i;
    }
  }

  // The patches of pixels of 16 bits by twos, of which the slab was filled: rows at `to`, `ld`
  // apart, of elements of one patch, and above them those of the next one, which are zeros behind
  // the last. Zeros from the depth on to `width`.
  void copy_pairs(const Element* slab, int64_t begin, int64_t end, uint32_t* to, int64_t ld,
                  int64_t width) const {
    static_assert(sizeof(Element) == sizeof(uint16_t));
    const int64_t depth_here = depth();
    const auto window = [&](int64_t pixel) {
      const int64_t i = pixel / w_.out - begin / w_.out, j = pixel % w_.out;
      return reinterpret_cast<const uint16_t*>(slab + row_offset(i) + j * w_.step * channels_);
    };
    for (int64_t pixel = begin; pixel < end; pixel += 2, to += ld) {
      const uint16_t* const low = window(pixel);
      const uint16_t* const high = pixel + 1 < end ? window(pixel + 1) : nullptr;
      uint32_t* out = to;
      for (const Run& run : runs_) {
        if (high) {
          pair_up(out, low + run.offset, high + run.offset, run.length);
        } else {
          std::copy_n(low + run.offset, run.length, out);
        }
        out += run.length;
      }
      std::fill(to + depth_here, to + width, 0u);
    }
  }

  // Of the slab: where the window of row i's first pixel begins, and where taps are from there.
  int64_t row_offset(int64_t i) const { return i * h_.step * width_ * channels_; }
  std::vector<int64_t> tap_offsets() const {
    std::vector<int64_t> offsets;
    for (const int64_t y : taps_h.shifts) {
      for (const int64_t x : taps_w.shifts) {
        offsets.push_back(((y - taps_h.first()) * width_ + x - taps_w.first()) * channels_);
      }
    }
    return offsets;
  }

  // What adjoins of a window, and how far it is from the window's first element.
  struct Run {
    int64_t offset, length;
  };
  const std::vector<Run>& runs() const { return runs_; }

  const TapShifts taps_h, taps_w;

 private:
  // Short ones in whole vectors: what follows is written later, or is slack.
  static void copy_run(Element* to, const Element* from, int64_t length) {
    char* const out = reinterpret_cast<char*>(to);
    const char* const in = reinterpret_cast<const char*>(from);
    const int64_t bytes = length * int64_t{sizeof(Element)};
    if (bytes > 2 * kVecBytes) {
      std::memcpy(out, in, bytes);
      return;
    }
    std::memcpy(out, in, kVecBytes);
    if (bytes > kVecBytes) std::memcpy(out + kVecBytes, in + kVecBytes, kVecBytes);
  }

  // The positions that rows [first, last) of the output meet.
  void fill_rows(Element* slab, const T* src, int64_t first, int64_t last) const {
    const int64_t rows = (last - first - 1) * h_.step + taps_h.shifts.back() - taps_h.first() + 1;
    const int64_t left = std::clamp<int64_t>(-taps_w.first(), 0, width_);
    const int64_t right = std::clamp<int64_t>(w_.extent - taps_w.first(), left, width_);
    for (int64_t row = 0; row < rows; ++row, slab += width_ * channels_) {
      if (!taps_h.meets(h_, row, last - first)) continue;
      const int64_t y = first * h_.step + taps_h.first() + row;
      const bool inside = y >= 0 && y < h_.extent;
      const int64_t begin = inside ? left : width_, end = inside ? right : width_;
      std::fill_n(slab, begin * channels_, Element(0.0f));
      std::fill_n(slab + end * channels_, (width_ - end) * channels_, Element(0.0f));
      if (begin == end) continue;
      copy_pixels(slab + begin * channels_, channels_,
                  src + y * strides_.h + (taps_w.first() + begin) * strides_.w, strides_,
                  end - begin, channels_);
    }
  }

  const Axis& h_;
  const Axis& w_;
  const Tensor4dRef& strides_;
  const int64_t channels_;
  const int64_t width_;  // of the slab, in pixels
  std::vector<Run> runs_;
};

}  // namespace braze::cpu
