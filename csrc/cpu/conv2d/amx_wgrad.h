// The weight gradient in bf16 on AMX (cpu/matmul/amx.h): for each tap, filters x channels = sums
// over positions of dy times x. Chunks of positions are copied into two slabs on one grid of rows:
// dy turned, [filter][position], with zeros where there is no output pixel; and x, zero-padded, in
// pairs of positions, panels of 32 channels wide. A tap's product reads x from where the window of
// position 0 begins, and dy one position earlier where that is odd. Of a stride each remainder has
// a plane of x of its own.
//
// Positions that are no pixels multiply values of x by zero. So a finite result is right; where one
// is not, all are to be done again. Chunks are split among a fixed number of parts with sums of
// their own, added in order.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/conv2d/passes.h"
#include "cpu/conv2d/store.h"
#include "cpu/matmul/amx.h"
#include "cpu/matmul/dot_bf16.h"
#include "cpu/matmul/gemm.h"

namespace braze::cpu {

#ifdef BRAZE_HAS_AMX

struct AmxWgradPlan {
  static constexpr int64_t kPanel = 32, kStep = 32, kBlock = kPanel * kPanel;
  // Positions of a chunk, of which a panel of either operand fits into the first-level cache about;
  // bytes of the sums of a task, which the second-level one keeps.
  static constexpr int64_t kPositions = 256, kSumsBytes = int64_t{640} << 10;

  explicit AmxWgradPlan(const WeightGradient& g)
      : taps(g.h.taps() * g.w.taps()),
        planes(static_cast<int64_t>(g.h.phases.size() * g.w.phases.size())),
        filters(round_up(g.filters, kPanel)),
        channels(round_up(g.channels, kPanel)) {
    const int64_t width = g.w.out + g.w.halo, lead = std::min(width, image_begin(g.w));
    int64_t end = g.w.out;  // of the image's columns
    for (const int64_t phase : g.w.phases) {
      end = std::max(end, std::min(width, image_end(g.w, phase)));
    }
    // A row's zeros at the right are the next one's at the left.
    pitch = round_up(std::max(end, width - lead), 2);
    rows = std::clamp<int64_t>(kPositions / pitch, 1, g.h.out);
    blocks = ceil_div(g.h.out, rows);
    rows = ceil_div(g.h.out, blocks);
    blocks = ceil_div(g.h.out, rows);
    const int64_t used = (rows - 1) * pitch + g.w.out;
    image_pairs = (rows + g.h.halo) * pitch / 2;
    // Images of a chunk one behind the other, where they are small; else each in whole steps.
    const int64_t apart = round_up(used + 1, kStep);
    adjoin = blocks == 1 && 2 * image_pairs < apart;
    image_positions = adjoin ? 2 * image_pairs : apart;
    together = blocks > 1 ? 1 : std::clamp<int64_t>(kPositions / image_positions, 1, g.images);

    while (filters * channels * taps * 4 > kSumsBytes && std::max(filters, channels) > kPanel) {
      int64_t& larger = filters >= channels ? filters : channels;
      larger = round_up(ceil_div(larger, 2), kPanel);
    }
    filter_blocks = ceil_div(g.filters, filters), channel_blocks = ceil_div(g.channels, channels);
    const int64_t tasks = g.groups * filter_blocks * channel_blocks;
    parts = tasks >= 4 * num_threads() ? 1 : std::min(num_threads(), chunks(g));

    steps = adjoin ? ceil_div(together * image_positions + 1, kStep)
                   : together * image_positions / kStep;
    const int64_t row = 2 * kStep + steps * kStep;
    dy_ld = row % 512 == 0 ? row + kStep : row;
    plane_pairs = together * image_pairs + lead + (adjoin ? g.h.halo * pitch : 0) + 2 * kStep;
    pairs_size = steps * kStep / 2 * 2 * kPanel;
  }
  // The first column of the grid that is in the image, and of a remainder the one behind the last.
  static int64_t image_begin(const Axis& w) { return std::max<int64_t>(0, -w.first); }
  static int64_t image_end(const Axis& w, int64_t phase) {
    return std::max<int64_t>(0, ceil_div(w.extent - phase, w.step) - w.first);
  }
  int64_t chunks(const WeightGradient& g) const { return ceil_div(g.images, together) * blocks; }
  int64_t task_sums() const { return filters * channels * taps; }
  int64_t sums_size(const WeightGradient& g) const {  // of a part
    return g.groups * filter_blocks * channel_blocks * task_sums();
  }
  int64_t x_size() const { return channels * planes * plane_pairs; }  // pairs
  int64_t dy_size() const { return filters * dy_ld; }
  // Bytes of a worker.
  int64_t scratch() const { return round_up(x_size() * 4 + dy_size() * 2 + pairs_size * 4, 64); }
  int64_t bytes(const WeightGradient& g) const {
    return parts * sums_size(g) * 4 + num_threads() * scratch();
  }

