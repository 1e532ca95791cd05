// Winograd's minimal filtering for 3 x 3 filters of stride 1, F(2 x 2, 3 x 3) of A. Lavin and
// S. Gray, "Fast algorithms for convolutional neural networks" (2015): a tile of 2 x 2 results is
// made from one of 4 x 4 inputs by 16 multiplications instead of 36. For each of the 16 positions
// tiles x filters = tiles x channels * channels x filters is a product of its own.
//
// Sums of transformed values turn an infinity or a NaN in one input into one in all results of the
// tile, and overflow earlier. A finite result is right; an image with a result that is not finite
// is done again by convolve.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/conv2d/convolve.h"
#include "cpu/conv2d/store.h"

namespace braze::cpu {

// Lengths of a tile's side: inputs, results, and the positions of a transformed tile.
constexpr int64_t kTileIn = 4, kTileOut = 2, kPositions = kTileIn * kTileIn;

// B'dB: columns, then rows. `at(i, j)` gives the vector at row i, column j of the tile; `put` takes
// that at each position.
template <typename V, typename At, typename Put>
inline void transform_input(const At& at, const Put& put) {
  V half[kTileIn][kTileIn];
#pragma GCC unroll 4
  for (int j = 0; j < kTileIn; ++j) {
    const V d0 = at(0, j), d1 = at(1, j), d2 = at(2, j), d3 = at(3, j);
    half[0][j] = d0 - d2, half[1][j] = d1 + d2, half[2][j] = d2 - d1, half[3][j] = d1 - d3;
  }
#pragma GCC unroll 4
  for (int i = 0; i < kTileIn; ++i) {
    const V* d = half[i];
    put(kTileIn * i, d[0] - d[2]), put(kTileIn * i + 1, d[1] + d[2]);
    put(kTileIn * i + 2, d[2] - d[1]), put(kTileIn * i + 3, d[1] - d[3]);
  }
}

// One dimension of a convolution in tiles.
struct TileAxis {
  explicit TileAxis(const Axis& axis) : tiles(ceil_div(axis.out, kTileOut)), axis(axis) {}
  // The source positions of tiles [first, first + count).
  Axis window(int64_t first, int64_t count) const {
    const int64_t start = axis.first + first * kTileOut;
    return Axis(count * kTileOut, 1, axis.extent, {start, start + 1, start + 2});
  }

  int64_t tiles;
  const Axis& axis;
};

// Windows of kSide x kSide pixels, kTileOut apart, side by side from (y, x) on, of a channels_last
// image with whole vectors of channels: read where they lie, without a slab.
template <int kSide, typename Acc>
class Windows {
 public:
  // zeros: as many as a pixel has channels, for what is outside.
  Windows(const Acc* image, const Tensor4dRef& strides, int64_t height, int64_t width, int64_t y,
          int64_t x, const Acc* zeros)
      : image_(image),
        down_(strides.h),
        right_(strides.w),
        height_(height),
        width_(width),
        y_(y),
        x_(x),
        zeros_(zeros) {}

  // f(at): at(i, j) points to the channels of pixel (i, j) of that window.
  template <typename F>
  void operator()(int64_t window, const F& f) const {
    const int64_t x = x_ + window * kTileOut;
    const Acc* const corner = image_ + y_ * down_ + x * right_;
    if (y_ >= 0 && y_ + kSide <= height_ && x >= 0 && x + kSide <= width_) {
      return f([&](int i, int j) { return corner + i * down_ + j * right_; });
    }
    const Acc* pixels[kSide][kSide];
    for (int i = 0; i < kSide; ++i) {
      const bool has_row = y_ + i >= 0 && y_ + i < height_;
      for (int j = 0; j < kSide; ++j) {
        const bool is_inside = has_row && x + j >= 0 && x + j < width_;
        pixels[i][j] = is_inside ? corner + i * down_ + j * right_ : zeros_;
      }
    }
    f([&](int i, int j) { return pixels[i][j]; });
  }

 private:
  const Acc* image_;
  int64_t down_, right_, height_, width_, y_, x_;
  const Acc* zeros_;
};

// Whether Windows can read a tensor of T with these strides.
template <typename T>
inline bool is_read_in_place(const Tensor4dRef& strides, int64_t channels) {
  return std::is_same_v<T, acc_t<T>> && strides.c == 1 && channels % kLanes<acc_t<T>> == 0;
}

template <typename Acc>
struct WinogradPlan {
  static constexpr int kL = kLanes<Acc>, kPanel = 2 * kL;
  // Transformed inputs of a task, of all positions: 1 MiB of fp32 at most, unless these are fewer
  // tiles than make use of a weight that has been loaded.
  static constexpr int64_t kElements = 12288, kLeastTiles = 2 * kMostPixels, kMostTiles = 140;

