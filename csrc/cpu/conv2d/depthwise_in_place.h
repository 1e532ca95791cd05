// Convolutions of one filter a channel, or of groups of a few channels with as many filters, whose
// images are channels_last and in the accumulation type: read where they are and in the order of
// memory, whose speed is the limit. A tile of results in a row goes through the channels, vector by
// vector, before the next one begins.
//
// A vector has whole groups, or filters of one group. Each of a group's channels in turn is spread
// over the lanes of all its filters, and multiplied by their weights: of a pixel once for up to
// three taps that meet it, whose results lie side by side. A padded copy and tiles of one group
// would leave most lanes of narrow groups idle.
#pragma once

#include <vector>

#include "cpu/conv2d/passes.h"
#include "cpu/conv2d/patches.h"

namespace braze::cpu {

// A tap as a tile of results meets it: from the tile's first window, and where its weights or sums
// are. Of the tile's results those in [begin, end) have it within the image.
struct InPlaceTap {
  int64_t source, weight;
  int begin, end;
};

// Results [first, first + pixels) of each row, and all taps, in the order of their shifts. Of the
// results those in [begin, end), if there are any, have all taps of their row within the image.
struct InPlaceTile {
  int64_t first;
  int pixels, begin, end;
  std::vector<InPlaceTap> taps;
};

// How a convolution's rows are cut into tiles. pitch: from a tap's weights or sums to the next's.
class InPlaceTiles {
 public:
  InPlaceTiles(const Axis& h, const Axis& w, const Tensor4dRef& strides, int64_t most,
               int64_t pitch)
      : h(h), w(w), out(h.out), step_h(h.step), step_w(w.step), extent_(h.extent) {
    const int64_t width = even_height(w.out, most);
    for (int64_t first = 0; first < w.out; first += width) {
      const int pixels = static_cast<int>(std::min(width, w.out - first));
      tiles.push_back({first, pixels, 0, pixels, {}});
      InPlaceTile& tile = tiles.back();
      int64_t weight = 0;
      for (const int64_t y : this->h.shifts) {
        for (const int64_t x : this->w.shifts) {
          const int64_t from = first * w.step + x;  // of the tile's first result
          const int64_t begin = from < 0 ? ceil_div(-from, w.step) : 0;
          const int64_t end = from < w.extent ? (w.extent - 1 - from) / w.step + 1 : 0;
          const InPlaceTap tap{y * strides.h + x * strides.w, weight,
                               static_cast<int>(std::min<int64_t>(begin, pixels)),
                               static_cast<int>(std::min<int64_t>(end, pixels))};
          tile.taps.push_back(tap);
          tile.begin = std::max(tile.begin, tap.begin), tile.end = std::min(tile.end, tap.end);
          weight += pitch;
        }
      }
    }
  }
  int64_t across() const { return static_cast<int64_t>(w.shifts.size()); }
  int64_t taps() const { return static_cast<int64_t>(h.shifts.size()) * across(); }
  // Those of a tile's taps that are within the image in row i of the results.
  std::pair<int64_t, int64_t> taps_of_row(int64_t i) const {
    const auto first = std::lower_bound(h.shifts.begin(), h.shifts.end(), -i * step_h);
    const auto last = std::lower_bound(first, h.shifts.end(), extent_ - i * step_h);
    return {(first - h.shifts.begin()) * across(), (last - h.shifts.begin()) * across()};
  }

  TapShifts h, w;
  int64_t out, step_h, step_w;
  std::vector<InPlaceTile> tiles;

 private:
  int64_t extent_;
};

// Taps of a row of the filter of which each meets the pixel that the one before it meets a result
// later: the first one's place in the row, how many there are, and how many places are between
// them.
struct TapRun {
  int64_t first;
  int count;
  int64_t apart;
};

// A row's taps, sorted by `shifts`, in such runs.
inline std::vector<TapRun> runs_of_taps(const std::vector<int64_t>& shifts, int64_t step) {
  constexpr int kLongest = 3;
  std::vector<TapRun> runs;
  std::vector<bool> taken(shifts.size());
  for (size_t t = 0; t < shifts.size(); ++t) {
    if (taken[t]) continue;
    TapRun run{static_cast<int64_t>(t), 1, 1};
    for (size_t u = t + 1; u < shifts.size() && run.count < kLongest; ++u) {
      if (taken[u] || shifts[u] != shifts[t] + run.count * step) continue;
      if (run.count == 1) run.apart = static_cast<int64_t>(u - t);
      if (run.first + run.count * run.apart != static_cast<int64_t>(u)) continue;
      taken[u] = true;
      ++run.count;
    }
    runs.push_back(run);
  }
  return runs;
}

// Channels in vectors: the last one of each `width` begins early enough to be whole.
template <typename Acc>
class ChannelVectors {
  static constexpr int kL = kLanes<Acc>;