  int64_t taps, planes;
  int64_t filters, channels, filter_blocks, channel_blocks;  // of a task; tasks of a group
  int64_t pitch;                                             // of the grid
  int64_t rows, blocks, together;        // rows of an image in a chunk, or images of one
  int64_t image_pairs, image_positions;  // of x, of dy
  bool adjoin;
  int64_t parts, steps, dy_ld, plane_pairs, pairs_size;
};

class AmxWgrad {
  using Plan = AmxWgradPlan;
  static constexpr int64_t kPanel = Plan::kPanel, kStep = Plan::kStep, kBlock = Plan::kBlock;

 public:
  AmxWgrad(const WeightGradient& g, const Plan& plan, void* workspace)
      : g_(g),
        plan_(plan),
        sums_(static_cast<float*>(workspace)),
        scratch_(reinterpret_cast<char*>(sums_ + plan.parts * plan.sums_size(g))) {}

  // Returns whether all results are finite.
  bool run() const {
    const int64_t blocks = plan_.filter_blocks * plan_.channel_blocks;
    for_each_task(plan_.parts * g_.groups * blocks, [&](int64_t worker, int64_t task) {
      const int64_t filter = task % blocks / plan_.channel_blocks * plan_.filters;
      const int64_t channel = task % plan_.channel_blocks * plan_.channels;
      add_up(scratch_ + worker * plan_.scratch(), sums_ + task * plan_.task_sums(),
             {task / blocks / g_.groups, task / blocks % g_.groups, filter,
              std::min(plan_.filters, g_.filters - filter), channel,
              std::min(plan_.channels, g_.channels - channel)});
    });
    std::atomic<bool> finite{true};
    const int64_t panels = ceil_div(g_.filters, kPanel);
    parallel_for(0, g_.groups * panels, ceil_div(512, g_.channels * plan_.taps),
                 [&](int64_t first, int64_t last) {
                   for (int64_t i = first; i < last; ++i) {
                     if (!store(i / panels, i % panels * kPanel)) finite = false;
                   }
                 });
    return finite;
  }

 private:
  // What is summed up by a task: those filters and channels of a group, over a part of the chunks.
  struct Task {
    int64_t part, group, filter, filters, channel, channels;
  };
  struct Chunk {
    int64_t image, images, row, rows;
  };

  void add_up(char* scratch, float* sums, const Task& task) const {
    uint32_t* const x = reinterpret_cast<uint32_t*>(scratch);
    uint16_t* const dy = reinterpret_cast<uint16_t*>(x + plan_.x_size());
    uint32_t* const pairs = reinterpret_cast<uint32_t*>(dy + plan_.dy_size());
    std::vector<int64_t> dy_at, x_at;  // where steps begin
    const int64_t each = plan_.adjoin ? plan_.steps : plan_.image_positions / kStep;
    for (int64_t i = 0; i < plan_.steps; ++i) {
      dy_at.push_back(i * kStep);
      x_at.push_back(((i / each) * plan_.image_pairs + i % each * (kStep / 2)) * kPanel);
    }
    const int64_t chunks = plan_.chunks(g_);
    const int64_t first = task.part * chunks / plan_.parts;
    const int64_t last = (task.part + 1) * chunks / plan_.parts;
    const WholeTiles tiles;
    for (int64_t i = first; i < last; ++i) {
      const int64_t image = i / plan_.blocks * plan_.together, row = i % plan_.blocks * plan_.rows;
      const Chunk chunk{image, std::min(plan_.together, g_.images - image), row,
                        std::min(plan_.rows, g_.h.out - row)};
      for (int64_t c = 0; c < task.channels; c += kPanel) fill_x(x, task, chunk, c);
      for (int64_t f = 0; f < task.filters; f += kPanel) fill_dy(dy, pairs, task, chunk, f);
      const int64_t steps = plan_.adjoin ? ceil_div(chunk.images * plan_.image_positions + 1, kStep)
                                         : chunk.images * each;
      multiply(x, dy, task, steps, dy_at, x_at, sums, i > first);
    }
  }

