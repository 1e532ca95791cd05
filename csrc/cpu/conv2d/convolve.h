// Implicit GEMM for fprop and dgrad: filters x pixels = packed weights x windows of a slab. Pixels
// are across the lanes; or filters are, where the result wants them adjacent (channels_last).
#pragma once

#include <vector>

#include "cpu/conv2d/passes.h"
#include "cpu/matmul/gemm.h"

namespace braze::cpu {

// What fits in the second-level cache beside each other, in elements: a slab and the accumulators.
constexpr int64_t kSlabElements = 32768, kBlockPixels = 512, kBlockFilters = 64;
// Steps of the reduction for which filters across the lanes keep their weights in the first-level
// cache: 12 KiB of two vectors.
constexpr int64_t kFilterDepth = 96;

// Rows of an output cut into tiles of one width; the last one may overlap the one before.
struct RowTiles {
  explicit RowTiles(int64_t columns)
      : columns(columns),
        count(ceil_div(columns, kMostPixels)),
        width(count ? ceil_div(columns, count) : 0) {}
  int64_t begin(int64_t i) const { return std::min(i * width, columns - width); }

  int64_t columns, count, width;
};

// Whether filters go across the lanes: not where many of these would be idle, or rows are short.
template <typename Acc>
bool takes_filter_lanes(const Convolution& conv) {
  const int64_t padded = round_up(conv.filters, kLanes<Acc>);
  return conv.dst_strides.c == 1 && conv.w.out >= kLeastPixels && conv.taps() > 0 &&
         conv.channels > 0 && padded * 4 <= conv.filters * 5;
}

// Filters of a panel of packed weights.
template <typename Acc>
int64_t panel_filters(const Convolution& conv, bool filter_lanes) {
  if (!filter_lanes) return panel_rows(conv.filters);
  return ceil_div(conv.filters, kLanes<Acc>) % 2 == 0 ? 2 * kLanes<Acc> : kLanes<Acc>;
}

// Groups that one task goes through after each other: where channels are adjacent, all. A line of
// memory has several groups' channels, and threads that write to the same ones wait for each other.
inline int64_t groups_of_a_task(const Convolution& conv) {
  return conv.dst_strides.c == 1 ? std::max<int64_t>(1, conv.groups) : 1;
}

// How a convolution is cut into tasks, and the sizes in elements of what they use.
template <typename Acc>
struct ConvolutionPlan {
  explicit ConvolutionPlan(const Convolution& conv)
      : filter_lanes(takes_filter_lanes<Acc>(conv)),
        rows(panel_filters<Acc>(conv, filter_lanes)),
        tiles(conv.w.out),
        block_filters(round_up(std::min(kBlockFilters, conv.filters), rows)),
        block_rows(std::min(conv.h.out, ceil_div(kBlockPixels, conv.w.out + conv.w.halo))),
        packed_filters(round_up(conv.filters, rows)),
        packed_size(round_up(conv.groups * packed_filters * conv.channels * conv.taps(), 16)) {
    block_rows = ceil_div(conv.h.out, ceil_div(conv.h.out, block_rows));  // even blocks
    task_groups = groups_of_a_task(conv);
    while (num_threads() > 1 && tasks(conv) < 2 * num_threads() && block_rows > 4) {
      block_rows = ceil_div(block_rows, 2);
    }
    while (task_groups > 1 && tasks(conv) < 2 * num_threads() &&
           task_groups * conv.filters > kLanes<Acc>) {
      task_groups = ceil_div(task_groups, 2);
    }
    const SlabShape shape(conv.h, conv.w, block_rows);
    const int64_t pixels = std::max<int64_t>(1, shape.pixels());  // none where there is no tap
    block_channels = std::max<int64_t>(1, std::min(kSlabElements / pixels, conv.channels));
    slab_size = round_up(block_channels * shape.pixels() + kMaxPanelWidth<Acc>, 16);
    const int64_t grid = round_up((block_rows - 1) * shape.pitch + conv.w.out, kLanes<Acc>);
    acc_size = block_filters * (filter_lanes ? block_rows * tiles.count * tiles.width : grid);
    // The epilogue of channels_last results transposes a row of pixels.
    row_size = round_up(conv.w.out * block_filters, 16);
  }
  int64_t row_blocks(const Convolution& conv) const { return ceil_div(conv.h.out, block_rows); }
  int64_t filter_blocks(const Convolution& conv) const {
    return ceil_div(conv.filters, block_filters);
  }
  int64_t group_blocks(const Convolution& conv) const { return ceil_div(conv.groups, task_groups); }
  int64_t tasks(const Convolution& conv) const {
    return conv.images * group_blocks(conv) * row_blocks(conv) * filter_blocks(conv);
  }
  int64_t scratch() const { return slab_size + acc_size + row_size; }
  int64_t bytes() const { return (packed_size + num_threads() * scratch()) * sizeof(Acc); }

