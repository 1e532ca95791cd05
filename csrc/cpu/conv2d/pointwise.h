// 1 x 1 filters: pixels x filters = pixels x channels * channels x filters, a matrix product whose
// left operand is the image as it lies in memory. Filters are across the lanes; channels_last
// pixels are read where they are (rows_kernel), others are transposed block by block. A step of the
// reduction is a channel, or a pair of them in bf16 where the processor multiplies pairs.
#pragma once

#include <type_traits>

#include "cpu/conv2d/pixel_runs.h"
#include "cpu/conv2d/store.h"
#include "cpu/matmul/dot_bf16.h"
#include "cpu/matmul/gemm.h"

namespace braze::cpu {

template <typename T, typename Step>
struct PointwisePlan {
  using Acc = acc_t<T>;
  static constexpr bool kPairs = std::is_same_v<Step, Bf16Pair>;
  static constexpr int kL = kLanes<Acc>, kPanel = 2 * kL;
  // Elements of a block of pixels: 256 KiB of fp32, which the second-level cache keeps.
  static constexpr int64_t kBlockElements = 65536;
  static constexpr int64_t kPage = 4096 / sizeof(T);

  explicit PointwisePlan(const Convolution& conv)
      : runs(conv.images, conv.h, conv.w, conv.src, conv.dst_strides),
        steps(kPairs ? ceil_div(conv.channels, 2) : conv.channels),
        // Pixels a multiple of a page apart would meet in one set of the first-level cache.
        in_place(
            (std::is_same_v<T, Acc> || (kPairs && conv.channels % 2 == 0 && runs.from % 2 == 0)) &&
            conv.src.c == 1 && runs.from % kPage != 0),
        panels(ceil_div(conv.filters, kPanel)),
        packed_filters(round_up(conv.filters, kL)),
        packed_size(round_up(conv.groups * packed_filters * steps, 16)),
        ld(steps % 64 == 0 ? steps + kL : steps) {
    const int64_t most = std::clamp<int64_t>(kBlockElements / std::max<int64_t>(1, steps),
                                             2 * kMostPixels, 64 * kMostPixels);
    block = round_up(most, kMostPixels);
    const int64_t wanted = 4 * num_threads();
    while (num_threads() > 1 && tasks(conv) < wanted && block > 2 * kMostPixels) {
      block = round_up(block / 2, kMostPixels);
    }
    pixels_size = in_place ? 0 : round_up(block * ld, 16);
    tile_size = block * kPanel;
  }
  // A task is a block of a long run, or several short runs.
  int64_t blocks() const { return ceil_div(runs.length, block); }
  int64_t runs_together() const { return std::max<int64_t>(1, block / runs.length); }
  int64_t tasks(const Convolution& conv) const {
    return conv.groups * ceil_div(runs.count(), runs_together()) * blocks();
  }
  int64_t scratch() const { return pixels_size + tile_size; }
  int64_t bytes() const { return (packed_size + num_threads() * scratch()) * sizeof(Acc); }

  PixelRuns runs;
  int64_t steps;
  bool in_place;  // pixels are read where they are
  int64_t panels, packed_filters, packed_size;
  int64_t ld;     // of copied pixels
  int64_t block;  // pixels of a task, at most
  int64_t pixels_size, tile_size;
};

template <typename T, typename Step>
class Pointwise {
  using Acc = acc_t<T>;
  using Plan = PointwisePlan<T, Step>;
  static constexpr int kL = Plan::kL, kPanel = Plan::kPanel;

 public:
  Pointwise(const Convolution& conv, const Plan& plan, void* workspace)
      : conv_(conv),
        plan_(plan),
        packed_(static_cast<Acc*>(workspace)),
        scratch_(packed_ + plan.packed_size) {}

  void run() const {
    pack_weights();
    const PixelRuns& runs = plan_.runs;
    const int64_t together = plan_.runs_together(), blocks = plan_.blocks();
    for_each_task(plan_.tasks(conv_), [&](int64_t worker, int64_t task) {
      const int64_t group = task % conv_.groups, block = task / conv_.groups % blocks;
      const int64_t first = task / conv_.groups / blocks * together;
      multiply({scratch_ + worker * plan_.scratch(), group, first,
                std::min(runs.count(), first + together), block * plan_.block,
                std::min(runs.length, (block + 1) * plan_.block)});
    });
  }

 private:
  // Pixels [begin, end) of some runs.
  struct Task {
    Acc* scratch;
    int64_t group, first_run, last_run, begin, end;
  };

  int64_t panel_width(int64_t j) const {
    return std::min<int64_t>(kPanel, plan_.packed_filters - j * kPanel);
  }

  // Panels of up to two vectors of filters, channels outermost.
  void pack_weights() const {
    const int64_t steps = plan_.steps;
    parallel_for(0, conv_.groups * plan_.panels, ceil_div(16384, kPanel * steps + 1),
                 [&](int64_t first, int64_t last) {
                   for (int64_t i = first; i < last; ++i) {
                     const int64_t group = i / plan_.panels, filter = i % plan_.panels * kPanel;
                     const T* const from = static_cast<const T*>(conv_.weight) +
                                           group * conv_.weight_group +
                                           filter * conv_.weight_filter;
                     Acc* const to = packed_ + (group * plan_.packed_filters + filter) * steps;
                     const int64_t width = panel_width(i % plan_.panels);
                     const int64_t filters = std::min<int64_t>(kPanel, conv_.filters - filter);
                     if constexpr (Plan::kPairs) {
                       pack_pairs(reinterpret_cast<uint32_t*>(to), width,
                                  reinterpret_cast<const uint16_t*>(from), conv_.weight_filter,
                                  conv_.weight_channel, filters, conv_.channels);
                     } else {
                       pack_panel(to, width, from, conv_.weight_filter, conv_.weight_channel,
                                  filters, conv_.channels);
                     }
                   }
                 });
  }