  explicit WinogradPlan(const Convolution& conv)
      : tile_rows(ceil_div(conv.h.out, kTileOut)),
        tile_columns(ceil_div(conv.w.out, kTileOut)),
        packed_filters(round_up(conv.filters, kL)),
        packed_size(packed_filters * conv.channels),
        pitch(round_up(conv.channels, kL)),
        ld(pitch % 64 == 0 ? pitch + kL : pitch) {
    const int64_t tiles =
        std::clamp(kElements / std::max<int64_t>(1, conv.channels), kLeastTiles, kMostTiles);
    columns = ceil_div(tile_columns, ceil_div(tile_columns, tiles));
    blocks = ceil_div(tile_columns, columns);
    together = std::max<int64_t>(1, tiles / columns);
    while (num_threads() > 1 && tasks(conv) < 4 * num_threads() &&
           together * columns > kLeastTiles && together > 1) {
      together = ceil_div(together, 2);
    }
    position_size = together * columns * ld + kL;
    slab_size = kTileIn * (columns * kTileOut + 2) * pitch;
    sums_size = together * columns * kPanel + kL;
    results_size = kTileOut * kTileOut * columns * kPanel;
  }
  // Segments: `columns` tiles side by side.
  int64_t segments(const Convolution& conv) const { return conv.images * tile_rows * blocks; }
  int64_t tasks(const Convolution& conv) const {
    return conv.groups * ceil_div(segments(conv), together);
  }
  int64_t scratch() const {
    return round_up(slab_size + kPositions * (position_size + sums_size) + results_size, 16);
  }
  int64_t weights_size(const Convolution& conv) const {
    return round_up(conv.groups * kPositions * packed_size, 16);
  }
  // Of the transformation of weights: nine taps of a panel of them.
  int64_t taps_size() const { return 9 * kTapChannels * kPanel; }
  int64_t bytes(const Convolution& conv) const {
    const int64_t scratches = num_threads() * std::max(scratch(), taps_size());
    return (weights_size(conv) + scratches) * sizeof(Acc) + round_up(conv.images, 64);
  }

  static constexpr int64_t kTapChannels = 64;
  int64_t tile_rows, tile_columns, packed_filters, packed_size;
  int64_t pitch, ld;                  // of a pixel's channels in a slab, of a transformed tile's
  int64_t columns, blocks, together;  // of a segment; segments of a row of tiles, of a task
  int64_t position_size, slab_size, sums_size, results_size;
};

template <typename T>
class Winograd {
  using Acc = acc_t<T>;
  using V = vec_t<Acc>;
  using Plan = WinogradPlan<Acc>;
  static constexpr int kL = Plan::kL, kPanel = Plan::kPanel;

 public:
  Winograd(const Convolution& conv, const Plan& plan, void* workspace)
      : conv_(conv),
        plan_(plan),
        rows_(conv.h),
        columns_(conv.w),
        weights_(static_cast<Acc*>(workspace)),
        scratch_(weights_ + plan.weights_size(conv)),
        spoilt_(reinterpret_cast<std::atomic<char>*>(
            scratch_ + num_threads() * std::max(plan.scratch(), plan.taps_size()))) {}

  // Returns the images with results that are not finite: to be done again.
  std::vector<int64_t> run() const {
    std::fill_n(spoilt_, conv_.images, 0);
    transform_weights();
    const int64_t blocks = plan_.tasks(conv_) / conv_.groups;
    for_each_task(plan_.tasks(conv_), [&](int64_t worker, int64_t task) {
      const int64_t first = task % blocks * plan_.together;
      multiply(scratch_ + worker * plan_.scratch(), task / blocks, first,
               std::min(plan_.together, plan_.segments(conv_) - first));
    });
    std::vector<int64_t> spoilt;
    for (int64_t i = 0; i < conv_.images; ++i) {
      if (spoilt_[i]) spoilt.push_back(i);
    }
    return spoilt;
  }

 private:
  // Panel j of a position of a group's weights: [channel][filter of the panel].
  Acc* panel(int64_t group, int64_t position, int64_t j) const {
    return weights_ + (group * kPositions + position) * plan_.packed_size +
           j * kPanel * conv_.channels;
  }
  int64_t panels() const { return ceil_div(plan_.packed_filters, kPanel); }
  int64_t panel_width(int64_t j) const {
    return std::min<int64_t>(kPanel, plan_.packed_filters - j * kPanel);
  }

