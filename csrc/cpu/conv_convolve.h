// Implicit GEMM for fprop and dgrad: filters x pixels = packed weights x windows of a slab.
// The input gradient of a strided convolution is a set of such convolutions, one for each residue
// of the input position, with the taps that reach it.
#pragma once

#include <vector>

#include "cpu/conv_window.h"
#include "cpu/gemm.h"

namespace braze::cpu {

// dst[image, group * filters + f, i, j] = bias + sum over channels c and taps (th, tw) of
//     src[image, group * channels + c, window(h, i, th), window(w, j, tw)] * weight.
struct Convolution {
  int64_t images, groups, channels, filters;  // channels and filters of one group
  Axis h, w;
  Tensor4dRef src;
  // Element (filter, channel, tap): its four strides, and the filter coordinate of each tap.
  const void* weight;
  int64_t weight_group, weight_filter, weight_channel, weight_h, weight_w;
  std::vector<int64_t> tap_h, tap_w;
  void* dst;
  Tensor4dRef dst_strides;
  const void* bias;

  int64_t taps() const { return h.taps() * w.taps(); }
};

// What fits in the second-level cache beside each other, in elements: a slab and the accumulators.
constexpr int64_t kSlabElements = 32768, kBlockPixels = 512, kBlockFilters = 64;

// How a convolution is cut into tasks, and the sizes in elements of what they use.
template <typename Acc>
struct ConvolutionPlan {
  explicit ConvolutionPlan(const Convolution& conv)
      : rows(panel_rows(conv.filters)),
        block_filters(round_up(std::min(kBlockFilters, conv.filters), rows)),
        block_rows(std::min(conv.h.out, ceil_div(kBlockPixels, conv.w.out + conv.w.halo))),
        packed_filters(round_up(conv.filters, rows)),
        packed_size(round_up(conv.groups * packed_filters * conv.channels * conv.taps(), 16)) {
    block_rows = ceil_div(conv.h.out, ceil_div(conv.h.out, block_rows));  // even blocks
    while (num_threads() > 1 && tasks(conv) < 2 * num_threads() && block_rows > 4) {
      block_rows = ceil_div(block_rows, 2);
    }
    const SlabShape shape(conv.h, conv.w, block_rows);
    const int64_t pixels = std::max<int64_t>(1, shape.pixels());  // none where there is no tap
    block_channels = std::max<int64_t>(1, std::min(kSlabElements / pixels, conv.channels));
    slab_size = round_up(block_channels * shape.pixels() + kMaxPanelWidth<Acc>, 16);
    const int64_t grid = round_up((block_rows - 1) * shape.pitch + conv.w.out, kLanes<Acc>);
    acc_size = block_filters * grid;
    // The epilogue of channels_last results transposes a row of pixels.
    row_size = round_up(conv.w.out * block_filters, 16);
  }
  int64_t row_blocks(const Convolution& conv) const { return ceil_div(conv.h.out, block_rows); }
  int64_t filter_blocks(const Convolution& conv) const {
    return ceil_div(conv.filters, block_filters);
  }
  int64_t tasks(const Convolution& conv) const {
    return conv.images * conv.groups * row_blocks(conv) * filter_blocks(conv);
  }
  int64_t scratch() const { return slab_size + acc_size + row_size; }
  int64_t bytes() const { return (packed_size + num_threads() * scratch()) * sizeof(Acc); }

  int rows;  // of a panel of weights
  int64_t block_filters, block_rows, packed_filters, packed_size;
  int64_t block_channels, slab_size, acc_size, row_size;
};

template <typename T>
class Convolve {
  using Acc = acc_t<T>;

 public:
  Convolve(const Convolution& conv, void* workspace)
      : conv_(conv),
        plan_(conv),
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
    for_each_task(plan_.tasks(conv_), [&](int64_t worker, int64_t task) {
      const int64_t filters = task % filter_blocks * plan_.block_filters;
      const int64_t rows = task / filter_blocks % row_blocks * plan_.block_rows;
      const int64_t image_group = task / filter_blocks / row_blocks;
      block(scratch_ + worker * plan_.scratch(), image_group / conv_.groups,
            image_group % conv_.groups, rows, filters);
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
      for (int64_t p = 0; p < channels * conv_.taps(); p += kDepth) {
        const int64_t steps = std::min(kDepth, channels * conv_.taps() - p);
        const int64_t first = c * conv_.taps() + p;
        for (int64_t f = 0; f < filters; f += plan_.rows) {
          multiply(weights + f * depth + first * plan_.rows, steps, slab, offsets_.data() + p,
                   panels, acc + f * ld, first > 0);
        }
      }
    }
    store(acc, ld, image, group * conv_.filters + first_filter, filters, first_row, rows);
  }

  // One panel of filters against all pixels.
  void multiply(const Acc* a, int64_t steps, const Acc* slab, const int64_t* offsets,
                const Panels<Acc>& panels, Acc* acc, bool accumulate) const {
    for (int64_t j = 0; j < panels.count(); ++j) {
      const Acc* b = slab + panels.begin(j);
      with_tile(plan_.rows, panels.vecs(j), [&](auto rows_tag, auto vecs_tag) {
        micro_kernel<Acc, rows_tag, vecs_tag>(
            steps, a, [b, offsets](int64_t p) { return b + offsets[p]; }, acc + panels.begin(j),
            panels.padded(), accumulate);
      });
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
        for (int64_t j = 0; j < cols; ++j) {
          T* to = dst + i * d.h + j * d.w;
          const Acc* from = pixels + j * filters;
          for (int64_t f = 0; f < filters; ++f) to[f] = T(bias ? from[f] + Acc(bias[f]) : from[f]);
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
