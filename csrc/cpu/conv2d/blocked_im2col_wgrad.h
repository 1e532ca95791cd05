// The weight gradient by blocked im2col: filters x (tap, channel) = sums over pixels of dy times
// patches. Chunks of pixels are copied block by block into rows of dy and of patches (patches.h);
// columns of patches are across the lanes. A step of the reduction is a pixel, or a
// pair of them in bf16 where the processor multiplies pairs. Pixels are split among a fixed number
// of parts with sums of their own, added in order.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu/conv2d/passes.h"
#include "cpu/conv2d/patches.h"
#include "cpu/conv2d/pixel_runs.h"
#include "cpu/conv2d/store.h"

namespace braze::cpu {

template <typename T, typename Step>
struct BlockedIm2colWgradPlan {
  using Acc = acc_t<T>;
  static constexpr bool kPairs = std::is_same_v<Step, Bf16Pair>;
  using Element = std::conditional_t<kPairs, T, Acc>;
  static constexpr int kL = kLanes<Acc>;
  // Steps of a chunk, so that a few columns of each operand fit into the first-level cache; filters
  // of a task and about how many columns, so that the chunk and the sums fit into the second-level
  // one.
  static constexpr int64_t kSteps = 128, kFilters = 256, kColumns = 288;
  static constexpr int64_t kPixels = kPairs ? 2 * kSteps : kSteps;
  // Columns of one operand that cost less to read the other one in place, from the second-level
  // cache each time, than to copy it.
  static constexpr int64_t kFew = 64;

  explicit BlockedIm2colWgradPlan(const WeightGradient& g)
      : pixels(g.h.out * g.w.out),
        taps(g.h.taps() * g.w.taps()),
        channels(
            std::min(g.channels, std::max<int64_t>(kL, kColumns / taps / (2 * kL) * (2 * kL)))),
        channel_blocks(ceil_div(g.channels, channels)),
        filter_blocks(ceil_div(g.filters, kFilters)),
        filters(ceil_div(g.filters, filter_blocks)),
        columns(round_up(taps * g.channels, kL)),
        together(std::clamp<int64_t>(kPixels / round_up(pixels, kPairs ? 2 : 1), 1, g.images)),
        pieces(ceil_div(pixels, kPixels)),
        piece(round_up(ceil_div(pixels, pieces), kPairs ? 2 : 1)),
        dy_rows_adjoin(g.dy.h == g.w.out * g.dy.w),
        is_inside(taps == 1 && stays_inside(g.h) && stays_inside(g.w) && g.h.step == 1 &&
                  g.w.step == 1 && g.h.extent == g.h.out && g.w.extent == g.w.out),
        x_adjoins(is_inside && lies_in_rows(g, g.x)),
        dy_adjoins(lies_in_rows(g, g.dy)),
        x_in_place(!kPairs && std::is_same_v<T, Acc> && x_adjoins && channels % kL == 0 &&
                   g.channels % channels == 0 && (!collide(g.x.w) || filters <= kFew)),
        pairs_adjoin(kPairs && is_inside && g.x.c == 1 && g.x.h == g.w.out * g.x.w),
        dy_in_place(!kPairs && std::is_same_v<T, Acc> && dy_adjoins &&
                    (!collide(g.dy.w) || taps * channels <= kFew)) {
    const int64_t block = round_up(taps * channels + 1, kL);  // columns of a task
    const auto apart = [](int64_t row) { return collide(row) ? row + kL : row; };
    ld = x_in_place ? g.x.w : apart(block);
    dy_ld = dy_in_place ? g.dy.w : apart(round_up(filters, kL));
    const int64_t tasks = g.groups * filter_blocks * channel_blocks;
    parts = tasks >= 4 * num_threads() ? 1 : std::min(num_threads(), chunks(g));
    dy_size = dy_in_place ? 0 : kSteps * dy_ld;
    x_size = x_in_place ? 0 : kSteps * ld + kL;
    slab_size =
        x_in_place || pairs_adjoin
            ? 0
            : round_up(Patches<T, Element>::slab_size(g.h, g.w, channels, std::min(pixels, piece)),
                       16);
    copied_size = dy_rows_adjoin ? 0 : kPixels * filters;
  }
  int64_t chunks(const WeightGradient& g) const { return ceil_div(g.images, together) * pieces; }
  int64_t sums_size(const WeightGradient& g) const {  // of a part
    return g.groups * g.filters * columns;
  }
  // Bytes of a worker.
  int64_t scratch() const {
    return round_up(
        (dy_size + x_size) * sizeof(Acc) + slab_size * sizeof(Element) + copied_size * sizeof(T),
        64);
  }
  int64_t bytes(const WeightGradient& g) const {
    return round_up(parts * sums_size(g), 16) * sizeof(Acc) + num_threads() * scratch();
  }

