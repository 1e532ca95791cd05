// What rows of gradients add to the weight gradient of groups of a few channels and as many filters
// (depthwise_wgrad_in_place.h). A vector has whole groups. The gradients are rotated within each
// group's lanes, once for a column of the filter's taps: after as many rotations as a group has
// channels, each channel has met each filter.
//
// A few vectors' channels of the rows are copied first, side by side in memory: they are gone
// through many times, and pixels a power of two apart would share few sets of the first-level
// cache.
#pragma once

#include "cpu/conv2d/depthwise_in_place.h"

namespace braze::cpu {

template <typename Acc>
class GroupedWgradRows {
  using V = vec_t<Acc>;
  static constexpr int kL = kLanes<Acc>;
  static constexpr int kRotations = 4;   // at a time, of groups that have so many channels
  static constexpr int64_t kCopied = 4;  // vectors: lines that lie side by side

 public:
  // The copy's strides; its elements, of so many rows of gradients.
  static Tensor4dRef copied(const WeightGradient& g) {
    return {nullptr, 0, 1, g.w.extent * kL, kL};
  }
  static int64_t copied_size(const WeightGradient& g, int64_t rows) {
    return kCopied * (image_size(g, rows) + gradients_size(g, rows));
  }

  // tiles: of copied() strides. rows: at most, at a time.
  GroupedWgradRows(const WeightGradient& g, const ChannelVectors<Acc>& channels,
                   const InPlaceTiles& tiles, int64_t rows)
      : g_(g), channels_(channels), tiles_(tiles), width_(g.channels), rows_(rows) {
    for (int64_t r = 0; r < width_; ++r) {
      for (int64_t l = 0; l < kL; ++l) {
        rotations_[r][l] = static_cast<int>(l / width_ * width_ + (l + r) % width_);
      }
    }
  }

  // Rows [begin, end) of the gradients of an image. sums: [tap][rotation][channel].
  void add(int64_t image, int64_t begin, int64_t end, Acc* copy, Acc* sums) const {
    const std::vector<int64_t>& shifts = tiles_.h.shifts;
    if (shifts.empty()) return;
    const int64_t first = std::max<int64_t>(0, begin * tiles_.step_h + shifts.front());
    const int64_t last = std::min(g_.h.extent, (end - 1) * tiles_.step_h + shifts.back() + 1);
    const int64_t x_size = image_size(g_, rows_), dy_size = gradients_size(g_, rows_);
    Acc* const gradients = copy + kCopied * x_size;
    for (int64_t v = 0; v < channels_.count(); v += kCopied) {
      const int64_t count = std::min(kCopied, channels_.count() - v);
      copy_rows(g_.x, image, v, count, first, last, g_.w.extent, copy, x_size);
      copy_rows(g_.dy, image, v, count, begin, end, g_.w.out, gradients, dy_size);
      for (int64_t k = 0; k < count; ++k) {
        const Acc* const x = copy + k * x_size - first * g_.w.extent * kL;
        const Acc* const dy = gradients + k * dy_size - begin * g_.w.out * kL;
        for (int64_t i = begin; i < end;) {
          const auto taps = tiles_.taps_of_row(i);
          int64_t rows = 1;  // that meet the same taps
          while (i + rows < end && tiles_.taps_of_row(i + rows) == taps) ++rows;
          add_rows({taps.first, (taps.second - taps.first) / tiles_.across(), rows,
                    x + i * tiles_.step_h * g_.w.extent * kL, dy + i * g_.w.out * kL},
                   sums + (v + k) * kL);
          i += rows;
        }
      }
    }
  }

 private:
  static int64_t image_size(const WeightGradient& g, int64_t rows) {
    return std::min(g.h.extent, TapShifts::reach(g.h, rows)) * g.w.extent * kL;
  }

  static int64_t gradients_size(const WeightGradient& g, int64_t rows) {
    return rows * g.w.out * kL;
  }