  // G g G', filters across the lanes.
  void transform_weights() const {
    const int64_t chunks = ceil_div(conv_.channels, Plan::kTapChannels);
    for_each_task(conv_.groups * panels() * chunks, [&](int64_t worker, int64_t task) {
      const int64_t j = task / chunks % panels(), group = task / chunks / panels();
      const int64_t first = task % chunks * Plan::kTapChannels, width = panel_width(j);
      const int64_t channels = std::min(Plan::kTapChannels, conv_.channels - first);
      Acc* const taps = scratch_ + worker * std::max(plan_.scratch(), plan_.taps_size());
      const int64_t size = channels * width;
      for (int64_t i = 0; i < 9; ++i) {  // in the order in which they meet the window
        const int64_t h = tap_at(conv_.h, conv_.tap_h, i / 3);
        const int64_t w = tap_at(conv_.w, conv_.tap_w, i % 3);
        pack_panel(taps + i * size, width,
                   static_cast<const T*>(conv_.weight) + group * conv_.weight_group +
                       j * kPanel * conv_.weight_filter + first * conv_.weight_channel +
                       h * conv_.weight_h + w * conv_.weight_w,
                   conv_.weight_filter, conv_.weight_channel,
                   std::min(width, conv_.filters - j * kPanel), channels);
      }
      for (int64_t i = 0; i < size; i += kL) {
        V half[kTileIn][3];
        for (int s = 0; s < 3; ++s) {
          transform_three(load<V>(taps + s * size + i), load<V>(taps + (3 + s) * size + i),
                          load<V>(taps + (6 + s) * size + i),
                          [&](int row, const V& v) { half[row][s] = v; });
        }
        for (int row = 0; row < kTileIn; ++row) {
          transform_three(half[row][0], half[row][1], half[row][2], [&](int s, const V& v) {
            cpu::store(panel(group, kTileIn * row + s, j) + first * width + i, v);
          });
        }
      }
    });
  }

  template <typename Put>
  static void transform_three(const V& g0, const V& g1, const V& g2, const Put& put) {
    const V outer = (g0 + g2) * Acc(0.5), middle = g1 * Acc(0.5);
    put(0, g0), put(1, outer + middle), put(2, outer - middle), put(3, g2);
  }

  // The filter's coordinate that meets the window at `offset`.
  static int64_t tap_at(const Axis& axis, const std::vector<int64_t>& coordinates, int64_t offset) {
    for (int64_t t = 0; t < 3; ++t) {
      if (axis.offset_of(t) == offset) return coordinates[t];
    }
    return -1;  // (not for filters that winograd_obstacle lets pass)
  }

  struct Segment {
    int64_t image, row, column, columns;  // of the first tile
  };
  Segment segment(int64_t i) const {
    const int64_t column = i % plan_.blocks * plan_.columns;
    return {i / plan_.blocks / plan_.tile_rows, i / plan_.blocks % plan_.tile_rows, column,
            std::min(plan_.columns, plan_.tile_columns - column)};
  }

  // `count` segments from `first` on.
  void multiply(Acc* slab, int64_t group, int64_t first, int64_t count) const {
    Acc* const inputs = slab + plan_.slab_size;
    Acc* const sums = inputs + kPositions * plan_.position_size;
    Acc* const results = sums + kPositions * plan_.sums_size;
    int64_t tiles = 0;
    for (int64_t i = first; i < first + count; ++i) {
      const Segment at = segment(i);
      transform(inputs + tiles * plan_.ld, slab, group, at);
      tiles += at.columns;
    }
    for (int64_t j = 0; j < panels(); ++j) {
      const int64_t width = panel_width(j);
      for (int64_t position = 0; position < kPositions; ++position) {
        rows_times_panel(inputs + position * plan_.position_size, plan_.ld, tiles,
                         panel(group, position, j), width, conv_.channels,
                         sums + position * plan_.sums_size, width);
      }
      const Acc* from = sums;
      for (int64_t i = first; i < first + count; ++i) {
        const Segment at = segment(i);
        if (!store_segment(results, from, width, group, j, at)) spoilt_[at.image] = 1;
        from += at.columns * width;
      }
    }
  }

