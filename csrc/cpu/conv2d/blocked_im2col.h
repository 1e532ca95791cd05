// Blocked im2col for fprop and dgrad: patches of a block of pixels are copied into rows in the
// second-level cache (patches.h) and multiplied with packed weights, filters across the lanes. A
// value that is copied is multiplied with all filters, so that the copy costs little from some 32
// of them on. A step of the reduction is a value, or a pair of them in bf16 where the processor
// multiplies pairs. Values of windows in rows long enough are read from the slab, where those of
// neighbours overlap, without a copy.
#pragma once

#include <type_traits>

#include "cpu/conv2d/passes.h"
#include "cpu/conv2d/patches.h"
#include "cpu/conv2d/store.h"

namespace braze::cpu {

template <typename T, typename Step>
struct BlockedIm2colPlan {
  using Acc = acc_t<T>;
  static constexpr bool kPairs = std::is_same_v<Step, Bf16Pair>;
  using Element = std::conditional_t<kPairs, T, Acc>;
  static constexpr int kL = kLanes<Acc>, kPanel = 2 * kL;
  static constexpr int kValues = kPairs ? 2 : 1;  // of a step
  // Bytes of a block of patches: half of a second-level cache of 1 MiB.
  static constexpr int64_t kBlockBytes = int64_t{512} << 10;

  explicit BlockedIm2colPlan(const Convolution& conv)
      : pixels(conv.h.out * conv.w.out),
        depth(conv.taps() * conv.channels),
        steps(ceil_div(depth, kValues)),
        panels(ceil_div(conv.filters, kPanel)),
        packed_filters(round_up(conv.filters, kL)),
        packed_size(round_up(conv.groups * packed_filters * steps, 16)) {
    // Rows a multiple of a page apart would meet in one set of the first-level cache.
    const int64_t row = round_up(depth + 1, kL);
    ld = row * sizeof(Element) % 512 == 0 ? row + kL : row;
    const int64_t window_bytes = conv.w.step * conv.channels * int64_t{sizeof(Element)};
    windows = conv.w.out >= kLeastPixels && window_bytes % 4096 != 0 &&
              conv.channels % kValues == 0;  // a step's values lie in one pixel
    constexpr int64_t kBlockElements = kBlockBytes / int64_t{sizeof(Element)};
    const int64_t most =
        windows ? conv.w.out * Patches<T, Element>::rows_within(conv.h, conv.w, conv.channels,
                                                                kBlockElements)
                : std::clamp<int64_t>(kBlockElements / ld, 4 * kMostPixels, 64 * kMostPixels);
    together =
        windows ? 1 : std::clamp<int64_t>(most / std::max<int64_t>(1, pixels), 1, conv.images);
    blocks = together > 1 ? 1 : ceil_div(pixels, most);
    const int64_t wanted = 2 * num_threads();
    while (num_threads() > 1 && tasks(conv) < wanted && together > 1) together /= 2;
    while (num_threads() > 1 && tasks(conv) < wanted && pixels / blocks > 4 * kMostPixels) ++blocks;
    while (num_threads() > 1 && tasks(conv) < wanted && filter_blocks < panels) ++filter_blocks;
    // Whole tiles of rows, or whole rows of the result.
    const int64_t unit = windows ? conv.w.out : kMostPixels;
    block = together > 1 ? pixels : round_up(ceil_div(pixels, blocks), unit);
    blocks = pixels ? ceil_div(pixels, block) : 0;
    patches_size = windows ? 0 : round_up(together * block * ld + kVecBytes, 64);
    slab_size = round_up(
        Patches<T, Element>::slab_size(conv.h, conv.w, conv.channels, std::min(block, pixels)), 64);
    tile_size = together * block * kPanel;
  }
  int64_t tasks(const Convolution& conv) const {
    return conv.groups * ceil_div(conv.images, together) * blocks * filter_blocks;
  }
  // Bytes of a worker.
  int64_t scratch() const {
    return round_up((patches_size + slab_size) * sizeof(Element) + tile_size * sizeof(Acc), 64);
  }

