// Implicit GEMM for wgrad: filters x (tap, channel) = sum over pixels of dy x window. Two forms of
// the register tile:
//   channels across the lanes: a pixel-major slab, dy broadcast. For many channels.
//   pixels across the lanes: a channel-major slab; each accumulator holds partial sums of one
//   weight, which are added up at the very end. For few channels, with no lane wasted on them.
// Images are split among a fixed number of parts with accumulators of their own, added in order:
// the result does not depend on which thread ran what.
#pragma once

#include <type_traits>
#include <vector>

#include "cpu/conv2d/passes.h"
#include "cpu/conv2d/store.h"
#include "cpu/matmul/gemm.h"

namespace braze::cpu {

template <typename Acc>
struct WeightGradientPlan {
  explicit WeightGradientPlan(const WeightGradient& g)
      : pixel_lanes(g.channels < kLanes<Acc> / 2),
        rows(panel_rows(g.filters)),
        packed_filters(round_up(g.filters, rows)),
        padded_channels(round_up(g.channels, kLanes<Acc>)),
        taps(g.h.taps() * g.w.taps()),
        padded_width(pixel_lanes ? round_up(g.w.out, kLanes<Acc>) : g.w.out),
        columns(pixel_lanes ? taps * g.channels * kLanes<Acc> : taps * padded_channels) {
    const int64_t slab_channels = pixel_lanes ? g.channels : padded_channels;
    block_rows = g.h.out;
    while (block_rows > 1 &&
           (SlabShape(g.h, g.w, block_rows).pixels() * slab_channels > kMaxElements ||
            block_rows * padded_width * packed_filters > kMaxElements)) {
      block_rows = ceil_div(block_rows, 2);
    }
    slab_size = round_up(
        SlabShape(g.h, g.w, block_rows).pixels() * slab_channels + kMaxPanelWidth<Acc>, 16);
    dy_size = round_up(block_rows * padded_width * packed_filters, 16);
    parts = std::min(num_threads(), units(g));
    const bool is_adjacent = g.x.c == 1 && g.dy.c == 1;
    const bool has_room = g.groups * acc_size() * sizeof(Acc) <= kMostSums;
    task_groups = is_adjacent && has_room ? std::max<int64_t>(1, g.groups) : 1;
  }
  // Blocks of rows of images, which the parts share out.
  int64_t units(const WeightGradient& g) const { return g.images * ceil_div(g.h.out, block_rows); }
  int64_t acc_size() const { return packed_filters * columns; }  // of one group in one part
  int64_t scratch() const { return slab_size + dy_size; }
  int64_t bytes(const WeightGradient& g) const {
    return (parts * g.groups * acc_size() + num_threads() * scratch()) * sizeof(Acc);
  }

  // A slab, and a block of dy: 256 KiB of fp32 each.
  static constexpr int64_t kMaxElements = 65536;
  // Bytes of sums that the second-level cache keeps beside these.
  static constexpr size_t kMostSums = size_t{512} << 10;
  bool pixel_lanes;
  int rows;  // filters in a register tile
  int64_t packed_filters, padded_channels, taps, padded_width, columns;
  int64_t block_rows, slab_size, dy_size, parts;
  // Groups that a task goes through for each block: where channels are adjacent, all, as a line of
  // memory has several groups' channels.
  int64_t task_groups;
};

template <typename T>
class ComputeWeightGradient {
  using Acc = acc_t<T>;
  static constexpr int kL = kLanes<Acc>;

 public:
  ComputeWeightGradient(const WeightGradient& g, const WeightGradientPlan<Acc>& plan,
                        void* workspace)
      : g_(g),
        plan_(plan),
        shape_(g.h, g.w, plan_.block_rows),
        acc_(static_cast<Acc*>(workspace)),
        scratch_(acc_ + plan_.parts * g.groups * plan_.acc_size()) {
    // A column is a vector of accumulators; its window starts at this place of the slab.
    for (int64_t th = 0; th < g.h.taps(); ++th) {
      for (int64_t tw = 0; tw < g.w.taps(); ++tw) {
        const int64_t pixel = shape_.pixel_of(g.h, th, g.w, tw);
        if (plan_.pixel_lanes) {
          for (int64_t c = 0; c < g.channels; ++c) offsets_.push_back(c * shape_.pixels() + pixel);
        } else {
          for (int64_t c = 0; c < plan_.padded_channels; c += kL) {
            offsets_.push_back(pixel * plan_.padded_channels + c);
          }
        }
      }
    }
  }