  bool filter_lanes;
  int64_t rows;    // of a panel of weights
  RowTiles tiles;  // filters across the lanes: of a row of pixels
  int64_t block_filters, block_rows, task_groups, packed_filters, packed_size;
  int64_t block_channels, slab_size, acc_size, row_size;
};

template <typename T>
class Convolve {
  using Acc = acc_t<T>;

 public:
  Convolve(const Convolution& conv, const ConvolutionPlan<Acc>& plan, void* workspace)
      : conv_(conv),
        plan_(plan),
        shape_(conv.h, conv.w, plan_.block_rows),
        packed_(static_cast<Acc*>(workspace)),
        scratch_(packed_ + plan_.packed_size) {
    for (int64_t c = 0; c < plan_.block_channels; ++c) {
      for (int64_t th = 0; th < conv.h.taps(); ++th) {
        for (int64_t tw = 0; tw < conv.w.taps(); ++tw) {
          offsets_.push_back(c * shape_.pixels() + shape_.pixel_of(conv.h, th, conv.w, tw));
        }
      }
    }
  }

  void run() const {
    pack_weights();
    const int64_t row_blocks = plan_.row_blocks(conv_), filter_blocks = plan_.filter_blocks(conv_);
    const int64_t group_blocks = plan_.group_blocks(conv_);
    for_each_task(plan_.tasks(conv_), [&](int64_t worker, int64_t task) {
      const int64_t filters = task % filter_blocks * plan_.block_filters;
      const int64_t rows = task / filter_blocks % row_blocks * plan_.block_rows;
      const int64_t groups = task / filter_blocks / row_blocks;
      const int64_t image = groups / group_blocks;
      const int64_t first = groups % group_blocks * plan_.task_groups;
      const int64_t end = std::min(first + plan_.task_groups, conv_.groups);
      for (int64_t group = first; group < end; ++group) {
        block(scratch_ + worker * plan_.scratch(), image, group, rows, filters);
      }
    });
  }

 private:
  // Panels of plan_.rows filters, the reduction (channel, tap) outermost within a panel.
  void pack_weights() const {
    const int64_t taps = conv_.taps(), depth = conv_.channels * taps;
    const int64_t panels = plan_.packed_filters / plan_.rows;
    const T* weight = static_cast<const T*>(conv_.weight);
    parallel_for(
        0, conv_.groups * panels, ceil_div(16384, plan_.rows * depth + 1),
        [&](int64_t first, int64_t last) {
          for (int64_t i = first; i < last; ++i) {
            const int64_t filter = i % panels * plan_.rows;
            const int64_t lanes = std::min<int64_t>(plan_.rows, conv_.filters - filter);
            const T* from = weight + i / panels * conv_.weight_group + filter * conv_.weight_filter;
            Acc* to = packed_ + i * plan_.rows * depth;
            for (int64_t c = 0; c < conv_.channels; ++c) {
              for (const int64_t r : conv_.tap_h) {
                for (const int64_t s : conv_.tap_w) {
                  const T* element =
                      from + c * conv_.weight_channel + r * conv_.weight_h + s * conv_.weight_w;
                  for (int64_t lane = 0; lane < plan_.rows; ++lane) {
                    *to++ = lane < lanes ? Acc(element[lane * conv_.weight_filter]) : Acc(0);
                  }
                }
              }
            }
          }
        });
  }