 public:
  explicit ChannelVectors(int64_t channels) : ChannelVectors(channels, channels) {}
  ChannelVectors(int64_t channels, int64_t width)
      : channels(channels), width_(width), vectors_(ceil_div(width, int64_t{kL})) {}

  int64_t begin(int64_t vector) const {
    if (width_ == channels) return std::min(vector * kL, channels - kL);  // without a division
    return vector / vectors_ * width_ + std::min(vector % vectors_ * kL, width_ - kL);
  }
  int64_t count() const { return channels / width_ * vectors_; }
  // Those from the first on that lie side by side.
  int64_t whole() const { return width_ / kL; }
  int64_t pitch() const { return count() * kL; }  // of packed channels, vector by vector

  int64_t channels;

 private:
  int64_t width_, vectors_;  // the latter of each width
};

// Has the image's lines that the next row's tile at this place is the first to meet come closer:
// tiles go through more rows of the image at once than the processor foresees.
template <typename Acc>
void prefetch_next_row(const InPlaceTiles& tiles, const InPlaceTile& tile, const Acc* row,
                       const Tensor4dRef& strides) {
  if (tiles.h.shifts.empty()) return;
  const Acc* from =
      row + tile.first * tiles.step_w * strides.w + (tiles.h.shifts.back() + 1) * strides.h;
  const int64_t elements = tile.pixels * tiles.step_w * strides.w;
  for (int64_t i = 0; i < tiles.step_h; ++i, from += strides.h) {
    for (int64_t e = 0; e < elements; e += 64 / int64_t{sizeof(Acc)}) {
      __builtin_prefetch(from + e, 0, 2);
    }
  }
}

// Rows of results in a task.
inline int64_t in_place_rows(int64_t images, int64_t rows) {
  constexpr int64_t kFewest = 4, kTasks = 8;  // a worker
  const int64_t wanted = ceil_div(kTasks * num_threads(), std::max<int64_t>(1, images));
  return std::max(kFewest, ceil_div(rows, wanted));
}

// One filter a channel; groups of so many channels and filters that a vector has several; or of a
// vector's lanes and more.
enum class InPlaceGroups { kDepthwise, kNarrow, kWide };

// All convolutions that a pass consists of: a row of each in turn, while what they read is near.
template <typename Acc, InPlaceGroups kGroups>
class ConvolutionInPlace {
  static constexpr bool kGrouped = kGroups != InPlaceGroups::kDepthwise;
  static constexpr bool kWide = kGroups == InPlaceGroups::kWide;
  using V = vec_t<Acc>;
  static constexpr int kL = kLanes<Acc>;

 public:
  static int64_t bytes(const std::vector<Convolution>& convolutions) {
    int64_t vectors = 1;  // the bias
    for (const Convolution& conv : convolutions) vectors += conv.taps() * conv.channels;
    return vectors * channels_of(convolutions[0]).pitch() * int64_t{sizeof(Acc)};
  }

  ConvolutionInPlace(const std::vector<Convolution>& convolutions, void* workspace)
      : channels_(channels_of(convolutions[0])),
        width_(convolutions[0].channels),
        bias_(static_cast<Acc*>(workspace)) {
    const Acc* const bias = static_cast<const Acc*>(convolutions[0].bias);
    pack(bias_, [&](int64_t c) { return bias ? bias[c] : Acc(0); });
    for (int64_t w = 0; w < (kWide ? 0 : width_); ++w) {
      for (int64_t l = 0; l < kL; ++l) spreads_[w][l] = static_cast<int>(l / width_ * width_ + w);
    }
    Acc* weights = bias_ + channels_.pitch();
    for (const Convolution& conv : convolutions) {
      const InPlaceTiles tiles(conv.h, conv.w, conv.src, kMostPixels, width_ * channels_.pitch());
      parts_.push_back({&conv, tiles, runs_of_taps(tiles.w.shifts, tiles.step_w), weights});
      weights = pack_weights(parts_.back(), weights);
    }
  }

  void run() const {
    int64_t height = 0;
    for (const Part& part : parts_) height = std::max(height, part.tiles.out);
    const int64_t images = parts_[0].conv->images;
    const int64_t rows = in_place_rows(images, height), blocks = ceil_div(height, rows);
    parallel_for(0, images * blocks, 1, [&](int64_t first, int64_t last) {
      for (int64_t task = first; task < last; ++task) {
        const int64_t image = task / blocks, begin = task % blocks * rows;
        for (int64_t i = begin; i < std::min(height, begin + rows); ++i) {
          for (const Part& part : parts_) {
            if (i < part.tiles.out) convolve_row(part, image, i);
          }
        }
      }
    });
  }

