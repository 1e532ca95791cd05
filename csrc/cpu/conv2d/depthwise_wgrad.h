// The weight gradient of convolutions of one filter a channel: dw[channel][tap] = sum over pixels
// of dy times x, channels across the lanes. Blocks of images are copied into slabs in the cache
// (patches.h); a block's sums are made from zero before they join the others. Images are split
// among a fixed number of parts with sums of their own, added in order.
#pragma once

#include "cpu/conv2d/depthwise.h"

namespace braze::cpu {

template <typename T>
struct DepthwiseWgradPlan {
  using Acc = acc_t<T>;
  explicit DepthwiseWgradPlan(const WeightGradient& g)
      : blocks(g.h, g.w, g.groups, g.x.c == 1),
        taps(g.h.taps() * g.w.taps()),
        pitch(round_up(blocks.channels, kLanes<Acc>)),
        slab_size(blocks.slab_size(g.h, g.w)),
        dy_size(round_up(blocks.rows * g.w.out * blocks.channels + kLanes<Acc>, 16)) {
    parts = blocks.channel_blocks >= 4 * num_threads() ? 1 : std::min(num_threads(), g.images);
  }
  int64_t sums_size() const { return blocks.channel_blocks * taps * pitch; }  // of a part
  int64_t scratch() const { return slab_size + dy_size; }
  int64_t bytes() const {
    return (round_up(parts * sums_size(), 16) + num_threads() * scratch()) * sizeof(Acc);
  }

  DepthwiseBlocks<T> blocks;
  int64_t taps, pitch;  // pitch: of a tap's sums
  int64_t slab_size, dy_size;
  int64_t parts;
};

template <typename T>
class DepthwiseWgrad {
  using Acc = acc_t<T>;
  using V = vec_t<Acc>;
  static constexpr int kL = kLanes<Acc>;

 public:
  DepthwiseWgrad(const WeightGradient& g, const DepthwiseWgradPlan<T>& plan, void* workspace)
      : g_(g),
        plan_(plan),
        sums_(static_cast<Acc*>(workspace)),
        scratch_(sums_ + round_up(plan.parts * plan.sums_size(), 16)) {}

  void run() const {
    const int64_t blocks = plan_.blocks.channel_blocks;
    for_each_task(plan_.parts * blocks, [&](int64_t worker, int64_t task) {
      add_up(scratch_ + worker * plan_.scratch(), task / blocks, task % blocks);
    });
    store();
  }

 private:
  // A block of channels over a part of the images.
  void add_up(Acc* slab, int64_t part, int64_t block) const {
    const int64_t first = block * plan_.blocks.channels;
    const int64_t channels = std::min(plan_.blocks.channels, g_.groups - first);
    const Patches<T, Acc> patches(g_.h, g_.w, g_.x, channels);
    const std::vector<int64_t> offsets = patches.tap_offsets();
    Acc* const dy = slab + plan_.slab_size;
    Acc* const sums = sums_ + part * plan_.sums_size() + block * plan_.taps * plan_.pitch;
    std::fill_n(sums, plan_.taps * plan_.pitch, Acc(0));
    for (int64_t image = part * g_.images / plan_.parts;
         image < (part + 1) * g_.images / plan_.parts; ++image) {
      for (int64_t row = 0; row < g_.h.out; row += plan_.blocks.rows) {
        const int64_t end = std::min(g_.h.out, row + plan_.blocks.rows);
        patches.fill(slab, static_cast<const T*>(g_.x.data) + image * g_.x.n + first * g_.x.c,
                     row * g_.w.out, end * g_.w.out);
        const T* const from =
            static_cast<const T*>(g_.dy.data) + image * g_.dy.n + row * g_.dy.h + first * g_.dy.c;
        const bool in_place = is_in_place(channels);
        for (int64_t i = 0; !in_place && i < end - row; ++i) {
          copy_matrix(dy + i * g_.w.out * channels, channels, from + i * g_.dy.h, g_.dy.w, g_.dy.c,
                      g_.w.out, channels);
        }
        const Gradients gradients{in_place ? reinterpret_cast<const Acc*>(from) : dy,
                                  in_place ? g_.dy.h : g_.w.out * channels,
                                  in_place ? g_.dy.w : channels};
        for (int64_t c = 0; c < channels; c += kL) {
          add_block(patches, offsets, slab + c, gradients.from(c), channels, end - row, sums + c);
        }
      }
    }
  }

  // A block of dy, a vector of whose channels is read at once.
  struct Gradients {
    const Acc* first;
    int64_t row, pixel;  // strides
    Gradients from(int64_t channel) const { return {first + channel, row, pixel}; }
  };
  bool is_in_place(int64_t channels) const {
    return std::is_same_v<T, Acc> && g_.dy.c == 1 && channels % kL == 0;
  }

  // As many taps at a time as there are registers for.
  void add_block(const Patches<T, Acc>& patches, const std::vector<int64_t>& offsets,
                 const Acc* slab, const Gradients& dy, int64_t channels, int64_t rows,
                 Acc* sums) const {
    const int64_t together = even_height(plan_.taps);
    for (int64_t t = 0; t < plan_.taps; t += together) {
      with_pixels<1>(std::min(together, plan_.taps - t), 1, [&](auto taps_tag, auto) {
        add_taps<taps_tag>(slab, patches.row_offset(1), channels * g_.w.step, offsets.data() + t,
                           dy, rows, g_.w.out, sums + t * plan_.pitch, plan_.pitch);
      });
    }
  }

  template <int kTaps>
  __attribute__((noinline)) static void add_taps(const Acc* slab, int64_t row_step, int64_t step,
                                                 const int64_t* offsets, const Gradients& dy,
                                                 int64_t rows, int64_t columns, Acc* to,
                                                 int64_t pitch) {
    V sums[kTaps] = {};
    for (int64_t i = 0; i < rows; ++i, slab += row_step) {
      const Acc* at = slab;
      const Acc* from = dy.first + i * dy.row;
      for (int64_t j = 0; j < columns; ++j, at += step, from += dy.pixel) {
        const V gradient = load<V>(from);
#pragma GCC unroll 16
        for (int t = 0; t < kTaps; ++t) sums[t] += gradient * load<V>(at + offsets[t]);
      }
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTaps; ++t, to += pitch) cpu::store(to, load<V>(to) + sums[t]);
  }

  void store() const {
    const TapShifts taps_h(g_.h), taps_w(g_.w);
    T* const dw = static_cast<T*>(const_cast<void*>(g_.dw.data));
    for (int64_t g = 0; g < g_.groups; ++g) {
      const int64_t block = g / plan_.blocks.channels;
      const Acc* from =
          sums_ + block * plan_.taps * plan_.pitch + g - block * plan_.blocks.channels;
      for (const int64_t th : taps_h.order) {
        for (const int64_t tw : taps_w.order) {
          Acc sum = 0;
          for (int64_t part = 0; part < plan_.parts; ++part) {
            sum += from[part * plan_.sums_size()];
          }
          dw[g * g_.dw.n + th * g_.dw.h + tw * g_.dw.w] = T(sum);
          from += plan_.pitch;
        }
      }
    }
  }

  const WeightGradient& g_;
  const DepthwiseWgradPlan<T> plan_;
  Acc* sums_;
  Acc* scratch_;
};

}  // namespace braze::cpu
