// The weight gradient of 3 x 3 filters of stride 1 by Winograd's minimal filtering, F(3 x 3, 2 x
// 2): the results' gradients in tiles of 2 x 2 are the filter that is moved over tiles of 4 x 4
// inputs, 16 multiplications in the place of 36. The 16 products filters x tiles * tiles x channels
// are summed over all tiles before they are transformed back. As in winograd.h a finite result is
// right; one that is not is left to wgrad.h.
#pragma once

#include <algorithm>
#include <atomic>

#include "cpu/conv2d/winograd.h"

namespace braze::cpu {

template <typename Acc>
struct WinogradWgradPlan {
  static constexpr int kL = kLanes<Acc>, kPanel = 2 * kL;
  // Tiles of a chunk, which the second-level cache keeps from when they are transformed until they
  // are multiplied.
  static constexpr int64_t kTiles = 64;
  // Where the sums are at most that large, each thread has its own, and goes through its chunks one
  // by one. Others share sums and chunks, as many as fit into that much memory: a part of the sums
  // is then loaded once for all of them.
  static constexpr int64_t kOwnSumsBytes = int64_t{2} << 20;
  static constexpr int64_t kChunkBytes = int64_t{16} << 20, kMostChunks = 8;

  explicit WinogradWgradPlan(const WeightGradient& g)
      : tile_rows(ceil_div(g.h.out, kTileOut)),
        tile_columns(ceil_div(g.w.out, kTileOut)),
        columns(ceil_div(tile_columns, ceil_div(tile_columns, kTiles))),
        blocks(ceil_div(tile_columns, columns)),
        together(std::max<int64_t>(1, kTiles / columns)),
        filters(round_up(g.filters, kL)),
        channels(round_up(g.channels, kL)),
        slab_size(kTileIn * (columns * kTileOut + 2) * std::max(filters, channels)) {
    const int64_t count = chunk_count(g);
    if (has_own_sums()) {
      chunks = slices = std::min(count, num_threads());
      return;
    }
    const int64_t bytes = chunk_size() * int64_t{sizeof(Acc)};
    chunks = std::min(count,
                      std::clamp(kChunkBytes / bytes, num_threads(), kMostChunks * num_threads()));
  }
  // Segments: `columns` tiles side by side; a chunk is several of them.
  int64_t segments(const WeightGradient& g) const { return g.images * tile_rows * blocks; }
  int64_t chunk_count(const WeightGradient& g) const { return ceil_div(segments(g), together); }
  // A vector more where chunks stay in the second-level cache, or a tile's 16 positions would all
  // meet in one set of the first-level one. (Chunks that do not gain nothing.)
  int64_t position_size() const {
    return kTiles * (filters + channels) + (has_own_sums() ? kL : 0);
  }
  int64_t chunk_size() const { return kPositions * position_size(); }
  int64_t sums_size() const { return kPositions * filters * channels; }  // of a group
  bool has_own_sums() const { return sums_size() * int64_t{sizeof(Acc)} <= kOwnSumsBytes; }
  int64_t bytes(const WeightGradient&) const {
    return (slices * sums_size() + chunks * chunk_size() + num_threads() * slab_size) * sizeof(Acc);
  }

  int64_t tile_rows, tile_columns;
  int64_t columns, blocks, together;  // of a segment; segments of a row of tiles, of a chunk
  int64_t filters, channels;          // padded to whole vectors
  int64_t slab_size;
  int64_t chunks;      // that are transformed before they are multiplied
  int64_t slices = 1;  // of all chunks, with sums of their own
};

template <typename T>
class WinogradWgrad {
  using Acc = acc_t<T>;
  using V = vec_t<Acc>;
  using Plan = WinogradWgradPlan<Acc>;
  static constexpr int kL = Plan::kL, kPanel = Plan::kPanel;
  // Filters of a register tile: a vector of them holds one or two.
  static constexpr int kHeight = kL > 8 ? 8 : 4;
  static_assert(kL % kHeight == 0 && kHeight <= kMostPixels);

 public:
  WinogradWgrad(const WeightGradient& g, const Plan& plan, void* workspace)
      : g_(g),
        plan_(plan),
        sums_(static_cast<Acc*>(workspace)),
        chunks_(sums_ + plan.slices * plan.sums_size()),
        slabs_(chunks_ + plan.chunks * plan.chunk_size()) {}

  // Returns whether all results are finite.
  bool run() const {
    std::atomic<bool> finite{true};
    for (int64_t group = 0; group < g_.groups; ++group) {
      if (plan_.slices > 1) {
        sum_slices(group);
      } else {
        sum_together(group);
      }
      parallel_for(0, g_.filters, ceil_div(4096, g_.channels), [&](int64_t begin, int64_t end) {
        for (int64_t f = begin; f < end; ++f) {
          if (!transform_back(group, f)) finite = false;
        }
      });
    }
    return finite;
  }