 private:
  struct Part {
    const Convolution* conv;
    InPlaceTiles tiles;
    std::vector<TapRun> runs;
    const Acc* weights;  // [tap][channel of a group][filter], taps in the order of their shifts
  };

  static ChannelVectors<Acc> channels_of(const Convolution& conv) {
    const int64_t channels = conv.groups * conv.filters;
    return {channels, kWide ? conv.filters : channels};
  }

  template <typename Value>
  void pack(Acc* to, const Value& value) const {
    for (int64_t v = 0; v < channels_.count(); ++v) {
      for (int64_t l = 0; l < kL; ++l) to[v * kL + l] = value(channels_.begin(v) + l);
    }
  }
  Acc* pack_weights(const Part& part, Acc* to) const {
    const Convolution& conv = *part.conv;
    for (const int64_t th : part.tiles.h.order) {
      for (const int64_t tw : part.tiles.w.order) {
        const Acc* const tap = static_cast<const Acc*>(conv.weight) +
                               conv.tap_h[th] * conv.weight_h + conv.tap_w[tw] * conv.weight_w;
        for (int64_t w = 0; w < width_; ++w, to += channels_.pitch()) {
          pack(to, [&](int64_t c) {
            return tap[c / width_ * conv.weight_group + c % width_ * conv.weight_filter +
                       w * conv.weight_channel];
          });
        }
      }
    }
    return to;
  }

  // Taps, of one tile and row; the runs in each row of the filter, of so many taps.
  struct Taps {
    const InPlaceTap *begin, *end;
    const std::vector<TapRun>& runs;
    int64_t across;
  };

  void convolve_row(const Part& part, int64_t image, int64_t i) const {
    const Tensor4dRef &src = part.conv->src, &dst = part.conv->dst_strides;
    const int64_t step = part.tiles.step_w * src.w;
    const Acc* const from =
        static_cast<const Acc*>(src.data) + image * src.n + i * part.tiles.step_h * src.h;
    Acc* const to = static_cast<Acc*>(part.conv->dst) + image * dst.n + i * dst.h;
    const auto [first, last] = part.tiles.taps_of_row(i);
    for (const InPlaceTile& tile : part.tiles.tiles) {
      if (&part == &parts_[0]) prefetch_next_row(part.tiles, tile, from, src);
      const Taps taps{tile.taps.data() + first, tile.taps.data() + last, part.runs,
                      part.tiles.across()};
      with_pixels<1>(tile.pixels, 1, [&](auto pixels, auto) {
        convolve_tile<pixels>(from + tile.first * step, step, taps, part.weights,
                              to + tile.first * dst.w, dst.w);
      });
    }
  }

  // All channels of kPixels results, `step` apart in the image.
  template <int kPixels>
  void convolve_tile(const Acc* from, int64_t step, Taps taps, const Acc* weights, Acc* to,
                     int64_t pitch) const {
    // So many vectors at a time that products need not wait for sums.
    constexpr int kVecs = kPixels < 4 ? 4 : kPixels < 8 && !kGrouped ? 2 : 1;
    int64_t v = 0;
    for (; !kWide && v + kVecs <= channels_.whole(); v += kVecs) {
      convolve_vectors<kPixels, kVecs>(from + v * kL, 0, step, taps, weights + v * kL,
                                       bias_ + v * kL, to + v * kL, pitch);
    }
    for (; v < channels_.count(); ++v) {
      const int64_t c = channels_.begin(v);
      convolve_vectors<kPixels, 1>(from + c, kWide ? c % width_ : 0, step, taps, weights + v * kL,
                                   bias_ + v * kL, to + c, pitch);
    }
  }

  template <int kPixels, int kVecs>
  __attribute__((noinline)) void convolve_vectors(const Acc* from, int64_t in_group, int64_t step,
                                                  Taps taps, const Acc* weights, const Acc* bias,
                                                  Acc* to, int64_t pitch) const {
    V sums[kPixels][kVecs];
#pragma GCC unroll 16
    for (int i = 0; i < kPixels; ++i) {
#pragma GCC unroll 4
      for (int k = 0; k < kVecs; ++k) sums[i][k] = load<V>(bias + k * kL);
    }
    if constexpr (kGrouped && kVecs == 1 && kPixels >= 4) {
      for (const InPlaceTap* row = taps.begin; row < taps.end; row += taps.across) {
        for (const TapRun& run : taps.runs) {
          add_run(sums, from - in_group, step, row + run.first, run, weights);
        }
      }
    } else {
      add_each(sums, from - in_group, step, taps, weights);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kPixels; ++i) {
#pragma GCC unroll 4
      for (int k = 0; k < kVecs; ++k) store(to + i * pitch + k * kL, sums[i][k]);
    }
  }