  int64_t pixels;                               // of an image
  int64_t depth, steps;                         // of a patch
  int64_t panels, packed_filters, packed_size;  // of weights
  int64_t ld;                                   // of patches
  bool windows;                                 // are not copied
  int64_t together, blocks, block;  // images of a task, or parts of one, of `block` pixels
  int64_t filter_blocks = 1;
  int64_t patches_size, slab_size, tile_size;
};

// Which steps of the reduction meet the image, of tiles of `height` pixels in rows of the result:
// where dilated filters reach into the padding, and in small images, a part of them does not.
class StepsInside {
 public:
  using Range = TapShifts::Range;

  // Of `rows` rows from first_row on. each: steps of a tap, of `depth` in all, which are gone
  // through in pieces of kDepth.
  StepsInside(const Axis& h, const Axis& w, int64_t first_row, int64_t rows, int64_t height,
              int64_t each, int64_t depth)
      : tiles_(ceil_div(w.out, height)), taps_w_(w.taps()), each_(each) {
    const TapShifts taps_h(h), taps_w(w);
    for (int64_t i = first_row; i < first_row + rows; ++i) {
      const Range taps = taps_h.inside(h, i, i);
      rows_.push_back({taps.begin * taps_w_ * each, taps.end * taps_w_ * each});
    }
    for (int64_t j = 0; j < w.out; j += height) {
      columns_.push_back(taps_w.inside(w, j, std::min(j + height, w.out) - 1));
    }
    for (int64_t tile = 0; tile < rows * tiles_; ++tile) {
      Range pieces{-1, 0};
      for (int64_t p = 0; p < depth; p += kDepth) {
        const Range steps = of(tile / tiles_, tile % tiles_, p, std::min(depth, p + kDepth));
        if (steps.begin == steps.end) continue;
        if (pieces.begin < 0) pieces.begin = p;
        pieces.end = p;
      }
      pieces_.push_back({std::max(pieces.begin, int64_t{0}), pieces.end});
    }
  }

  // Of steps [begin, end) those that tile j of row i needs: none, or all but those in front and
  // behind whose rows lie outside.
  Range of(int64_t i, int64_t j, int64_t begin, int64_t end) const {
    const Range steps{std::max(begin, rows_[i].begin), std::min(end, rows_[i].end)};
    if (steps.begin >= steps.end) return {begin, begin};
    for (int64_t tap = steps.begin / each_; tap * each_ < steps.end; ++tap) {
      const int64_t w = tap % taps_w_;
      if (w >= columns_[j].begin && w < columns_[j].end) return steps;
    }
    return {begin, begin};
  }
  // Where the first and the last piece begin that tile j of row i has steps in; both are the first
  // of all if it has none.
  Range pieces(int64_t i, int64_t j) const { return pieces_[i * tiles_ + j]; }

 private:
  int64_t tiles_, taps_w_, each_;
  std::vector<Range> rows_;     // steps
  std::vector<Range> columns_;  // of a tile: taps of a row of the filter
  std::vector<Range> pieces_;
};

template <typename T, typename Step>
class BlockedIm2col {
  using Acc = acc_t<T>;
  using Plan = BlockedIm2colPlan<T, Step>;
  using Element = typename Plan::Element;
  static constexpr int kL = Plan::kL, kPanel = Plan::kPanel, kValues = Plan::kValues;

 public:
  // packed: room for plan.packed_size elements.
  BlockedIm2col(const Convolution& conv, const Plan& plan, Acc* packed)
      : conv_(conv),
        plan_(plan),
        patches_(conv.h, conv.w, conv.src, conv.channels),
        packed_(packed) {
    if (!plan.windows) return;
    for (const int64_t tap : patches_.tap_offsets()) {
      for (int64_t c = 0; c < conv.channels; c += kValues) {
        offsets_.push_back((tap + c) / kValues);
      }
    }
  }

  // Panels of weights to pack, before the tasks; both in any order.
  int64_t panels() const { return conv_.groups * plan_.panels; }
  void pack(int64_t i) const { pack_panel_of(i / plan_.panels, i % plan_.panels); }