  void block(Acc* slab, int64_t image, int64_t group, int64_t first_row,
             int64_t first_filter) const {
    const int64_t rows = std::min(plan_.block_rows, conv_.h.out - first_row);
    const int64_t filters = std::min(plan_.block_filters, conv_.filters - first_filter);
    const int64_t depth = conv_.channels * conv_.taps();
    const Panels<Acc> panels((rows - 1) * shape_.pitch + conv_.w.out);
    const int64_t ld = panels.padded();
    Acc* acc = slab + plan_.slab_size;
    const T* src = static_cast<const T*>(conv_.src.data) + image * conv_.src.n +
                   group * conv_.channels * conv_.src.c;
    const Acc* weights = packed_ + (group * plan_.packed_filters + first_filter) * depth;

    if (depth == 0) std::fill(acc, acc + round_up(filters, plan_.rows) * ld, Acc(0));
    for (int64_t c = 0; c < conv_.channels && depth > 0; c += plan_.block_channels) {
      const int64_t channels = std::min(plan_.block_channels, conv_.channels - c);
      fill_slab(slab, shape_, conv_.h, conv_.w, src + c * conv_.src.c, conv_.src, channels,
                first_row, 0);
      // Read by the last panel, beyond the last pixel, and multiplied into unused results.
      std::fill_n(slab + channels * shape_.pixels(), kLanes<Acc>, Acc(0));
      const int64_t most_steps = plan_.filter_lanes ? kFilterDepth : kDepth;
      for (int64_t p = 0; p < channels * conv_.taps(); p += most_steps) {
        const int64_t steps = std::min(most_steps, channels * conv_.taps() - p);
        const int64_t first = c * conv_.taps() + p;
        for (int64_t f = 0; f < filters; f += plan_.rows) {
          const Acc* panel = weights + f * depth + first * plan_.rows;
          if (plan_.filter_lanes) {
            multiply_rows(panel, steps, slab, offsets_.data() + p, rows, acc + f, first > 0);
          } else {
            multiply(panel, steps, slab, offsets_.data() + p, panels, acc + f * ld, first > 0);
          }
        }
      }
    }
    const int64_t filter = group * conv_.filters + first_filter;
    if (plan_.filter_lanes) {
      store_rows(acc, image, filter, filters, first_row, rows);
    } else {
      store(acc, ld, image, filter, filters, first_row, rows);
    }
  }