  // Rows of elements that would meet in a few sets of the first-level cache.
  static bool collide(int64_t row) { return row * 4 % 512 == 0; }
  // Whether a chunk of a tensor are rows of adjoining elements, evenly spaced.
  bool lies_in_rows(const WeightGradient& g, const Tensor4dRef& t) const {
    return t.c == 1 && t.h == g.w.out * t.w && (together == 1 || t.n == pixels * t.w);
  }

  int64_t pixels, taps;
  int64_t channels, channel_blocks, filter_blocks, filters;  // of a task; tasks of a group
  int64_t columns;                                           // of the sums
  int64_t together, pieces, piece;  // images of a chunk, or parts of one, of `piece` pixels
  bool dy_rows_adjoin;
  bool is_inside;  // filters of one pixel that meet the one with the number of the result's
  bool x_adjoins, dy_adjoins;  // whether chunks are rows of adjoining elements
  bool x_in_place;
  bool pairs_adjoin;  // of filters of one pixel: what they meet are adjoining rows, in 16 bits
  bool dy_in_place;
  int64_t ld, dy_ld;  // of rows
  int64_t parts;
  int64_t dy_size, x_size, slab_size, copied_size;
};

template <typename T, typename Step>
class BlockedIm2colWgrad {
  using Acc = acc_t<T>;
  using Plan = BlockedIm2colWgradPlan<T, Step>;
  using Element = typename Plan::Element;
  static constexpr int kL = Plan::kL;

 public:
  BlockedIm2colWgrad(const WeightGradient& g, const Plan& plan, void* workspace)
      : g_(g),
        plan_(plan),
        sums_(static_cast<Acc*>(workspace)),
        scratch_(reinterpret_cast<char*>(sums_ + round_up(plan.parts * plan.sums_size(g), 16))) {}

  void run() const {
    const int64_t blocks = plan_.filter_blocks * plan_.channel_blocks;
    for_each_task(plan_.parts * g_.groups * blocks, [&](int64_t worker, int64_t task) {
      const int64_t filter = task % blocks / plan_.channel_blocks * plan_.filters;
      const int64_t channel = task % plan_.channel_blocks * plan_.channels;
      add_up(scratch_ + worker * plan_.scratch(),
             {task / blocks / g_.groups, task / blocks % g_.groups, filter,
              std::min(plan_.filters, g_.filters - filter), channel,
              std::min(plan_.channels, g_.channels - channel)});
    });
    parallel_for(0, g_.groups * g_.filters, ceil_div(16384, plan_.columns + 1),
                 [&](int64_t first, int64_t last) {
                   for (int64_t i = first; i < last; ++i) store(i);
                 });
  }

 private:
  // What is summed up by a task: those filters and channels of a group, over a part of the pixels.
  struct Task {
    int64_t part, group, filter, filters, channel, channels;
  };