 private:
  // Each slice of the chunks is summed by itself.
  void sum_slices(int64_t group) const {
    const int64_t count = plan_.chunk_count(g_), each = ceil_div(count, plan_.slices);
    for_each_task(plan_.slices, [&](int64_t worker, int64_t slice) {
      Acc* const sums = sums_ + slice * plan_.sums_size();
      const int64_t first = slice * each, last = std::min(count, first + each);
      if (first >= last) std::fill_n(sums, plan_.sums_size(), Acc(0));
      for (int64_t i = first; i < last; ++i) {
        transform(slabs_ + worker * plan_.slab_size, group, i, slice);
        for (int64_t position = 0; position < kPositions; ++position) {
          for (int64_t channel = 0; channel < plan_.channels; channel += kPanel) {
            multiply(sums, position, channel, slice, tiles_of(i), i > first);
          }
        }
      }
    });
  }

  // Chunks are transformed one by a thread, and multiplied by position and panel.
  void sum_together(int64_t group) const {
    const int64_t count = plan_.chunk_count(g_), panels = ceil_div(plan_.channels, kPanel);
    for (int64_t first = 0; first < count; first += plan_.chunks) {
      const int64_t chunks = std::min(plan_.chunks, count - first);
      for_each_task(chunks, [&](int64_t worker, int64_t chunk) {
        transform(slabs_ + worker * plan_.slab_size, group, first + chunk, chunk);
      });
      for_each_task(kPositions * panels, [&](int64_t, int64_t task) {
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
          multiply(sums_, task % kPositions, task / kPositions * kPanel, chunk,
                   tiles_of(first + chunk), first + chunk > 0);
        }
      });
    }
  }

  // Panels of a position, [tile][channels of the panel]: first those of dy, of a vector of filters,
  // then those of x, of two vectors of channels.
  Acc* inputs(int64_t chunk, int64_t position) const {
    return chunks_ + chunk * plan_.chunk_size() + position * plan_.position_size();
  }
  int64_t panel_width(int64_t channel) const {
    return std::min<int64_t>(kPanel, plan_.channels - channel);
  }

  int64_t columns_at(int64_t segment) const {
    return std::min(plan_.columns, plan_.tile_columns - segment % plan_.blocks * plan_.columns);
  }
  // Of the chunk with that number among all.
  int64_t last_segment(int64_t number) const {
    return std::min(plan_.segments(g_), (number + 1) * plan_.together);
  }
  int64_t tiles_of(int64_t number) const {
    int64_t tiles = 0;
    for (int64_t i = number * plan_.together; i < last_segment(number); ++i) tiles += columns_at(i);
    return tiles;
  }

  // The chunk with that number among all, to the place of `chunk`.
  void transform(Acc* slab, int64_t group, int64_t number, int64_t chunk) const {
    int64_t tile = 0;
    for (int64_t i = number * plan_.together; i < last_segment(number); ++i) {
      const int64_t image = i / plan_.blocks / plan_.tile_rows;
      const int64_t row = i / plan_.blocks % plan_.tile_rows;
      const int64_t column = i % plan_.blocks * plan_.columns, count = columns_at(i);
      transform_dy(slab, chunk, tile, image, group, row, column, count);
      transform_x(slab, chunk, tile, image, group, row, column, count);
      tile += count;
    }
  }

  void transform_x(Acc* slab, int64_t chunk, int64_t tile, int64_t image, int64_t group,
                   int64_t row, int64_t column, int64_t count) const {
    Acc* const to = inputs(chunk, 0) + plan_.filters * Plan::kTiles;
    const int64_t y = g_.h.first + row * kTileOut, x = g_.w.first + column * kTileOut;
    with_pixels<kTileIn>(
        slab, g_.x, g_.h.extent, g_.w.extent, image, group, g_.channels, plan_.channels, y, x,
        count, [&](int64_t t, const auto& pixel) {
          for (int64_t c = 0; c < plan_.channels; c += kL) {
            const int64_t panel = c / kPanel * kPanel;
            Acc* const out =
                to + panel * Plan::kTiles + (tile + t) * panel_width(panel) + c - panel;
            transform_input<V>([&](int i, int j) { return load<V>(pixel(i, j) + c); },
                               [&](int position, const V& v) {
                                 cpu::store(out + position * plan_.position_size(), v);
                               });
          }
        });
  }

  // G dy G'.
  void transform_dy(Acc* slab, int64_t chunk, int64_t tile, int64_t image, int64_t group,
                    int64_t row, int64_t column, int64_t count) const {
    with_pixels<kTileOut>(
        slab, g_.dy, g_.h.out, g_.w.out, image, group, g_.filters, plan_.filters, row * kTileOut,
        column * kTileOut, count, [&](int64_t t, const auto& pixel) {
          for (int64_t f = 0; f < plan_.filters; f += kL) {
            Acc* const out = inputs(chunk, 0) + f * Plan::kTiles + (tile + t) * kL;
            V half[kTileIn][kTileOut];
            for (int j = 0; j < kTileOut; ++j) {
              transform_two(load<V>(pixel(0, j) + f), load<V>(pixel(1, j) + f),
                            [&](int i, const V& v) { half[i][j] = v; });
            }
            for (int i = 0; i < kTileIn; ++i) {
              transform_two(half[i][0], half[i][1], [&](int j, const V& v) {
                cpu::store(out + (kTileIn * i + j) * plan_.position_size(), v);
              });
            }
          }
        });
  }