  // The first pixel of a run of the task's.
  const T* source(const Task& task, int64_t run) const {
    return static_cast<const T*>(conv_.src.data) + first_pixel(conv_.h, conv_.w, conv_.src) +
           run / plan_.runs.rows * conv_.src.n +
           run % plan_.runs.rows * conv_.h.step * conv_.src.h + task.begin * plan_.runs.from +
           task.group * conv_.channels * conv_.src.c;
  }
  T* result(const Task& task, int64_t run) const {
    const Tensor4dRef& d = conv_.dst_strides;
    return static_cast<T*>(conv_.dst) + run / plan_.runs.rows * d.n + run % plan_.runs.rows * d.h +
           task.begin * plan_.runs.to + task.group * conv_.filters * d.c;
  }

  void multiply(const Task& task) const {
    const int64_t pixels = task.end - task.begin;
    Acc* const tiles = task.scratch + plan_.pixels_size;
    for (int64_t run = task.first_run; !plan_.in_place && run < task.last_run; ++run) {
      copy(task.scratch + (run - task.first_run) * pixels * plan_.ld, source(task, run), pixels);
    }
    for (int64_t j = 0; j < plan_.panels; ++j) {
      const int64_t width = panel_width(j);
      const int64_t filters = std::min(width, conv_.filters - j * kPanel);
      const Acc* const panel =
          packed_ + (task.group * plan_.packed_filters + j * kPanel) * plan_.steps;
      const bool direct = stores_to_result(filters == width);
      const bool is_cold = j == 0 && plan_.in_place;
      const PanelBias<Acc> bias(static_cast<const T*>(conv_.bias),
                                task.group * conv_.filters + j * kPanel, filters);
      for (int64_t run = task.first_run; run < task.last_run; ++run) {
        const auto [from, ld] = pixels_of(task, run);
        T* const to = result(task, run) + j * kPanel * conv_.dst_strides.c;
        if (direct) {
          rows_times_panel_to(reinterpret_cast<Acc*>(to), plan_.runs.to, from, ld, pixels, panel,
                              width, plan_.steps, is_cold);
        } else if (rounds_to_result()) {
          round_to(to, filters, bias.values, from, ld, pixels, panel, width, tiles, is_cold);
        } else {
          rows_times_panel(from, ld, pixels, panel, width, plan_.steps, tiles, width, false,
                           is_cold);
          store_pixels(tiles, width, pixels, filters, conv_.bias,
                       task.group * conv_.filters + j * kPanel, to, plan_.runs.to,
                       conv_.dst_strides.c);
        }
      }
    }
  }

  // rows_times_panel() of 16-bit results, which are rounded as they leave the registers.
  void round_to(T* to, int64_t filters, const Acc* bias, const Step* from, int64_t ld,
                int64_t pixels, const Acc* panel, int64_t width, Acc* tiles, bool is_cold) const {
    if constexpr (Plan::kPairs) {
      with_full(filters, width, [&](auto full) {
        rows_times_panel(
            from, ld, pixels, panel, width, plan_.steps, tiles, width, false, is_cold,
            [=, to_ld = plan_.runs.to](int64_t i, bool adds) {
              return RoundedTile<full>{
                  to + i * to_ld, to_ld, filters, bias, adds ? tiles + i * width : nullptr, width};
            });
      });
    }
  }

  void copy(Acc* to, const T* from, int64_t pixels) const {
    if constexpr (Plan::kPairs) {
      copy_pairs(reinterpret_cast<uint32_t*>(to), plan_.ld, reinterpret_cast<const uint16_t*>(from),
                 plan_.runs.from, conv_.src.c, pixels, conv_.channels);
    } else {
      copy_matrix(to, plan_.ld, from, plan_.runs.from, conv_.src.c, pixels, conv_.channels);
    }
  }

  struct Pixels {
    const Step* first;
    int64_t ld;  // in steps
  };
  // The task's pixels of a run, copied or where they are.
  Pixels pixels_of(const Task& task, int64_t run) const {
    if (plan_.in_place) {
      return {reinterpret_cast<const Step*>(source(task, run)),
              plan_.runs.from / (Plan::kPairs ? 2 : 1)};
    }
    const Acc* const copied =
        task.scratch + (run - task.first_run) * (task.end - task.begin) * plan_.ld;
    return {reinterpret_cast<const Step*>(copied), plan_.ld};
  }

  // Whether they are rounded to where they belong. Sums of nothing leave no tiles.
  bool rounds_to_result() const {
    return Plan::kPairs && conv_.dst_strides.c == 1 && plan_.steps > 0;
  }
  // Whether sums of a panel need neither an epilogue nor a transposition.
  bool stores_to_result(bool full) const {
    return std::is_same_v<T, Acc> && !conv_.bias && conv_.dst_strides.c == 1 && full;
  }

  const Convolution& conv_;
  const Plan plan_;
  Acc* packed_;
  Acc* scratch_;
};

}  // namespace braze::cpu
