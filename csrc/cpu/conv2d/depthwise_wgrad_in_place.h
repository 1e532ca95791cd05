// The weight gradient of convolutions of one filter a channel, or of groups of a few channels with
// as many filters (grouped_wgrad.h), of tensors that are read where they are
// (depthwise_in_place.h). A tile of gradients in a row goes through the channels; its sums join
// those of some rows, and these the ones of a part of the images, so that chains of additions stay
// short. Parts are added in order.
#pragma once

#include "cpu/conv2d/depthwise_in_place.h"
#include "cpu/conv2d/grouped_wgrad.h"

namespace braze::cpu {

// kGrouped: of groups of so many channels and filters that they divide a vector's lanes.
template <typename Acc, bool kGrouped>
class DepthwiseWgradInPlace {
  using V = vec_t<Acc>;
  static constexpr int kL = kLanes<Acc>;
  // Rows whose sums are made from zero; gradients in a row that are.
  static constexpr int64_t kRowsTogether = 8, kPixels = 32;

 public:
  static int64_t bytes(const WeightGradient& g) {
    const int64_t taps = g.h.taps() * g.w.taps();
    const int64_t workers = std::min(num_threads(), blocks(g));
    const int64_t sums = 2 * taps * g.channels * channels_of(g).pitch();
    return workers * (sums + copied_size(g)) * int64_t{sizeof(Acc)};
  }

  DepthwiseWgradInPlace(const WeightGradient& g, void* workspace)
      : g_(g),
        channels_(channels_of(g)),
        width_(g.channels),
        tiles_(g.h, g.w, kGrouped ? GroupedWgradRows<Acc>::copied(g) : g.x, kPixels,
               width_ * channels_.pitch()),
        size_(tiles_.taps() * width_ * channels_.pitch()),
        sums_(static_cast<Acc*>(workspace)),
        groups_(g, channels_, tiles_, kRowsTogether) {}