  int64_t tasks() const { return plan_.tasks(conv_); }
  // scratch: of plan.scratch() bytes.
  void run(char* scratch, int64_t task) const {
    const int64_t part = task % plan_.filter_blocks, block = task / plan_.filter_blocks;
    const int64_t place = block / conv_.groups, image = place / plan_.blocks * plan_.together;
    const int64_t begin = place % plan_.blocks * plan_.block;
    multiply(scratch, {block % conv_.groups, image, std::min(plan_.together, conv_.images - image),
                       begin, std::min(plan_.pixels, begin + plan_.block),
                       part * plan_.panels / plan_.filter_blocks,
                       (part + 1) * plan_.panels / plan_.filter_blocks});
  }

 private:
  // Pixels [begin, end) of some images, panels [first_panel, last_panel) of filters.
  struct Task {
    int64_t group, image, images, begin, end, first_panel, last_panel;
  };

  int64_t panel_width(int64_t j) const {
    return std::min<int64_t>(kPanel, plan_.packed_filters - j * kPanel);
  }
  Acc* packed(int64_t group, int64_t panel) const {
    return packed_ + (group * plan_.packed_filters + panel * kPanel) * plan_.steps;
  }

  // A panel of up to two vectors of filters, the steps of a patch outermost.
  void pack_panel_of(int64_t group, int64_t j) const {
    const int64_t width = panel_width(j), channels = conv_.channels;
    const int64_t filters = std::min<int64_t>(width, conv_.filters - j * kPanel);
    const T* const from = static_cast<const T*>(conv_.weight) + group * conv_.weight_group +
                          j * kPanel * conv_.weight_filter;
    Acc* const to = packed(group, j);
    if (Plan::kPairs && plan_.depth % 2) {
      std::fill_n(to + (plan_.steps - 1) * width, width, Acc(0));
    }
    int64_t step = 0;  // a value
    for (const int64_t th : patches_.taps_h.order) {
      for (const int64_t tw : patches_.taps_w.order) {
        const T* const tap =
            from + conv_.tap_h[th] * conv_.weight_h + conv_.tap_w[tw] * conv_.weight_w;
        if constexpr (!Plan::kPairs) {
          pack_panel(to + step * width, width, tap, conv_.weight_filter, conv_.weight_channel,
                     filters, channels);
        } else if (channels % 2 == 0) {
          pack_pairs(reinterpret_cast<uint32_t*>(to) + step / 2 * width, width,
                     reinterpret_cast<const uint16_t*>(tap), conv_.weight_filter,
                     conv_.weight_channel, filters, channels);
        } else {
          T* const values = reinterpret_cast<T*>(to);  // pairs reach from tap to tap
          for (int64_t c = 0; c < channels; ++c) {
            T* const out = values + (step + c) / 2 * 2 * width + (step + c) % 2;
            for (int64_t f = 0; f < width; ++f) {
              out[2 * f] =
                  f < filters ? tap[c * conv_.weight_channel + f * conv_.weight_filter] : T(0.0f);
            }
          }
        }
        step += channels;
      }
    }
  }

