// Convolutions of one filter a channel, fprop and dgrad: nothing that two results of different
// channels share, so that channels go across the lanes and memory is the limit. A block of an image
// is copied into a slab in the cache (patches.h), which any layout and padding become; a tile of
// results in a row meets each tap's weights once.
#pragma once

#include "cpu/conv2d/passes.h"
#include "cpu/conv2d/patches.h"
#include "cpu/conv2d/store.h"

namespace braze::cpu {

// Channels of a block, in whole vectors but for the last block, and output rows, so that a slab of
// `rows` rows fits into half of a second-level cache. Of channels_last images all channels, unless
// they are very many: memory is then read in order.
template <typename T>
struct DepthwiseBlocks {
  using Acc = acc_t<T>;
  static constexpr int64_t kMostChannels = 64, kMostAdjacent = 1024;
  static constexpr int64_t kSlabBytes = int64_t{512} << 10;

  DepthwiseBlocks(const Axis& h, const Axis& w, int64_t groups, bool are_adjacent)
      : channel_blocks(ceil_div(groups, are_adjacent ? kMostAdjacent : kMostChannels)),
        channels(std::min(groups, round_up(ceil_div(groups, channel_blocks), kLanes<Acc>))),
        rows(Patches<T, Acc>::rows_within(h, w, channels, kSlabBytes / int64_t{sizeof(Acc)})) {
    channel_blocks = ceil_div(groups, channels);
  }
  int64_t row_blocks(const Axis& h) const { return ceil_div(h.out, rows); }
  int64_t slab_size(const Axis& h, const Axis& w) const {
    return round_up(Patches<T, Acc>::slab_size(h, w, channels, rows * w.out), 16);
  }

  int64_t channel_blocks, channels, rows;
};

template <typename T>
struct DepthwisePlan {
  using Acc = acc_t<T>;
  explicit DepthwisePlan(const Convolution& conv)
      : blocks(conv.h, conv.w, conv.groups, conv.src.c == 1),
        pitch(round_up(blocks.channels, kLanes<Acc>)),
        slab_size(blocks.slab_size(conv.h, conv.w)),
        row_size(round_up(conv.w.out * pitch, 16)),
        weights_size(round_up(blocks.channel_blocks * conv.taps() * pitch, 16)) {}
  int64_t tasks(const Convolution& conv) const {
    return conv.images * blocks.channel_blocks * blocks.row_blocks(conv.h);
  }
  int64_t scratch() const { return slab_size + row_size; }
  int64_t bytes() const { return (weights_size + num_threads() * scratch()) * sizeof(Acc); }

  DepthwiseBlocks<T> blocks;
  int64_t pitch;  // of a pixel's results, of a tap's weights
  int64_t slab_size, row_size, weights_size;
};

template <typename T>
class Depthwise {
  using Acc = acc_t<T>;
  using V = vec_t<Acc>;
  static constexpr int kL = kLanes<Acc>;
  static constexpr int64_t kMostStored = 64;  // channels, by store_pixels

 public:
  Depthwise(const Convolution& conv, const DepthwisePlan<T>& plan, void* workspace)
      : conv_(conv),
        plan_(plan),
        weights_(static_cast<Acc*>(workspace)),
        scratch_(weights_ + plan.weights_size) {}

  void run() const {
    pack_weights();
    const DepthwiseBlocks<T>& blocks = plan_.blocks;
    const int64_t row_blocks = blocks.row_blocks(conv_.h);
    for_each_task(plan_.tasks(conv_), [&](int64_t worker, int64_t task) {
      const int64_t block = task % blocks.channel_blocks;
      const int64_t row = task / blocks.channel_blocks % row_blocks * blocks.rows;
      convolve(scratch_ + worker * plan_.scratch(), block,
               task / blocks.channel_blocks / row_blocks, row,
               std::min(conv_.h.out, row + blocks.rows));
    });
  }

 private:
  int64_t channels_of(int64_t block) const {
    return std::min(plan_.blocks.channels, conv_.groups - block * plan_.blocks.channels);
  }