  // f(t, pixel) for `count` windows of kSide x kSide pixels from (y, x) on, of an image of that
  // height and width; pixel(i, j) are the channels of a pixel, `pitch` of them.
  template <int kSide, typename F>
  void with_pixels(Acc* slab, const Tensor4dRef& t, int64_t height, int64_t width, int64_t image,
                   int64_t group, int64_t channels, int64_t pitch, int64_t y, int64_t x,
                   int64_t count, const F& f) const {
    const T* const from = static_cast<const T*>(t.data) + image * t.n + group * channels * t.c;
    if constexpr (std::is_same_v<T, Acc>) {
      if (is_read_in_place<T>(t, channels)) {
        std::fill_n(slab, pitch, Acc(0));
        const Windows<kSide, Acc> windows(from, t, height, width, y, x, slab);
        for (int64_t i = 0; i < count; ++i) {
          windows(i, [&](const auto& pixel) { f(i, pixel); });
        }
        return;
      }
    }
    // Windows overlap by kSide - kTileOut.
    const Axis h(kSide, 1, height, {y}), w((count - 1) * kTileOut + kSide, 1, width, {x});
    const SlabShape shape(h, w, kSide);
    fill_slab(slab, shape, h, w, from, t, channels, 0, pitch);
    for (int64_t i = 0; i < count; ++i) {
      const Acc* const window = slab + i * kTileOut * pitch;
      f(i, [&](int r, int c) { return window + (r * shape.pitch + c) * pitch; });
    }
  }

  template <typename Put>
  static void transform_two(const V& g0, const V& g1, const Put& put) {
    put(0, g0), put(1, (g0 + g1) * Acc(0.5)), put(2, (g0 - g1) * Acc(0.5)), put(3, g1);
  }

  // A position's products of all filters and a panel of channels.
  void multiply(Acc* all, int64_t position, int64_t channel, int64_t chunk, int64_t tiles,
                bool accumulate) const {
    const Acc* const dy = inputs(chunk, position);
    const Acc* const x = dy + (plan_.filters + channel) * Plan::kTiles;
    Acc* const sums = all + position * plan_.filters * plan_.channels + channel;
    const auto times = [&](auto vecs_tag) {
      for (int64_t f = 0; f < plan_.filters; f += kHeight) {
        const Acc* const panel = dy + f / kL * kL * Plan::kTiles + f % kL;
        outer_products<Acc, kHeight, vecs_tag>(
            tiles, [=](int64_t p) { return panel + p * kL; }, Adjacent{},
            [=](int64_t p) { return x + p * vecs_tag * kL; }, sums + f * plan_.channels,
            plan_.channels, accumulate);
      }
    };
    if (panel_width(channel) == kPanel) return times(std::integral_constant<int, 2>{});
    times(std::integral_constant<int, 1>{});
  }

  // A'sA: the taps of one filter, channels across the lanes. Returns whether they are finite.
  bool transform_back(int64_t group, int64_t filter) const {
    constexpr int kTaps = 3;
    V odd = {};
    T* const dw =
        static_cast<T*>(const_cast<void*>(g_.dw.data)) + (group * g_.filters + filter) * g_.dw.n;
    for (int64_t c = 0; c < g_.channels; c += kL) {
      const Acc* const from = sums_ + filter * plan_.channels + c;
      V half[kTaps][kTileIn];
      for (int j = 0; j < kTileIn; ++j) {
        const auto at = [&](int i) {
          const Acc* const sums = from + (kTileIn * i + j) * plan_.filters * plan_.channels;
          V sum = load<V>(sums);
          for (int64_t l = 1; l < plan_.slices; ++l) sum += load<V>(sums + l * plan_.sums_size());
          return sum;
        };
        back_three(at(0), at(1), at(2), at(3), [&](int i, const V& v) { half[i][j] = v; });
      }
      for (int i = 0; i < kTaps; ++i) {
        const V* const m = half[i];
        back_three(m[0], m[1], m[2], m[3], [&](int j, const V& v) {
          odd += v * Acc(0);
          T* const to = dw + c * g_.dw.c + i * g_.dw.h + j * g_.dw.w;
          const int64_t lanes = std::min<int64_t>(kL, g_.channels - c);
          for (int64_t l = 0; l < lanes; ++l) to[l * g_.dw.c] = T(v[l]);
        });
      }
    }
    Acc sum = 0;
    for (int l = 0; l < kL; ++l) sum += odd[l];
    return sum == 0;
  }

  template <typename Put>
  static void back_three(const V& m0, const V& m1, const V& m2, const V& m3, const Put& put) {
    put(0, m0 + m1 + m2), put(1, m1 - m2), put(2, m1 + m2 - m3);
  }

  const WeightGradient& g_;
  const Plan plan_;
  Acc* sums_;
  Acc* chunks_;
  Acc* slabs_;
};

}  // namespace braze::cpu