  // Tap by tap.
  template <int kPixels, int kVecs>
  void add_each(V (&sums)[kPixels][kVecs], const Acc* from, int64_t step, const Taps& taps,
                const Acc* weights) const {
    for (const InPlaceTap* tap = taps.begin; tap < taps.end; ++tap) {
      const Acc* const at = from + tap->source;
      for (int64_t w = 0; w < (kGrouped ? width_ : 1); ++w) {
        const Acc* const of_channel = weights + tap->weight + w * channels_.pitch();
        V weight[kVecs];
#pragma GCC unroll 4
        for (int k = 0; k < kVecs; ++k) weight[k] = load<V>(of_channel + k * kL);
        if (tap->begin == 0 && tap->end == kPixels) {
#pragma GCC unroll 16
          for (int i = 0; i < kPixels; ++i) {
#pragma GCC unroll 4
            for (int k = 0; k < kVecs; ++k) {
              sums[i][k] += spread(at + i * step + k * kL, w) * weight[k];
            }
          }
        } else {
#pragma GCC unroll 16
          for (int i = 0; i < kPixels; ++i) {
            if (i < tap->begin || i >= tap->end) continue;
#pragma GCC unroll 4
            for (int k = 0; k < kVecs; ++k) {
              sums[i][k] += spread(at + i * step + k * kL, w) * weight[k];
            }
          }
        }
      }
    }
  }

  template <int kPixels>
  void add_run(V (&sums)[kPixels][1], const Acc* from, int64_t step, const InPlaceTap* taps,
               const TapRun& run, const Acc* weights) const {
    if (run.count == 3) {
      add_taps<kPixels, 3>(sums, from, step, taps, run.apart, weights);
    } else if (run.count == 2) {
      add_taps<kPixels, 2>(sums, from, step, taps, run.apart, weights);
    } else {
      add_taps<kPixels, 1>(sums, from, step, taps, run.apart, weights);
    }
  }

  // Pixel u meets tap t at result u - t. from: as spread() has it.
  template <int kPixels, int kTaps>
  void add_taps(V (&sums)[kPixels][1], const Acc* from, int64_t step, const InPlaceTap* taps,
                int64_t apart, const Acc* weights) const {
    constexpr int kMet = kPixels + kTaps - 1;
    int first = kMet, last = 0;  // of the pixels that are within the image
#pragma GCC unroll 4
    for (int t = 0; t < kTaps; ++t) {
      const InPlaceTap& tap = taps[t * apart];
      if (tap.begin >= tap.end) continue;
      first = std::min(first, tap.begin + t), last = std::max(last, tap.end + t);
    }
    const Acc* const at = from + taps->source;
    for (int64_t w = 0; w < width_; ++w) {
      V weight[kTaps];
#pragma GCC unroll 4
      for (int t = 0; t < kTaps; ++t) {
        weight[t] = load<V>(weights + taps[t * apart].weight + w * channels_.pitch());
      }
      const auto add = [&](int u) {
        const auto x = spread(at + u * step, w);
#pragma GCC unroll 4
        for (int t = 0; t < kTaps; ++t) {
          if (u - t >= 0 && u - t < kPixels) sums[u - t][0] += x * weight[t];
        }
      };
      if (first == 0 && last == kMet) {
#pragma GCC unroll 16
        for (int u = 0; u < kMet; ++u) add(u);
      } else {
#pragma GCC unroll 16
        for (int u = 0; u < kMet; ++u) {
          if (u >= first && u < last) add(u);
        }
      }
    }
  }

  // Channel w of each group, in all lanes of it. at: a vector's first channel; of wide groups the
  // group's.
  auto spread(const Acc* at, int64_t w) const {
    if constexpr (kWide) {
      return at[w];
    } else if constexpr (kGrouped) {
      return __builtin_shuffle(load<V>(at), spreads_[w]);
    } else {
      return load<V>(at);
    }
  }

  const ChannelVectors<Acc> channels_;
  const int64_t width_;  // channels of a group
  Acc* const bias_;
  index_t<Acc> spreads_[kL];
  std::vector<Part> parts_;
};

}  // namespace braze::cpu
