// The weight gradient of few input channels: (tap, channel) x filters = sums over pixels of values
// of x, each broadcast, times rows of dy, filters across the lanes. Taps that adjoin in the image
// adjoin in the slab (patches.h) too, so that no patch is copied; dy is read where it is if it can
// be. Blocks of rows are split among a fixed number of parts with sums of their own, added in
// order.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu/conv2d/passes.h"
#include "cpu/conv2d/patches.h"
#include "cpu/conv2d/store.h"

namespace braze::cpu {

template <typename T>
struct NarrowInputPlan {
  using Acc = acc_t<T>;
  static constexpr int kL = kLanes<Acc>;
  // Pixels of a sum that is made from zero: so much of dy stays in the first-level cache while all
  // taps meet it. Elements of a slab: 128 KiB of fp32.
  static constexpr int64_t kPixels = 128, kSlab = 32768;

  explicit NarrowInputPlan(const WeightGradient& g)
      : columns(g.h.taps() * g.w.taps() * g.channels),
        filters(round_up(g.filters, kL)),
        in_place(std::is_same_v<T, Acc> && g.dy.c == 1),
        rows(Patches<T, Acc>::rows_within(g.h, g.w, g.channels, kSlab)) {
    slab_size = round_up(Patches<T, Acc>::slab_size(g.h, g.w, g.channels, rows * g.w.out), 16);
    dy_size = kPixels * filters;
    parts = std::min(num_threads(), units(g));
  }
  int64_t units(const WeightGradient& g) const { return g.images * ceil_div(g.h.out, rows); }
  int64_t sums_size() const { return columns * filters; }  // of a part
  int64_t scratch() const { return slab_size + dy_size; }
  int64_t bytes() const {
    return (round_up(parts * sums_size(), 16) + num_threads() * scratch()) * sizeof(Acc);
  }

  int64_t columns, filters;
  bool in_place;
  int64_t rows;  // of the result, in a block
  int64_t slab_size, dy_size, parts;
};

template <typename T>
class NarrowInput {
  using Acc = acc_t<T>;
  using Plan = NarrowInputPlan<T>;
  static constexpr int kL = Plan::kL;

 public:
  NarrowInput(const WeightGradient& g, const Plan& plan, void* workspace)
      : g_(g),
        plan_(plan),
        patches_(g.h, g.w, g.x, g.channels),
        sums_(static_cast<Acc*>(workspace)),
        scratch_(sums_ + round_up(plan.parts * plan.sums_size(), 16)) {}

  void run() const {
    for_each_task(plan_.parts, [&](int64_t worker, int64_t part) {
      Acc* const sums = sums_ + part * plan_.sums_size();
      std::fill_n(sums, plan_.sums_size(), Acc(0));
      const int64_t units = plan_.units(g_), blocks = units / g_.images;
      for (int64_t i = part * units / plan_.parts; i < (part + 1) * units / plan_.parts; ++i) {
        add_block(scratch_ + worker * plan_.scratch(), i / blocks, i % blocks * plan_.rows, sums);
      }
    });
    store();
  }

 private:
  // Values of dy's pixels, `stride` apart, and of the windows that they meet.
  struct Pixels {
    const Acc* dy;
    int64_t stride;
    const Acc* window;
    int64_t count;
  };

  void add_block(Acc* slab, int64_t image, int64_t first, Acc* sums) const {
    const int64_t last = std::min(g_.h.out, first + plan_.rows), width = g_.w.out;
    patches_.fill(slab, static_cast<const T*>(g_.x.data) + image * g_.x.n, first * width,
                  last * width);
    Acc* const copied = slab + plan_.slab_size;
    for (int64_t row = first; row < last; ++row) {
      const T* const dy = static_cast<const T*>(g_.dy.data) + image * g_.dy.n + row * g_.dy.h;
      for (int64_t q = 0; q < width; q += Plan::kPixels) {
        const int64_t count = std::min(Plan::kPixels, width - q);
        const T* const from = dy + q * g_.dy.w;
        const Acc* const window =
            slab + patches_.row_offset(row - first) + q * g_.w.step * g_.channels;
        if constexpr (std::is_same_v<T, Acc>) {
          if (plan_.in_place && has_more(image, row, q + count)) {
            add_pixels({from, g_.dy.w, window, count}, sums);
            continue;
          }
        }
        copy_dy(copied, from, count);
        add_pixels({copied, plan_.filters, window, count}, sums);
      }
    }
  }

  // Whether whole vectors may be read of the pixels before that one: where filters fill no vectors,
  // the idle lanes have what follows, which is ignored, but has to be memory of dy's.
  bool has_more(int64_t image, int64_t row, int64_t q) const {
    const int64_t pixels = ((g_.images - image) * g_.h.out - row) * g_.w.out - q;
    return g_.filters % kL == 0 || pixels * g_.filters >= kL;
  }

  void copy_dy(Acc* to, const T* from, int64_t count) const {
    copy_matrix(to, plan_.filters, from, g_.dy.w, g_.dy.c, count, g_.filters);
    for (int64_t i = 0; i < count; ++i) {
      std::fill(to + i * plan_.filters + g_.filters, to + (i + 1) * plan_.filters, Acc(0));
    }
  }

  void add_pixels(const Pixels& pixels, Acc* sums) const {
    const int64_t step = g_.w.step * g_.channels, vecs = plan_.filters / kL;
    for (const auto& run : patches_.runs()) {
      const int64_t height = even_height(run.length);
      for (int64_t i = 0; i < run.length; i += height) {
        const Acc* const x = pixels.window + run.offset + i;
        for (int64_t j = 0; j < vecs; j += 2) {
          const Acc* const dy = pixels.dy + j * kL;
          const auto times = [&](auto values_tag, auto vecs_tag) {
            outer_products<Acc, values_tag, vecs_tag>(
                pixels.count, [=](int64_t p) { return x + p * step; }, Adjacent{},
                [=, stride = pixels.stride](int64_t p) { return dy + p * stride; },
                sums + i * plan_.filters + j * kL, plan_.filters, true);
          };
          with_pixels<1>(std::min(height, run.length - i), std::min<int64_t>(2, vecs - j), times);
        }
      }
      sums += run.length * plan_.filters;
    }
  }

  void store() const {
    const Acc* from = sums_;
    for (const int64_t th : patches_.taps_h.order) {
      for (const int64_t tw : patches_.taps_w.order) {
        for (int64_t c = 0; c < g_.channels; ++c, from += plan_.filters) {
          T* const to = static_cast<T*>(const_cast<void*>(g_.dw.data)) + c * g_.dw.c +
                        th * g_.dw.h + tw * g_.dw.w;
          add_parts(from, plan_.sums_size(), plan_.parts, g_.filters, to, g_.dw.n);
        }
      }
    }
  }

  const WeightGradient& g_;
  const Plan plan_;
  const Patches<T, Acc> patches_;
  Acc* sums_;
  Acc* scratch_;
};

}  // namespace braze::cpu
