// The weight gradient of 1 x 1 filters: filters x channels = sums over pixels of dy times x, a
// product whose operands are copied block by block, pixels outermost. A step of the reduction is a
// pixel, or a pair of them in bf16 where the processor multiplies pairs. Pixels are split among a
// fixed number of parts with sums of their own, added in order.
#pragma once

#include <algorithm>

#include "cpu/conv2d/pixel_runs.h"
#include "cpu/conv2d/store.h"
#include "cpu/matmul/dot_bf16.h"
#include "cpu/matmul/gemm.h"

namespace braze::cpu {

template <typename T, typename Step>
struct PointwiseWgradPlan {
  using Acc = acc_t<T>;
  static constexpr bool kPairs = std::is_same_v<Step, Bf16Pair>;
  static constexpr int kL = kLanes<Acc>;
  // Steps of a chunk, so that a panel of each operand fits into the first-level cache; filters and
  // channels of a task, so that the chunk and the sums fit into the second-level one.
  static constexpr int64_t kSteps = 128, kFilters = 128, kChannels = 256;
  static constexpr int64_t kPixels = kPairs ? 2 * kSteps : kSteps;

  explicit PointwiseWgradPlan(const WeightGradient& g)
      : runs(g.images, g.h, g.w, g.x, g.dy),
        filter_blocks(ceil_div(g.filters, kFilters)),
        channel_blocks(ceil_div(g.channels, kChannels)),
        padded_channels(round_up(g.channels, kL)),
        scratch(kSteps * (std::min(g.filters, kFilters) + std::min(padded_channels, kChannels))) {
    const int64_t blocks = g.groups * filter_blocks * channel_blocks;
    parts = blocks >= 4 * num_threads() ? 1 : std::min(num_threads(), ceil_div(chunks(), 2));
  }
  // A chunk is a piece of a long run, or several short runs.
  int64_t pieces() const { return ceil_div(runs.length, kPixels); }
  int64_t runs_together() const {
    return std::max<int64_t>(1, kPixels / (kPairs ? round_up(runs.length, 2) : runs.length));
  }
  int64_t chunks() const { return ceil_div(runs.count(), runs_together()) * pieces(); }
  int64_t sums_size(const WeightGradient& g) const {  // of a part
    return g.groups * g.filters * padded_channels;
  }
  int64_t bytes(const WeightGradient& g) const {
    return (round_up(parts * sums_size(g), 16) + num_threads() * scratch) * sizeof(Acc);
  }

  PixelRuns runs;
  int64_t filter_blocks, channel_blocks, padded_channels;
  int64_t scratch;  // of a worker: a chunk of both operands
  int64_t parts;
};

template <typename T, typename Step>
class PointwiseWgrad {
  using Acc = acc_t<T>;
  using Plan = PointwiseWgradPlan<T, Step>;

 public:
  PointwiseWgrad(const WeightGradient& g, const Plan& plan, void* workspace)
      : g_(g),
        plan_(plan),
        sums_(static_cast<Acc*>(workspace)),
        scratch_(sums_ + round_up(plan.parts * plan.sums_size(g), 16)) {}

  void run() const {
    const int64_t blocks = plan_.filter_blocks * plan_.channel_blocks;
    for_each_task(plan_.parts * g_.groups * blocks, [&](int64_t worker, int64_t task) {
      add_up(scratch_ + worker * plan_.scratch, task / blocks / g_.groups,
             task / blocks % g_.groups, task % blocks / plan_.channel_blocks * Plan::kFilters,
             task % plan_.channel_blocks * Plan::kChannels);
    });
    parallel_for(0, g_.groups * g_.filters, ceil_div(16384, g_.channels + 1),
                 [&](int64_t first, int64_t last) {
                   for (int64_t i = first; i < last; ++i) store(i);
                 });
  }