  void add_up(char* scratch, const Task& task) const {
    const Patches<T, Element> patches(g_.h, g_.w, g_.x, task.channels);
    Acc* const dy = reinterpret_cast<Acc*>(scratch);
    Acc* const x = dy + plan_.dy_size;
    Element* const slab = reinterpret_cast<Element*>(x + plan_.x_size);
    T* const copied = reinterpret_cast<T*>(slab + plan_.slab_size);
    Acc* const sums = sums_ + task.part * plan_.sums_size(g_) +
                      (task.group * g_.filters + task.filter) * plan_.columns +
                      task.channel * plan_.taps;
    const int64_t chunks = plan_.chunks(g_);
    const int64_t first = task.part * chunks / plan_.parts;
    const int64_t last = (task.part + 1) * chunks / plan_.parts;
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t image = chunk / plan_.pieces * plan_.together;
      const int64_t images = std::min(plan_.together, g_.images - image);
      const int64_t begin = chunk % plan_.pieces * plan_.piece;
      const int64_t end = std::min(plan_.pixels, begin + plan_.piece), pixels = end - begin;
      const int64_t padded = Plan::kPairs ? round_up(pixels, 2) : pixels;
      const int64_t width = round_up(patches.depth(), kL);
      const T* const x_from = static_cast<const T*>(g_.x.data) + image * g_.x.n +
                              (task.group * g_.channels + task.channel) * g_.x.c;
      const T* const dy_from = static_cast<const T*>(g_.dy.data) + image * g_.dy.n +
                               (task.group * g_.filters + task.filter) * g_.dy.c;
      for (int64_t i = 0; i < images; ++i) {
        if (plan_.pairs_adjoin) {
          pack_pairs(reinterpret_cast<uint32_t*>(x) + i * padded / 2 * plan_.ld, plan_.ld,
                     reinterpret_cast<const uint16_t*>(x_from + i * g_.x.n + begin * g_.x.w), 1,
                     g_.x.w, task.channels, pixels);
        } else if (!plan_.x_in_place) {
          patches.fill(slab, x_from + i * g_.x.n, begin, end);
          if constexpr (Plan::kPairs) {
            patches.copy_pairs(slab, begin, end,
                               reinterpret_cast<uint32_t*>(x) + i * padded / 2 * plan_.ld, plan_.ld,
                               width);
          } else {
            patches.copy(slab, begin, end, x + i * padded * plan_.ld, plan_.ld);
          }
        }
        if (!plan_.dy_in_place) {
          copy_dy(dy, copied, task, dy_from + i * g_.dy.n, begin, end,
                  i * padded / (Plan::kPairs ? 2 : 1));
        }
      }
      const Acc* const left =
          plan_.dy_in_place ? reinterpret_cast<const Acc*>(dy_from) + begin * g_.dy.w : dy;
      const Acc* const right =
          plan_.x_in_place ? reinterpret_cast<const Acc*>(x_from) + begin * g_.x.w : x;
      const int64_t row = begin + images * pixels;  // of the next chunk
      const bool adds = chunk > first;
      const TapShifts::Range columns =
          adds && images == 1 ? columns_inside(patches, begin, end, task.channels, width)
                              : TapShifts::Range{0, width};
      multiply(left, task.filters, right, columns, images * padded / (Plan::kPairs ? 2 : 1), sums,
               adds,
               {dy_from + row * g_.dy.w, plan_.dy_adjoins && task.filters == g_.dy.w ? g_.dy.w : 0},
               {x_from + row * g_.x.w, plan_.x_adjoins && task.channels == g_.x.w ? g_.x.w : 0});
    }
  }

  // Columns of the patches of pixels [begin, end) of an image, in whole pairs of vectors: all but
  // those in front and behind that are zeros, since their taps meet padding alone.
  TapShifts::Range columns_inside(const Patches<T, Element>& patches, int64_t begin, int64_t end,
                                  int64_t channels, int64_t width) const {
    const TapShifts::Range taps =
        patches.taps_h.inside(g_.h, begin / g_.w.out, (end - 1) / g_.w.out);
    const int64_t each = patches.taps_w.shifts.size() * channels;
    return {taps.begin * each / (2 * kL) * (2 * kL),
            std::min(width, round_up(taps.end * each, 2 * kL))};
  }

  // What the next chunk is made of, `elements` for each of this one's steps; 0: not known.
  struct Ahead {
    const T* first;
    int64_t elements;
  };