  void run() const {
    const int64_t tasks_of_part = ceil_div(g_.groups, plan_.task_groups);
    for_each_task(plan_.parts * tasks_of_part, [&](int64_t worker, int64_t task) {
      const int64_t part = task / tasks_of_part, first = task % tasks_of_part * plan_.task_groups;
      const int64_t end = std::min(first + plan_.task_groups, g_.groups);
      Acc* const sums = acc_ + part * g_.groups * plan_.acc_size();
      std::fill_n(sums + first * plan_.acc_size(), (end - first) * plan_.acc_size(), Acc(0));
      // The padding of dy, which no block writes.
      Acc* packed_dy = scratch_ + worker * plan_.scratch() + plan_.slab_size;
      if (plan_.pixel_lanes) std::fill_n(packed_dy, plan_.dy_size, Acc(0));
      const int64_t units = plan_.units(g_), blocks = units / g_.images;
      for (int64_t i = part * units / plan_.parts; i < (part + 1) * units / plan_.parts; ++i) {
        for (int64_t group = first; group < end; ++group) {
          add_block(sums + group * plan_.acc_size(), scratch_ + worker * plan_.scratch(),
                    i / blocks, group, i % blocks * plan_.block_rows);
        }
      }
    });
    parallel_for(0, g_.groups * g_.filters, ceil_div(16384, plan_.columns),
                 [&](int64_t first, int64_t last) {
                   for (int64_t i = first; i < last; ++i) store(i / g_.filters, i % g_.filters);
                 });
  }

 private:
  void add_block(Acc* acc, Acc* slab, int64_t image, int64_t group, int64_t first_row) const {
    const int64_t rows = std::min(plan_.block_rows, g_.h.out - first_row);
    const T* x = static_cast<const T*>(g_.x.data) + image * g_.x.n + group * g_.channels * g_.x.c;
    const T* dy = static_cast<const T*>(g_.dy.data) + image * g_.dy.n +
                  group * g_.filters * g_.dy.c + first_row * g_.dy.h;
    fill_slab(slab, shape_, g_.h, g_.w, x, g_.x, g_.channels, first_row,
              plan_.pixel_lanes ? 0 : plan_.padded_channels);
    if (plan_.pixel_lanes) {  // what masked lanes read beyond the last pixel
      std::fill_n(slab + g_.channels * shape_.pixels(), kL, Acc(0));
    }
    Acc* packed = slab + plan_.slab_size;
    DyRef from{packed, filter_stride(), plan_.padded_width, 1};
    if (!plan_.pixel_lanes) from.row *= from.pixel = plan_.rows;
    if (!readable_in_place(dy, image, &from)) pack_dy(packed, dy, rows);
    const Panels<Acc> panels(static_cast<int64_t>(offsets_.size()) * kL);
    for (int64_t f = 0; f < g_.filters; f += plan_.rows) {
      const DyRef panel{from.data + f * from.filter, from.filter, from.row, from.pixel};
      for (int64_t j = 0; j < panels.count(); ++j) {
        with_tile(plan_.rows, panels.vecs(j), [&](auto rows_tag, auto vecs_tag) {
          const int64_t* offsets = offsets_.data() + panels.begin(j) / kL;
          Acc* tile = acc + f * plan_.columns + panels.begin(j);
          if (plan_.pixel_lanes) {
            pixel_lanes_kernel<rows_tag, vecs_tag>(rows, panel, slab, offsets, tile);
          } else {
            channel_lanes_kernel<rows_tag, vecs_tag>(rows, panel, slab, offsets, tile);
          }
        });
      }
    }
  }

  // Where the kernels read dy.
  struct DyRef {
    const Acc* data;
    int64_t filter, row, pixel;  // strides; the kernels take that of the lanes' dimension as 1
  };

  // Whether dy can be read where it is: in the accumulation type and full panels of filters.
  // Channels across the lanes: filters adjacent. Pixels across the lanes: planes without gaps, and
  // memory to read (and ignore) after the last row, which the next image provides.
  bool readable_in_place(const T* dy, int64_t image, DyRef* ref) const {
    if constexpr (std::is_same_v<T, Acc>) {
      if (g_.filters % plan_.rows != 0) return false;
      if (!plan_.pixel_lanes) {
        if (g_.dy.c != 1) return false;
        *ref = {dy, 1, g_.dy.h, g_.dy.w};
        return true;
      }
      const int64_t plane = g_.h.out * g_.w.out;
      if (g_.dy.w != 1 || g_.dy.h != g_.w.out || g_.dy.c != plane ||
          g_.dy.n < plane * g_.filters * g_.groups || image + 1 >= g_.images || g_.dy.n < kL) {
        return false;
      }
      *ref = {dy, g_.dy.c, g_.dy.h, 1};
      return true;
    }
    return false;
  }

  // Elements of packed dy for each filter.
  int64_t filter_stride() const { return plan_.block_rows * plan_.padded_width; }

  // Panels of plan_.rows filters. Channels across the lanes: the pixel is outermost. Pixels across
  // the lanes: the filter is, and rows of pixels are padded with zeros.
  void pack_dy(Acc* to, const T* dy, int64_t rows) const {
    const int64_t width = plan_.padded_width, cols = g_.w.out;
    for (int64_t f = 0; f < g_.filters; f += plan_.rows, to += plan_.rows * filter_stride()) {
      const int64_t lanes = std::min<int64_t>(plan_.rows, g_.filters - f);
      for (int64_t i = 0; i < rows; ++i) {
        const T* from = dy + f * g_.dy.c + i * g_.dy.h;
        if (!plan_.pixel_lanes) {
          pack_panel(to + i * width * plan_.rows, plan_.rows, from, g_.dy.c, g_.dy.w, lanes, cols);
          continue;
        }
        copy_matrix(to + i * width, filter_stride(), from, g_.dy.c, g_.dy.w, lanes, cols);
      }
    }
  }