  void multiply(const uint32_t* x, const uint16_t* dy, const Task& task, int64_t steps,
                const std::vector<int64_t>& dy_at, const std::vector<int64_t>& x_at, float* sums,
                bool accumulate) const {
    const int64_t *const dy_steps = dy_at.data(), *const x_steps = x_at.data();
    for (int64_t f = 0; f < task.filters; f += kPanel) {
      for (int64_t c = 0; c < task.channels; c += kPanel) {
        for (int64_t th = 0; th < g_.h.taps(); ++th) {
          for (int64_t tw = 0; tw < g_.w.taps(); ++tw, sums += kBlock) {
            const int64_t offset = g_.h.offset_of(th) * plan_.pitch + g_.w.offset_of(tw);
            const int64_t plane =
                g_.h.phase_of(th) * static_cast<int64_t>(g_.w.phases.size()) + g_.w.phase_of(tw);
            const uint16_t* const rows = dy + f * plan_.dy_ld + kStep - offset % 2;
            const uint32_t* const pairs =
                x + (c * plan_.planes / kPanel + plane) * plan_.plane_pairs * kPanel +
                offset / 2 * kPanel;
            multiply_block(
                task.filters - f, task.channels - c, steps,
                [=](int64_t s) { return rows + dy_steps[s]; }, plan_.dy_ld,
                [=](int64_t s) { return pairs + x_steps[s]; }, kPanel, sums, kPanel, accumulate);
          }
        }
      }
    }
  }

  // A panel of channels, from c of the task's on.
  void fill_x(uint32_t* x, const Task& task, const Chunk& chunk, int64_t c) const {
    const int64_t channels = std::min(kPanel, task.channels - c), pairs = plan_.pitch / 2;
    const uint16_t* const from = static_cast<const uint16_t*>(g_.x.data) +
                                 (task.group * g_.channels + task.channel + c) * g_.x.c;
    uint32_t* to = x + c * plan_.planes * plan_.plane_pairs;
    for (const int64_t phase_h : g_.h.phases) {
      for (const int64_t phase_w : g_.w.phases) {
        uint32_t* const end = to + plan_.plane_pairs * kPanel;
        const int64_t begin = std::min(plan_.pitch, Plan::image_begin(g_.w));
        const int64_t stop = std::clamp(Plan::image_end(g_.w, phase_w), begin, plan_.pitch);
        const int64_t column = (begin + g_.w.first) * g_.w.step + phase_w;
        for (int64_t i = 0; i < chunk.images; ++i) {
          for (int64_t r = 0; r < chunk.rows + g_.h.halo; ++r, to += pairs * kPanel) {
            const int64_t y = (chunk.row + r + g_.h.first) * g_.h.step + phase_h;
            if (y < 0 || y >= g_.h.extent || begin == stop) {
              std::fill_n(to, pairs * kPanel, 0u);
              continue;
            }
            const uint16_t* const row =
                from + (chunk.image + i) * g_.x.n + y * g_.x.h + column * g_.x.w;
            fill_row(to, row, begin, stop, channels);
          }
        }
        std::fill(to, end, 0u);
        to = end;
      }
    }
  }

  // Columns [begin, stop) of a row of the grid, zeros around them.
  void fill_row(uint32_t* to, const uint16_t* from, int64_t begin, int64_t stop,
                int64_t channels) const {
    const int64_t step = g_.w.step * g_.x.w;
    std::fill_n(to, begin / 2 * kPanel, 0u);
    uint32_t* at = to + begin / 2 * kPanel;
    if (begin % 2) {  // the second of a pair
      for (int64_t j = 0; j < channels; ++j) at[j] = static_cast<uint32_t>(from[j * g_.x.c]) << 16;
      std::fill(at + channels, at + kPanel, 0u);
      at += kPanel, from += step, ++begin;
    }
    pack_pairs(at, kPanel, from, g_.x.c, step, channels, stop - begin);
    std::fill(to + round_up(stop, 2) / 2 * kPanel, to + plan_.pitch / 2 * kPanel, 0u);
  }