  // One panel of filters, across the lanes, against all pixels. Accumulators: [row][tile][pixel of
  // the tile][plan_.block_filters].
  void multiply_rows(const Acc* a, int64_t steps, const Acc* slab, const int64_t* offsets,
                     int64_t rows, Acc* acc, bool accumulate) const {
    const RowTiles& tiles = plan_.tiles;
    const int64_t ld = plan_.block_filters;
    with_pixels(tiles.width, plan_.rows / kLanes<Acc>, [&](auto pixels_tag, auto vecs_tag) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t tile = 0; tile < tiles.count; ++tile, acc += tiles.width * ld) {
          const Acc* b = slab + i * shape_.pitch + tiles.begin(tile);
          broadcast_kernel<Acc, pixels_tag, vecs_tag>(
              steps, a, [b, offsets](int64_t p) { return b + offsets[p]; }, acc, ld, accumulate);
        }
      }
    });
  }

  void store_rows(const Acc* acc, int64_t image, int64_t filter, int64_t filters, int64_t first_row,
                  int64_t rows) const {
    const Tensor4dRef& d = conv_.dst_strides;
    const RowTiles& tiles = plan_.tiles;
    T* dst = static_cast<T*>(conv_.dst) + image * d.n + filter + first_row * d.h;
    const T* bias = conv_.bias ? static_cast<const T*>(conv_.bias) + filter : nullptr;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        T* to = dst + i * d.h + tiles.begin(tile) * d.w;
        for (int64_t j = 0; j < tiles.width; ++j, to += d.w, acc += plan_.block_filters) {
          for (int64_t f = 0; f < filters; ++f) to[f] = T(bias ? acc[f] + Acc(bias[f]) : acc[f]);
        }
      }
    }
  }

  // One panel of filters against all pixels.
  void multiply(const Acc* a, int64_t steps, const Acc* slab, const int64_t* offsets,
                const Panels<Acc>& panels, Acc* acc, bool accumulate) const {
    for (int64_t j = 0; j < panels.count(); ++j) {
      const Acc* b = slab + panels.begin(j);
      with_tile(static_cast<int>(plan_.rows), panels.vecs(j), [&](auto rows_tag, auto vecs_tag) {
        micro_kernel<Acc, rows_tag, vecs_tag>(
            steps, a, [b, offsets](int64_t p) { return b + offsets[p]; }, acc + panels.begin(j),
            panels.padded(), accumulate);
      });
    }
  }

  // A row of pixels of a group's filters.
  template <int kFilters>
  void store_pixels(const Acc* __restrict__ from, int64_t filters, T* __restrict__ to,
                    const T* bias) const {
    if (kFilters != 0) filters = kFilters;
    const int64_t cols = conv_.w.out, stride = conv_.dst_strides.w;
    if (bias) {
      for (int64_t j = 0; j < cols; ++j, to += stride, from += filters) {
        for (int64_t f = 0; f < filters; ++f) to[f] = T(from[f] + Acc(bias[f]));
      }
    } else {
      for (int64_t j = 0; j < cols; ++j, to += stride, from += filters) {
        for (int64_t f = 0; f < filters; ++f) to[f] = T(from[f]);
      }
    }
  }

  // The epilogue: filters x pixels accumulators, rows `ld` apart, to the result.
  void store(const Acc* acc, int64_t ld, int64_t image, int64_t filter, int64_t filters,
             int64_t first_row, int64_t rows) const {
    const Tensor4dRef& d = conv_.dst_strides;
    T* dst = static_cast<T*>(conv_.dst) + image * d.n + filter * d.c + first_row * d.h;
    const T* bias = conv_.bias ? static_cast<const T*>(conv_.bias) + filter : nullptr;
    const int64_t cols = conv_.w.out;
    if (d.c == 1 && filters > 1) {
      Acc* pixels = const_cast<Acc*>(acc) + plan_.acc_size;
      for (int64_t i = 0; i < rows; ++i) {
        copy_matrix(pixels, filters, acc + i * shape_.pitch, 1, ld, cols, filters);
        T* const row = dst + i * d.h;
        // A number that is known when this is compiled takes vectors.
        switch (filters) {
          case 4: store_pixels<4>(pixels, 4, row, bias); break;
          case 8: store_pixels<8>(pixels, 8, row, bias); break;
          default: store_pixels<0>(pixels, filters, row, bias);
        }
      }
      return;
    }
    for (int64_t f = 0; f < filters; ++f) {
      const Acc shift = bias ? Acc(bias[f]) : Acc(0);
      for (int64_t i = 0; i < rows; ++i) {
        const Acc* from = acc + f * ld + i * shape_.pitch;
        T* to = dst + f * d.c + i * d.h;
        if (d.w == 1) {
          for (int64_t j = 0; j < cols; ++j) to[j] = T(from[j] + shift);
        } else {
          for (int64_t j = 0; j < cols; ++j) to[j * d.w] = T(from[j] + shift);
        }
      }
    }
  }

  const Convolution& conv_;
  const ConvolutionPlan<Acc> plan_;
  const SlabShape shape_;
  std::vector<int64_t> offsets_;  // of the rows of the implicit matrix, from a pixel of the slab
  Acc* packed_;
  Acc* scratch_;
};

}  // namespace braze::cpu