  // Rows of an image's filters, from step `first` on.
  void copy_dy(Acc* to, T* copied, const Task& task, const T* from, int64_t begin, int64_t end,
               int64_t first) const {
    const Tensor4dRef& d = g_.dy;
    int64_t pixel_stride = d.w, filter_stride = d.c;
    if (plan_.dy_rows_adjoin) {
      from += begin * d.w;
    } else {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t f = 0; f < task.filters; ++f) {
          copied[(i - begin) * task.filters + f] =
              from[i / g_.w.out * d.h + i % g_.w.out * d.w + f * d.c];
        }
      }
      from = copied, pixel_stride = task.filters, filter_stride = 1;
    }
    Acc* const rows = to + first * plan_.dy_ld;
    if constexpr (Plan::kPairs) {
      pack_pairs(reinterpret_cast<uint32_t*>(rows), plan_.dy_ld,
                 reinterpret_cast<const uint16_t*>(from), filter_stride, pixel_stride, task.filters,
                 end - begin);
    } else {
      copy_matrix(rows, plan_.dy_ld, from, pixel_stride, filter_stride, end - begin, task.filters);
    }
  }

  // sums, plan_.columns apart, = or += the products of columns of dy's rows and of patches, of the
  // latter the columns of a range of whole vectors. What the next chunk is made of comes closer
  // meanwhile.
  void multiply(const Acc* dy, int64_t filters, const Acc* x, const TapShifts::Range& columns,
                int64_t steps, Acc* sums, bool accumulate, const Ahead& dy_ahead,
                const Ahead& x_ahead) const {
    const int64_t height = even_height(filters), vecs = columns.end / kL;
    const int64_t ld = plan_.ld, dy_ld = plan_.dy_ld;
    const int64_t tiles = ceil_div(columns.end - columns.begin, 2 * kL) * ceil_div(filters, height);
    const auto each = [&](const Ahead& ahead) {  // bytes in a step of a tile
      return tiles ? ceil_div(ahead.elements * int64_t{sizeof(T)}, tiles) : 0;
    };
    const int64_t dy_each = each(dy_ahead), x_each = each(x_ahead);
    const char* dy_next = reinterpret_cast<const char*>(dy_ahead.first);
    const char* x_next = reinterpret_cast<const char*>(x_ahead.first);
    for (int64_t j = columns.begin / kL; j < vecs; j += 2) {
      const Acc* const right = x + j * kL;
      for (int64_t i = 0; i < filters; i += height) {
        const Step* const left = reinterpret_cast<const Step*>(dy + i);
        const auto times = [&](auto rows_tag, auto vecs_tag) {
          outer_products<Acc, rows_tag, vecs_tag>(
              steps, [=](int64_t p) { return left + p * dy_ld; }, Adjacent{},
              [=](int64_t p) {
                if (dy_each) __builtin_prefetch(dy_next + p * dy_each, 0, 2);
                if (x_each) __builtin_prefetch(x_next + p * x_each, 0, 2);
                return right + p * ld;
              },
              sums + i * plan_.columns + j * kL, plan_.columns, accumulate);
        };
        with_pixels<1>(std::min(height, filters - i), std::min<int64_t>(2, vecs - j), times);
        dy_next += steps * dy_each, x_next += steps * x_each;
      }
    }
  }

  void store(int64_t filter) const {
    T* const dw = static_cast<T*>(const_cast<void*>(g_.dw.data)) + filter * g_.dw.n;
    const TapShifts taps_h(g_.h), taps_w(g_.w);
    const Acc* from = sums_ + filter * plan_.columns;
    for (int64_t c = 0; c < g_.channels; c += plan_.channels) {
      const int64_t channels = std::min(plan_.channels, g_.channels - c);
      for (const int64_t th : taps_h.order) {
        for (const int64_t tw : taps_w.order) {
          add_parts(from, plan_.sums_size(g_), plan_.parts, channels,
                    dw + c * g_.dw.c + th * g_.dw.h + tw * g_.dw.w, g_.dw.c);
          from += channels;
        }
      }
    }
  }

  const WeightGradient& g_;
  const Plan plan_;
  Acc* sums_;
  char* scratch_;
};

}  // namespace braze::cpu