 private:
  // A block of a part's sums.
  void add_up(Acc* scratch, int64_t part, int64_t group, int64_t first_filter,
              int64_t first_channel) const {
    const int64_t filters = std::min(Plan::kFilters, g_.filters - first_filter);
    const int64_t channels = std::min(Plan::kChannels, g_.channels - first_channel);
    const int64_t padded = round_up(channels, Plan::kL);
    Acc* const x = scratch + Plan::kSteps * filters;
    Acc* const sums = sums_ + part * plan_.sums_size(g_) +
                      (group * g_.filters + first_filter) * plan_.padded_channels + first_channel;
    const int64_t chunks = plan_.chunks();
    const int64_t first = part * chunks / plan_.parts, last = (part + 1) * chunks / plan_.parts;
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t piece = chunk % plan_.pieces() * Plan::kPixels;
      const int64_t pixels = std::min(Plan::kPixels, plan_.runs.length - piece);
      const int64_t first_run = chunk / plan_.pieces() * plan_.runs_together();
      const int64_t last_run = std::min(plan_.runs.count(), first_run + plan_.runs_together());
      int64_t steps = 0;
      for (int64_t run = first_run; run < last_run; ++run) {
        const int64_t image = run / plan_.runs.rows, row = run % plan_.runs.rows;
        const T* const from_x = static_cast<const T*>(g_.x.data) + first_pixel(g_.h, g_.w, g_.x) +
                                image * g_.x.n + row * g_.h.step * g_.x.h +
                                piece * plan_.runs.from +
                                (group * g_.channels + first_channel) * g_.x.c;
        const T* const from_dy = static_cast<const T*>(g_.dy.data) + image * g_.dy.n +
                                 row * g_.dy.h + piece * plan_.runs.to +
                                 (group * g_.filters + first_filter) * g_.dy.c;
        copy(x, 2 * Plan::kL, steps, padded, from_x, plan_.runs.from, g_.x.c, pixels, channels);
        copy(scratch, even_height(filters), steps, filters, from_dy, plan_.runs.to, g_.dy.c, pixels,
             filters);
        steps += Plan::kPairs ? ceil_div(pixels, 2) : pixels;
      }
      columns_times_columns(steps, Plan::kSteps, reinterpret_cast<const Step*>(scratch), filters, x,
                            padded, sums, plan_.padded_channels, chunk > first);
    }
  }

  // `channels` of some pixels into panels `width` wide, from step `first` on; zeros up to `padded`.
  void copy(Acc* to, int64_t width, int64_t first, int64_t padded, const T* from,
            int64_t pixel_stride, int64_t channel_stride, int64_t pixels, int64_t channels) const {
    // Adjacent channels a few pixels at a time: memory is read in order.
    const int64_t together = channel_stride == 1 ? 16 : pixels;
    for (int64_t i = 0; i < pixels; i += together) {
      const int64_t count = std::min(together, pixels - i);
      const int64_t step = first + (Plan::kPairs ? i / 2 : i);
      for (int64_t c = 0; c < padded; c += width) {
        const int64_t wide = std::min(width, padded - c), filled = std::min(wide, channels - c);
        Acc* const panel = to + c * Plan::kSteps + step * wide;
        const T* const part = from + i * pixel_stride + c * channel_stride;
        if constexpr (Plan::kPairs) {
          pack_pairs(reinterpret_cast<uint32_t*>(panel), wide,
                     reinterpret_cast<const uint16_t*>(part), channel_stride, pixel_stride, filled,
                     count);
        } else {
          pack_panel(panel, wide, part, channel_stride, pixel_stride, filled, count);
        }
      }
    }
  }

  void store(int64_t filter) const {
    T* const dw = static_cast<T*>(const_cast<void*>(g_.dw.data)) + filter * g_.dw.n;
    add_parts(sums_ + filter * plan_.padded_channels, plan_.sums_size(g_), plan_.parts, g_.channels,
              dw, g_.dw.c);
  }

  const WeightGradient& g_;
  const Plan plan_;
  Acc* sums_;
  Acc* scratch_;
};

}  // namespace braze::cpu