  void multiply(char* scratch, const Task& task) const {
    Element* const patches = reinterpret_cast<Element*>(scratch);
    Element* const slab = patches + plan_.patches_size;
    Acc* const tiles = reinterpret_cast<Acc*>(slab + plan_.slab_size);
    const int64_t pixels = task.end - task.begin, rows = task.images * pixels;
    for (int64_t i = 0; i < task.images; ++i) {
      patches_.fill(slab,
                    static_cast<const T*>(conv_.src.data) + (task.image + i) * conv_.src.n +
                        task.group * conv_.channels * conv_.src.c,
                    task.begin, task.end);
      if (plan_.windows) continue;
      patches_.copy(slab, task.begin, task.end, patches + i * pixels * plan_.ld, plan_.ld);
    }
    if (plan_.windows) return multiply_windows(task, reinterpret_cast<const Step*>(slab), tiles);
    const Step* const rows_at = reinterpret_cast<const Step*>(patches);
    const int64_t rows_ld = plan_.ld / kValues;
    for (int64_t j = task.first_panel; j < task.last_panel; ++j) {
      const int64_t width = panel_width(j), filter = task.group * conv_.filters + j * kPanel;
      const int64_t filters = std::min(width, conv_.filters - j * kPanel);
      const Acc* const panel = packed(task.group, j);
      if (stores_to_result(filters == width)) {
        for_each_run(task, [&](int64_t first, int64_t count, T* to) {
          rows_times_panel_to(reinterpret_cast<Acc*>(to + filter), conv_.dst_strides.w,
                              rows_at + first * rows_ld, rows_ld, count, panel, width, plan_.steps);
        });
        continue;
      }
      if constexpr (Plan::kPairs) {
        // Not of short runs, which fill tiles together.
        if (rounds_to_result() && rows_adjoin() && pixels >= 2 * kMostPixels) {
          const PanelBias<Acc> bias(static_cast<const T*>(conv_.bias), filter, filters);
          with_full(filters, width, [&](auto full) {
            for_each_run(task, [&](int64_t first, int64_t count, T* to) {
              rows_times_panel(rows_at + first * rows_ld, rows_ld, count, panel, width, plan_.steps,
                               tiles, width, false, false, [&](int64_t i, bool adds) {
                                 return RoundedTile<full>{to + filter + i * conv_.dst_strides.w,
                                                          conv_.dst_strides.w,
                                                          filters,
                                                          bias.values,
                                                          adds ? tiles + i * width : nullptr,
                                                          width};
                               });
            });
          });
          continue;
        }
      }
      rows_times_panel(rows_at, rows_ld, rows, panel, width, plan_.steps, tiles, width);
      for_each_run(task, [&](int64_t first, int64_t count, T* to) {
        store_pixels(tiles + first * width, width, count, filters, conv_.bias, filter,
                     to + filter * conv_.dst_strides.c, conv_.dst_strides.w, conv_.dst_strides.c);
      });
    }
  }

  // The same from the slab itself. One image.
  void multiply_windows(const Task& task, const Step* slab, Acc* tiles) const {
    const int64_t columns = conv_.w.out, first_row = task.begin / columns;
    const int64_t rows = (task.end - task.begin) / columns;
    const Tensor4dRef& d = conv_.dst_strides;
    T* const to = static_cast<T*>(conv_.dst) + task.image * d.n + first_row * d.h;
    const StepsInside inside(conv_.h, conv_.w, first_row, rows, even_height(columns),
                             conv_.channels / kValues, plan_.steps);
    for (int64_t j = task.first_panel; j < task.last_panel; ++j) {
      const int64_t width = panel_width(j), filter = task.group * conv_.filters + j * kPanel;
      const int64_t filters = std::min(width, conv_.filters - j * kPanel);
      const bool direct = stores_to_result(filters == width);
      Acc* const sums = direct ? reinterpret_cast<Acc*>(to + filter) : tiles;
      const int64_t ld = direct ? d.w : width, row_ld = direct ? d.h : columns * width;
      if constexpr (Plan::kPairs) {
        if (rounds_to_result()) {
          const PanelBias<Acc> bias(static_cast<const T*>(conv_.bias), filter, filters);
          with_full(filters, width, [&](auto full) {
            windows_times_panel(slab, inside, rows, packed(task.group, j), width, sums, row_ld, ld,
                                [&](int64_t i, int64_t column, bool adds) {
                                  Acc* const at = sums + i * row_ld + column * ld;
                                  return RoundedTile<full>{to + filter + i * d.h + column * d.w,
                                                           d.w,
                                                           filters,
                                                           bias.values,
                                                           adds ? at : nullptr,
                                                           ld};
                                });
          });
          continue;
        }
      }
      windows_times_panel(slab, inside, rows, packed(task.group, j), width, sums, row_ld, ld,
                          [&](int64_t i, int64_t column, bool adds) {
                            return TileOfSums<Acc>{sums + i * row_ld + column * ld, ld, adds};
                          });
      for (int64_t i = 0; !direct && i < rows; ++i) {
        store_pixels(tiles + i * row_ld, width, columns, filters, conv_.bias, filter,
                     to + i * d.h + filter * d.c, d.w, d.c);
      }
    }
  }