  // Rows [first, last) of `count` vectors of an image from `vector` on, each to its own `size`
  // elements.
  void copy_rows(const Tensor4dRef& from, int64_t image, int64_t vector, int64_t count,
                 int64_t first, int64_t last, int64_t pixels, Acc* to, int64_t size) const {
    int64_t channel[kCopied];
    for (int64_t k = 0; k < count; ++k) channel[k] = channels_.begin(vector + k);
    for (int64_t i = first; i < last; ++i) {
      const Acc* pixel = static_cast<const Acc*>(from.data) + image * from.n + i * from.h;
      for (int64_t j = 0; j < pixels; ++j, pixel += from.w, to += kL) {
        for (int64_t k = 0; k < count; ++k) store(to + k * size, load<V>(pixel + channel[k]));
      }
    }
  }

  // Copied rows of gradients that meet the same rows of taps, `count` from tap `first` on. x: where
  // the first of them would meet a shift of 0; it may be outside.
  struct Rows {
    int64_t first, count, rows;
    const Acc *x, *dy;
  };

  void add_rows(const Rows& rows, Acc* sums) const {
    constexpr int64_t kTaps = 3;
    const int64_t across = tiles_.across();
    for (const InPlaceTile& tile : tiles_.tiles) {
      for (int64_t s = 0; s < across; ++s) {  // the taps of a column all meet the same gradients
        for (int64_t t = 0; t < rows.count; t += kTaps) {
          const InPlaceTap* const taps = tile.taps.data() + rows.first + t * across + s;
          if (rows.count - t >= 3) {
            add_taps<3>(rows, tile, taps, sums);
          } else if (rows.count - t == 2) {
            add_taps<2>(rows, tile, taps, sums);
          } else {
            add_taps<1>(rows, tile, taps, sums);
          }
        }
      }
    }
  }

  template <int kTaps>
  void add_taps(const Rows& rows, const InPlaceTile& tile, const InPlaceTap* taps,
                Acc* sums) const {
    if (taps->begin >= taps->end) return;
    for (int64_t r = 0; r < width_; r += kRotations) {
      if (width_ < kRotations) {
        add_rotated<kTaps, 2>(rows, tile, taps, r, sums);
      } else {
        add_rotated<kTaps, kRotations>(rows, tile, taps, r, sums);
      }
    }
  }

  // Gradients rotated by `rotation` and the kCount - 1 after that, at a column's taps.
  template <int kTaps, int kCount>
  __attribute__((noinline)) void add_rotated(const Rows& rows, const InPlaceTile& tile,
                                             const InPlaceTap* taps, int64_t rotation,
                                             Acc* sums) const {
    const int64_t across = tiles_.across(), pitch = channels_.pitch();
    const int64_t step = tiles_.step_w * kL, begin = taps->begin, end = taps->end;
    int64_t source[kTaps];
    V sum[kCount][kTaps] = {};
#pragma GCC unroll 4
    for (int t = 0; t < kTaps; ++t) source[t] = taps[t * across].source;
    const Acc* row_x = rows.x + tile.first * step + begin * step;
    const Acc* row_dy = rows.dy + (tile.first + begin) * kL;
    const index_t<Acc>* const rotations = rotations_ + rotation;
    for (int64_t row = 0; row < rows.rows; ++row) {
      const Acc *x = row_x, *dy = row_dy;
      for (int64_t i = begin; i < end; ++i, x += step, dy += kL) {
        const V gradient = load<V>(dy);
#pragma GCC unroll 4
        for (int r = 0; r < kCount; ++r) {
          const V rotated = __builtin_shuffle(gradient, rotations[r]);
#pragma GCC unroll 4
          for (int t = 0; t < kTaps; ++t) sum[r][t] += rotated * load<V>(x + source[t]);
        }
      }
      row_x += tiles_.step_h * g_.w.extent * kL, row_dy += g_.w.out * kL;
    }
#pragma GCC unroll 4
    for (int t = 0; t < kTaps; ++t) {
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        Acc* const to = sums + taps[t * across].weight + (rotation + r) * pitch;
        store(to, load<V>(to) + sum[r][t]);
      }
    }
  }

  const WeightGradient& g_;
  const ChannelVectors<Acc>& channels_;
  const InPlaceTiles& tiles_;
  const int64_t width_;  // channels of a group
  const int64_t rows_;
  index_t<Acc> rotations_[kL];
};

}  // namespace braze::cpu