  // Channels across the lanes: [position][tile][channel].
  void transform(Acc* to, Acc* slab, int64_t group, const Segment& at) const {
    const T* const image = static_cast<const T*>(conv_.src.data) + at.image * conv_.src.n +
                           group * conv_.channels * conv_.src.c;
    if constexpr (std::is_same_v<T, Acc>) {
      if (is_read_in_place<T>(conv_.src, conv_.channels)) {
        std::fill_n(slab, conv_.channels, Acc(0));
        const Windows<kTileIn, Acc> windows(image, conv_.src, conv_.h.extent, conv_.w.extent,
                                            conv_.h.first + at.row * kTileOut,
                                            conv_.w.first + at.column * kTileOut, slab);
        for (int64_t tile = 0; tile < at.columns; ++tile, to += plan_.ld) {
          windows(tile, [&](const auto& pixel) { transform_window(to, pixel); });
        }
        return;
      }
    }
    const Axis h = rows_.window(at.row, 1), w = columns_.window(at.column, at.columns);
    const SlabShape shape(h, w, kTileOut);
    fill_slab(slab, shape, h, w, image, conv_.src, conv_.channels, 0, plan_.pitch);
    for (int64_t tile = 0; tile < at.columns; ++tile, to += plan_.ld) {
      const Acc* const window = slab + tile * kTileOut * plan_.pitch;
      transform_window(to,
                       [&](int i, int j) { return window + (i * shape.pitch + j) * plan_.pitch; });
    }
  }

  // pixel(i, j): the channels of a pixel of the tile's inputs.
  template <typename Pixel>
  void transform_window(Acc* to, const Pixel& pixel) const {
    for (int64_t c = 0; c < conv_.channels; c += kL) {
      transform_input<V>([&](int i, int j) { return load<V>(pixel(i, j) + c); },
                         [&](int position, const V& v) {
                           cpu::store(to + position * plan_.position_size + c, v);
                         });
    }
  }

  // A'mA: a tile's results of a vector of filters, put(row, column, results).
  template <typename Put>
  void transform_back(const Acc* sums, const Put& put) const {
    V half[kTileOut][kTileIn];
    for (int j = 0; j < kTileIn; ++j) {
      const auto at = [&](int r) { return load<V>(sums + (kTileIn * r + j) * plan_.sums_size); };
      const V m1 = at(1), m2 = at(2);
      half[0][j] = at(0) + m1 + m2;
      half[1][j] = m1 - m2 - at(3);
    }
    for (int r = 0; r < kTileOut; ++r) {
      const V* const m = half[r];
      put(r, 0, m[0] + m[1] + m[2]), put(r, 1, m[1] - m[2] - m[3]);
    }
  }

  // The results of a segment's tiles and of panel j. Returns whether all are finite.
  bool store_segment(Acc* results, const Acc* sums, int64_t width, int64_t group, int64_t j,
                     const Segment& at) const {
    V odd = {};  // NaN where a result is not finite
    const int64_t filter = group * conv_.filters + j * kPanel;
    const Tensor4dRef& d = conv_.dst_strides;
    const int64_t row = at.row * kTileOut, column = at.column * kTileOut;
    const bool is_whole =
        row + kTileOut <= conv_.h.out && column + at.columns * kTileOut <= conv_.w.out;
    if constexpr (std::is_same_v<T, Acc>) {
      // Whole tiles of whole vectors go where they belong.
      if (is_whole && d.c == 1 && conv_.filters % kL == 0 && !conv_.bias) {
        Acc* const to = static_cast<Acc*>(conv_.dst) + at.image * d.n + filter + row * d.h;
        for (int64_t tile = 0; tile < at.columns; ++tile, sums += width) {
          Acc* const corner = to + (column + tile * kTileOut) * d.w;
          for (int64_t f = 0; f < width; f += kL) {
            transform_back(sums + f, [&](int r, int c, const V& v) {
              odd += v * Acc(0);
              cpu::store(corner + r * d.h + c * d.w + f, v);
            });
          }
        }
        return is_zero(odd);
      }
    }
    const int64_t pitch = at.columns * kTileOut * width;  // of results, two rows of pixels
    for (int64_t i = 0; i < at.columns * width; i += kL) {
      Acc* const to = results + i / width * kTileOut * width + i % width;
      transform_back(sums + i, [&](int r, int c, const V& v) {
        odd += v * Acc(0);
        cpu::store(to + r * pitch + c * width, v);
      });
    }
    const int64_t pixels = std::min(at.columns * kTileOut, conv_.w.out - column);
    for (int64_t r = 0; r < std::min(kTileOut, conv_.h.out - row); ++r) {
      store_pixels(results + r * pitch, width, pixels, std::min(width, conv_.filters - j * kPanel),
                   conv_.bias, filter,
                   static_cast<T*>(conv_.dst) + at.image * d.n + filter * d.c + (row + r) * d.h +
                       column * d.w,
                   d.w, d.c);
    }
    return is_zero(odd);
  }

  static bool is_zero(const V& v) {
    Acc sum = 0;
    for (int l = 0; l < kL; ++l) sum += v[l];
    return sum == 0;
  }

  const Convolution& conv_;
  const Plan plan_;
  const TileAxis rows_, columns_;
  Acc* weights_;
  Acc* scratch_;
  std::atomic<char>* spoilt_;  // images with results that are not finite
};

}  // namespace braze::cpu