  template <int kPanelRows, int kVecs>
  void channel_lanes_kernel(int64_t rows, const DyRef& from, const Acc* slab,
                            const int64_t* offsets, Acc* __restrict__ out) const {
    using V = vec_t<Acc>;
    V acc[kPanelRows][kVecs] = {};
    for (int64_t i = 0; i < rows; ++i) {
      const Acc* dy = from.data + i * from.row;
      const Acc* at[kVecs];
      for (int j = 0; j < kVecs; ++j) {
        at[j] = slab + offsets[j] + i * shape_.pitch * plan_.padded_channels;
      }
      for (int64_t p = 0; p < g_.w.out * plan_.padded_channels; p += plan_.padded_channels) {
        V values[kVecs];
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; ++j) values[j] = load<V>(at[j] + p);
#pragma GCC unroll 8
        for (int f = 0; f < kPanelRows; ++f) {
#pragma GCC unroll 8
          for (int j = 0; j < kVecs; ++j) acc[f][j] += dy[f] * values[j];
        }
        dy += from.pixel;
      }
    }
    add_tile(acc, out);
  }

  template <int kPanelRows, int kVecs>
  void pixel_lanes_kernel(int64_t rows, const DyRef& dy, const Acc* slab, const int64_t* offsets,
                          Acc* __restrict__ out) const {
    using V = vec_t<Acc>;
    using Mask = decltype(V{} == V{});
    V acc[kPanelRows][kVecs] = {};
    // What follows a row's last pixel is zeroed on both sides: it may hold inf or NaN.
    const int64_t full = g_.w.out / kL * kL;
    Mask tail;
    for (int l = 0; l < kL; ++l) tail[l] = full + l < g_.w.out ? -1 : 0;
    for (int64_t i = 0; i < rows; ++i) {
      const auto add = [&](int64_t p, const auto& masked) {
        V values[kVecs];
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; ++j) {
          values[j] = masked(load<V>(slab + offsets[j] + i * shape_.pitch + p));
        }
#pragma GCC unroll 8
        for (int f = 0; f < kPanelRows; ++f) {
          const V grad = masked(load<V>(dy.data + f * dy.filter + i * dy.row + p));
#pragma GCC unroll 8
          for (int j = 0; j < kVecs; ++j) acc[f][j] += grad * values[j];
        }
      };
      for (int64_t p = 0; p < full; p += kL) add(p, [](const V& v) { return v; });
      if (full < g_.w.out) {
        add(full,
            [&](const V& v) { return reinterpret_cast<V>(reinterpret_cast<Mask>(v) & tail); });
      }
    }
    add_tile(acc, out);
  }

  template <int kPanelRows, int kVecs>
  void add_tile(const vec_t<Acc> (&acc)[kPanelRows][kVecs], Acc* out) const {
    using V = vec_t<Acc>;
#pragma GCC unroll 8
    for (int f = 0; f < kPanelRows; ++f) {
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) {
        Acc* to = out + f * plan_.columns + j * kL;
        cpu::store(to, acc[f][j] + load<V>(to));
      }
    }
  }

  // Adds up the parts (and lanes) of one filter's gradient.
  void store(int64_t group, int64_t filter) const {
    T* dw =
        static_cast<T*>(const_cast<void*>(g_.dw.data)) + (group * g_.filters + filter) * g_.dw.n;
    const Acc* const from = acc_ + group * plan_.acc_size() + filter * plan_.columns;
    const int64_t part_size = g_.groups * plan_.acc_size();
    for (int64_t tap = 0; tap < plan_.taps; ++tap) {
      T* const to = dw + tap / g_.w.taps() * g_.dw.h + tap % g_.w.taps() * g_.dw.w;
      if (!plan_.pixel_lanes) {
        add_parts(from + tap * plan_.padded_channels, part_size, plan_.parts, g_.channels, to,
                  g_.dw.c);
        continue;
      }
      for (int64_t c = 0; c < g_.channels; ++c) {
        Acc sum = 0;
        for (int64_t part = 0; part < plan_.parts; ++part) {
          const Acc* const lanes = from + part * part_size + (tap * g_.channels + c) * kL;
          for (int64_t l = 0; l < kL; ++l) sum += lanes[l];
        }
        to[c * g_.dw.c] = T(sum);
      }
    }
  }

  const WeightGradient& g_;
  const WeightGradientPlan<Acc> plan_;
  const SlabShape shape_;
  std::vector<int64_t> offsets_;
  Acc* acc_;
  Acc* scratch_;
};

}  // namespace braze::cpu