  // [block][tap][channel], taps in the order of their shifts.
  void pack_weights() const {
    const TapShifts taps_h(conv_.h), taps_w(conv_.w);
    const T* const weight = static_cast<const T*>(conv_.weight);
    Acc* to = weights_;
    for (int64_t block = 0; block < plan_.blocks.channel_blocks; ++block) {
      const int64_t first = block * plan_.blocks.channels, channels = channels_of(block);
      for (const int64_t th : taps_h.order) {
        for (const int64_t tw : taps_w.order) {
          const T* const tap = weight + first * conv_.weight_group +
                               conv_.tap_h[th] * conv_.weight_h + conv_.tap_w[tw] * conv_.weight_w;
          for (int64_t c = 0; c < plan_.pitch; ++c) {
            to[c] = c < channels ? Acc(tap[c * conv_.weight_group]) : Acc(0);
          }
          to += plan_.pitch;
        }
      }
    }
  }

  void convolve(Acc* slab, int64_t block, int64_t image, int64_t begin, int64_t end) const {
    const int64_t first = block * plan_.blocks.channels, channels = channels_of(block);
    const Patches<T, Acc> patches(conv_.h, conv_.w, conv_.src, channels);
    patches.fill(slab,
                 static_cast<const T*>(conv_.src.data) + image * conv_.src.n + first * conv_.src.c,
                 begin * conv_.w.out, end * conv_.w.out);
    const std::vector<int64_t> offsets = patches.tap_offsets();
    const Acc* const weights = weights_ + block * conv_.taps() * plan_.pitch;
    Acc* const results = slab + plan_.slab_size;
    const Tensor4dRef& d = conv_.dst_strides;
    const bool direct = std::is_same_v<T, Acc> && !conv_.bias && d.c == 1 && channels % kL == 0;
    for (int64_t i = begin; i < end; ++i) {
      const Acc* const row = slab + patches.row_offset(i - begin);
      T* const to = static_cast<T*>(conv_.dst) + image * d.n + i * d.h + first * d.c;
      Acc* const sums = direct ? reinterpret_cast<Acc*>(to) : results;
      const int64_t pitch = direct ? d.w : plan_.pitch;
      for (int64_t c = 0; c < channels; c += kL) {
        convolve_row(row + c, channels * conv_.w.step, offsets, weights + c, sums + c, pitch);
      }
      for (int64_t c = 0; !direct && c < channels; c += kMostStored) {
        store_pixels(results + c, plan_.pitch, conv_.w.out, std::min(kMostStored, channels - c),
                     conv_.bias, first + c, to + c * d.c, d.w, d.c);
      }
    }
  }

  // A vector of channels of a row of results; windows begin `step` apart.
  void convolve_row(const Acc* row, int64_t step, const std::vector<int64_t>& offsets,
                    const Acc* weights, Acc* results, int64_t pitch) const {
    const int64_t columns = conv_.w.out, width = even_height(columns);
    const int64_t taps = static_cast<int64_t>(offsets.size());
    for (int64_t j = 0; j < columns; j += width) {
      const int64_t first = std::min(j, columns - width);  // the last tile may overlap
      with_pixels<1>(width, 1, [&](auto pixels_tag, auto) {
        convolve_tile<pixels_tag>(row + first * step, step, taps, offsets.data(), weights,
                                  plan_.pitch, results + first * pitch, pitch);
      });
    }
  }

  template <int kPixels>
  __attribute__((noinline)) static void convolve_tile(const Acc* row, int64_t step, int64_t taps,
                                                      const int64_t* offsets, const Acc* weights,
                                                      int64_t weights_pitch, Acc* results,
                                                      int64_t pitch) {
    V sums[kPixels] = {};
    for (int64_t t = 0; t < taps; ++t, weights += weights_pitch) {
      const V weight = load<V>(weights);
      const Acc* at = row + offsets[t];
#pragma GCC unroll 16
      for (int i = 0; i < kPixels; ++i, at += step) sums[i] += load<V>(at) * weight;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kPixels; ++i) cpu::store(results + i * pitch, sums[i]);
  }

  const Convolution& conv_;
  const DepthwisePlan<T> plan_;
  Acc* weights_;
  Acc* scratch_;
};

}  // namespace braze::cpu