  void run() const {
    const int64_t all = blocks(g_), parts = std::min(num_threads(), all);
    parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; ++part) {
        Acc* const sums = sums_ + 2 * part * size_;
        std::fill_n(sums, size_, Acc(0));
        for (int64_t i = part * all / parts; i < (part + 1) * all / parts; ++i) {
          add_block(i, sums + size_, sums_ + 2 * parts * size_ + part * copied_size(g_));
          for (int64_t e = 0; e < size_; e += kL) {
            store(sums + e, load<V>(sums + e) + load<V>(sums + size_ + e));
          }
        }
      }
    });
    store_sums(parts);
  }

 private:
  static ChannelVectors<Acc> channels_of(const WeightGradient& g) {
    return ChannelVectors<Acc>(g.groups * g.channels);
  }
  // Of a worker's copy, if there is one.
  static int64_t copied_size(const WeightGradient& g) {
    return kGrouped ? GroupedWgradRows<Acc>::copied_size(g, kRowsTogether) : 0;
  }
  // Of rows of all images.
  static int64_t blocks(const WeightGradient& g) {
    return g.images * ceil_div(g.h.out, kRowsTogether);
  }

  void add_block(int64_t number, Acc* sums, [[maybe_unused]] Acc* copy) const {
    std::fill_n(sums, size_, Acc(0));
    const int64_t in_image = ceil_div(g_.h.out, kRowsTogether), image = number / in_image;
    const int64_t begin = number % in_image * kRowsTogether;
    const int64_t end = std::min(g_.h.out, begin + kRowsTogether);
    if constexpr (kGrouped) return groups_.add(image, begin, end, copy, sums);
    const int64_t step = tiles_.step_w * g_.x.w;
    for (int64_t i = begin; i < end; ++i) {
      const Acc* const x =
          static_cast<const Acc*>(g_.x.data) + image * g_.x.n + i * tiles_.step_h * g_.x.h;
      const Acc* const dy = static_cast<const Acc*>(g_.dy.data) + image * g_.dy.n + i * g_.dy.h;
      const auto [first, last] = tiles_.taps_of_row(i);
      for (const InPlaceTile& tile : tiles_.tiles) {
        prefetch_next_row(tiles_, tile, x, g_.x);
        add_tile({tile.taps.data() + first, last - first, tile.begin, tile.end, tile.pixels,
                  x + tile.first * step, step, dy + tile.first * g_.dy.w, g_.dy.w},
                 sums);
      }
    }
  }

  // Gradients in a row and the taps that they meet: all of them those in [begin, end).
  struct Tile {
    const InPlaceTap* taps;
    int64_t count;
    int begin, end, pixels;
    const Acc* x;
    int64_t x_step;
    const Acc* dy;
    int64_t dy_step;
  };

  void add_tile(const Tile& tile, Acc* sums) const {
    const int64_t across = tiles_.across();
    for (int64_t v = 0; v < channels_.count(); ++v) {
      const int64_t c = channels_.begin(v);
      if (tile.count > kMostPixels) {
        // By columns of the filter, whose taps all meet the same gradients.
        for (int64_t s = 0; s < across; ++s) {
          const InPlaceTap& tap = tile.taps[s];
          add_taps(tile, s, across, tile.count / across, tap.begin, tap.end, c, sums + v * kL);
        }
        continue;
      }
      add_taps(tile, 0, 1, tile.count, tile.begin, tile.end, c, sums + v * kL);
      for (int i = 0; i < tile.pixels; ++i) {
        if (i < tile.begin || i >= tile.end) add_edge(tile, i, c, sums + v * kL);
      }
    }
  }

  // Gradients [begin, end) at `count` taps, every `stride`th from one on, as many at a time as
  // there are registers for.
  static void add_taps(const Tile& tile, int64_t first, int64_t stride, int64_t count, int begin,
                       int end, int64_t channel, Acc* sums) {
    if (begin >= end) return;
    const int64_t together = even_height(count);
    for (int64_t t = 0; t < count; t += together) {
      with_pixels<1>(std::min(together, count - t), 1, [&](auto taps, auto) {
        add_together<taps>(tile, tile.taps + first + t * stride, stride, begin, end, channel, sums);
      });
    }
  }

  template <int kTaps>
  __attribute__((noinline)) static void add_together(const Tile& tile, const InPlaceTap* taps,
                                                     int64_t stride, int begin, int end,
                                                     int64_t channel, Acc* sums) {
    // Of few taps several gradients at a time, so that products need not wait for sums.
    constexpr int kTogether = kTaps <= kMostPixels / 2 ? 2 : 1;
    int64_t source[kTaps];
    V sum[kTogether][kTaps] = {};
#pragma GCC unroll 16
    for (int t = 0; t < kTaps; ++t) source[t] = taps[t * stride].source;
    const Acc* x = tile.x + begin * tile.x_step + channel;
    const Acc* dy = tile.dy + begin * tile.dy_step + channel;
    const int64_t x_step = tile.x_step, dy_step = tile.dy_step;
    if constexpr (kTogether > 1) {
      for (; begin + 1 < end; begin += 2, x += 2 * x_step, dy += 2 * dy_step) {
        const V gradient = load<V>(dy), next = load<V>(dy + dy_step);
#pragma GCC unroll 16
        for (int t = 0; t < kTaps; ++t) {
          sum[0][t] += gradient * load<V>(x + source[t]);
          sum[1][t] += next * load<V>(x + x_step + source[t]);
        }
      }
    }
    for (; begin < end; ++begin, x += x_step, dy += dy_step) {
      const V gradient = load<V>(dy);
#pragma GCC unroll 16
      for (int t = 0; t < kTaps; ++t) sum[0][t] += gradient * load<V>(x + source[t]);
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTaps; ++t) {
      Acc* const to = sums + taps[t * stride].weight;
      store(to, load<V>(to) + (kTogether > 1 ? sum[0][t] + sum[kTogether - 1][t] : sum[0][t]));
    }
  }

  static void add_edge(const Tile& tile, int i, int64_t channel, Acc* sums) {
    const Acc* const x = tile.x + i * tile.x_step + channel;
    const V gradient = load<V>(tile.dy + i * tile.dy_step + channel);
    for (int64_t t = 0; t < tile.count; ++t) {
      const InPlaceTap& tap = tile.taps[t];
      if (i < tap.begin || i >= tap.end) continue;
      Acc* const to = sums + tap.weight;
      store(to, load<V>(to) + gradient * load<V>(x + tap.source));
    }
  }

  void store_sums(int64_t parts) const {
    Acc* const dw = static_cast<Acc*>(const_cast<void*>(g_.dw.data));
    const Acc* from = sums_;
    for (const int64_t th : tiles_.h.order) {
      for (const int64_t tw : tiles_.w.order) {
        for (int64_t r = 0; r < width_; ++r, from += channels_.pitch()) {
          for (int64_t c = 0; c < channels_.channels; ++c) {
            const int64_t at = c / kL * kL + c - channels_.begin(c / kL);
            Acc sum = 0;
            for (int64_t part = 0; part < parts; ++part) sum += from[2 * part * size_ + at];
            const int64_t in_group = c % width_, filter = c - in_group + (in_group + r) % width_;
            dw[filter * g_.dw.n + in_group * g_.dw.c + th * g_.dw.h + tw * g_.dw.w] = sum;
          }
        }
      }
    }
  }

  const WeightGradient& g_;
  const ChannelVectors<Acc> channels_;
  const int64_t width_;  // channels of a group
  const InPlaceTiles tiles_;
  const int64_t size_;  // of a set of sums, [tap][rotation][channel]
  Acc* const sums_;     // of each part two sets: its own, and those of some rows; then copies
  const GroupedWgradRows<Acc> groups_;
};

}  // namespace braze::cpu