  // A panel of filters, from f of the task's on: [filter][position].
  void fill_dy(uint16_t* dy, uint32_t* pairs, const Task& task, const Chunk& chunk,
               int64_t f) const {
    const int64_t filters = std::min(kPanel, task.filters - f), out = g_.w.out;
    const uint16_t* const from = static_cast<const uint16_t*>(g_.dy.data) +
                                 (task.group * g_.filters + task.filter + f) * g_.dy.c;
    uint16_t* const to = dy + f * plan_.dy_ld;
    // Rows of pairs of positions, filters side by side, which are then transposed.
    uint32_t* at = pairs;
    const int64_t size = plan_.steps * kStep / 2;
    for (int64_t i = 0; i < chunk.images; ++i) {
      uint32_t* const next = at + plan_.image_positions / 2 * kPanel;
      for (int64_t r = 0; r < chunk.rows; ++r, at += plan_.pitch / 2 * kPanel) {
        const uint16_t* const row = from + (chunk.image + i) * g_.dy.n + (chunk.row + r) * g_.dy.h;
        pack_pairs(at, kPanel, row, g_.dy.c, g_.dy.w, filters, out);
        std::fill(at + ceil_div(out, 2) * kPanel, std::min(next, at + plan_.pitch / 2 * kPanel),
                  0u);
      }
      at = std::min(at, next);
      std::fill(at, next, 0u);
      at = next;
    }
    std::fill(at, pairs + size * kPanel, 0u);
    for (int64_t i = 0; i < kPanel; ++i) {
      std::fill_n(to + i * plan_.dy_ld, kStep, 0);
      std::fill(to + i * plan_.dy_ld + kStep + 2 * size, to + (i + 1) * plan_.dy_ld, 0);
    }
    copy_matrix(reinterpret_cast<float*>(to + kStep), plan_.dy_ld / 2,
                reinterpret_cast<const float*>(pairs), 1, kPanel, kPanel, size);
  }

  // The gradients of a panel of filters. Returns whether they are finite.
  bool store(int64_t group, int64_t filter) const {
    const int64_t filters = std::min(kPanel, g_.filters - filter);
    const int64_t row = filter % plan_.filters / kPanel;
    const int64_t block =
        (group * plan_.filter_blocks + filter / plan_.filters) * plan_.channel_blocks;
    BFloat16* const dw = static_cast<BFloat16*>(const_cast<void*>(g_.dw.data)) +
                         (group * g_.filters + filter) * g_.dw.n;
    bool finite = true;
    for (int64_t c = 0; c < g_.channels; c += kPanel) {
      const int64_t inner = c % plan_.channels;
      const int64_t panels = ceil_div(std::min(plan_.channels, g_.channels - c + inner), kPanel);
      float* sums = sums_ + (block + c / plan_.channels) * plan_.task_sums() +
                    (row * panels + inner / kPanel) * plan_.taps * kBlock;
      for (int64_t th = 0; th < g_.h.taps(); ++th) {
        for (int64_t tw = 0; tw < g_.w.taps(); ++tw, sums += kBlock) {
          for (int64_t part = 1; part < plan_.parts; ++part) {
            const float* const more = sums + part * plan_.sums_size(g_);
            for (int64_t i = 0; i < filters * kPanel; ++i) sums[i] += more[i];
          }
          const int64_t columns = std::min(kPanel, g_.channels - c);
          if (columns < kPanel) clear_behind(sums, filters, columns);
          finite &= all_finite(sums, filters * kPanel);
          store_pixels(sums, kPanel, filters, columns, nullptr, 0,
                       dw + c * g_.dw.c + th * g_.dw.h + tw * g_.dw.w, g_.dw.n, g_.dw.c);
        }
      }
    }
    return finite;
  }

  // Columns that nobody has computed.
  static void clear_behind(float* sums, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; ++i) {
      std::fill(sums + i * kPanel + columns, sums + (i + 1) * kPanel, 0.0f);
    }
  }

  const WeightGradient& g_;
  const Plan plan_;
  float* sums_;
  char* scratch_;
};

#endif

}  // namespace braze::cpu