  // rows_times_panel() of windows that begin `stride` steps apart: their steps are at offsets_.
  // last(row, column, adds): where a tile goes behind its last step.
  template <typename Last>
  void windows_times_panel(const Step* slab, const StepsInside& inside, int64_t rows,
                           const Acc* panel, int64_t width, Acc* to, int64_t row_ld, int64_t ld,
                           const Last& last) const {
    const int64_t columns = conv_.w.out, height = even_height(columns);
    const int64_t stride = conv_.w.step * conv_.channels / kValues, depth = plan_.steps;
    const int64_t tiles = rows * ceil_div(columns, height);
    for (int64_t p = 0; p < depth; p += kDepth) {
      const int64_t steps = std::min(kDepth, depth - p);
      const int64_t each = width * int64_t{sizeof(Acc)} / tiles;  // bytes of what follows
      const char* ahead = reinterpret_cast<const char*>(panel + (p + steps) * width);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; j += height, ahead += each * steps) {
          const auto [first, end] = inside.of(i, j / height, p, p + steps);
          const auto [first_piece, last_piece] = inside.pieces(i, j / height);
          const int64_t count = end - first;
          if (count == 0 && p != last_piece) continue;  // a tile that meets nothing is zero
          const Step* const from = slab + patches_.row_offset(i) / kValues + j * stride;
          const int64_t* const offsets = offsets_.data() + first;
          const auto multiply = [&](const auto& sums) {
            with_pixels<1>(std::min(height, columns - j), width / kL, [&](auto pixels, auto vecs) {
              outer_products<Acc, pixels, vecs>(
                  count, [=](int64_t q) { return from + offsets[q]; }, stride,
                  [=, at = panel + first * width](int64_t q) {
                    __builtin_prefetch(ahead + q * each, 0, 2);
                    return at + q * vecs * kL;
                  },
                  sums);
            });
          };
          if (p < last_piece) {
            multiply(TileOfSums<Acc>{to + i * row_ld + j * ld, ld, p > first_piece});
          } else {
            multiply(last(i, j, p > first_piece));
          }
        }
      }
    }
    if (depth > 0) return;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) std::fill_n(to + i * row_ld + j * ld, width, Acc(0));
    }
  }

  // Whether 16-bit results are rounded to where they belong. Sums of nothing leave no tiles.
  bool rounds_to_result() const { return conv_.dst_strides.c == 1 && plan_.steps > 0; }
  // Whether sums of a panel need neither an epilogue nor a transposition, nor lie in short pieces.
  bool stores_to_result(bool full) const {
    return std::is_same_v<T, Acc> && !conv_.bias && conv_.dst_strides.c == 1 && full &&
           (rows_adjoin() || conv_.w.out >= kLeastPixels);
  }
  bool rows_adjoin() const { return conv_.dst_strides.h == conv_.w.out * conv_.dst_strides.w; }

  // Calls f(first row of patches, count, the first result) for pixels that are evenly spaced.
  template <typename F>
  void for_each_run(const Task& task, const F& f) const {
    const Tensor4dRef& d = conv_.dst_strides;
    int64_t first = 0;
    for (int64_t i = 0; i < task.images; ++i) {
      for (int64_t pixel = task.begin; pixel < task.end;) {
        const int64_t row = pixel / conv_.w.out, column = pixel % conv_.w.out;
        const int64_t end = rows_adjoin() ? task.end : std::min(task.end, (row + 1) * conv_.w.out);
        f(first, end - pixel,
          static_cast<T*>(conv_.dst) + (task.image + i) * d.n + row * d.h + column * d.w);
        first += end - pixel;
        pixel = end;
      }
    }
  }

  const Convolution& conv_;
  const Plan plan_;
  const Patches<T, Element> patches_;
  std::vector<int64_t> offsets_;  // of a window's steps, if it is not copied
  Acc* packed_;
};

}  // namespace braze::cpu
