// fprop and dgrad in bf16 on AMX (cpu/matmul/amx.h), without patches. A task's part of an image is
// copied into a slab, zero-padded and with channels adjacent, in which the windows of one output
// pixel after the other are evenly spaced, on into the next row: a tile of A is 16 of them, read
// where they are, for each tap from another element on. Positions behind a row's last pixel are
// computed and not stored. Of a stride the slab's rows are sorted by their remainder.
//
// A step is 32 elements of the channels of a tap, or of adjacent taps' together; what the last one
// reads beyond meets weights of zero. So a finite result is right; an image with one that is not
// finite is to be done again.
#pragma once

#include <atomic>
#include <vector>

#include "cpu/conv2d/passes.h"
#include "cpu/conv2d/patches.h"
#include "cpu/conv2d/pixel_runs.h"
#include "cpu/conv2d/store.h"
#include "cpu/matmul/amx.h"

namespace braze::cpu {

#ifdef BRAZE_HAS_AMX

// Where windows and taps lie in a slab of `rows` output rows; in pixels, from the slab's first.
struct AmxWindows {
  AmxWindows(const Convolution& conv, int64_t rows)
      : taps_h(conv.h), taps_w(conv.w), rows(rows), step(conv.w.step) {
    if (conv.taps() == 0) return;
    const int64_t leftmost = taps_w.shifts.front(), rightmost = taps_w.shifts.back();
    const int64_t width = conv.w.extent;
    lead = std::max<int64_t>(0, -leftmost);
    // A row's zeros at the right are the next one's at the left.
    const int64_t right = std::max<int64_t>(0, (conv.w.out - 1) * step + rightmost - (width - 1));
    pitch = round_up(std::max(width + std::max(lead, right), conv.w.out * step), step);
    for (const int64_t shift : taps_h.shifts) {
      const int64_t distance = shift - taps_h.first();
      slab_rows = std::max(slab_rows, rows + distance / conv.h.step);
      phases = std::max(phases, distance % conv.h.step + 1);
    }
  }
  int64_t positions() const { return rows * pitch / step; }
  int64_t pixels() const {
    // Tiles are whole; what they read beyond the last window is anything.
    return lead + phases * slab_rows * pitch + 32 * step;
  }
  int64_t offset(const Convolution& conv, int64_t th, int64_t tw) const {
    const int64_t distance = taps_h.shifts[th] - taps_h.first();
    return lead + (distance % conv.h.step * slab_rows + distance / conv.h.step) * pitch +
           taps_w.shifts[tw];
  }

  TapShifts taps_h, taps_w;
  int64_t rows, step;
  int64_t lead = 0, pitch = 0, slab_rows = 0, phases = 0;
};

struct AmxPlan {
  static constexpr int64_t kPanel = 32, kStep = 32, kBlock = 32;  // filters, elements, positions
  // Of slabs, or of pixels read in place: they and a panel of weights are to stay in a second-level
  // cache of 2 MiB.
  static constexpr int64_t kSlabBytes = int64_t{512} << 10;

  explicit AmxPlan(const Convolution& conv)
      : panels(ceil_div(conv.filters, kPanel)),
        rows(conv.h.out),
        image_parts(conv.images),
        runs(conv.images, conv.h, conv.w, conv.src, conv.dst_strides) {
    // Pixels a multiple of half a page apart would meet in a few sets of the first-level cache.
    const bool meet = conv.channels * conv.w.step % 1024 == 0;
    ld = meet ? conv.channels + kStep : conv.channels;
    const bool adjoin = !meet && adjacent(conv.w);
    chunk = conv.channels;
    taps_of_run = adjoin ? conv.w.taps() : 1;
    // A part of a panel's weights that the first-level cache holds is worth visiting the sums again
    // for each. A part of the channels, because all taps of it meet fewer lines of the image, too.
    constexpr int64_t kHeld = 24;
    if (steps_of(conv, 0) > kHeld) {
      const int64_t fit = std::max<int64_t>(1, kHeld / conv.taps());
      chunk = std::min(chunk, fit * kStep);
      if (chunk < conv.channels) taps_of_run = 1;
    }
    passes = chunk > 0 ? ceil_div(conv.channels, chunk) : 1;
    whole_steps = taps_of_run * conv.channels % kStep == 0;
    for (int64_t pass = 0; pass < passes; ++pass) steps += steps_of(conv, pass);
    packed_weights = conv.groups * panels * steps * 16 * kPanel;
    packed_size = round_up(packed_weights + ceil_div(conv.images, 4), 16);
    if (conv.taps() == 0) return;

    const int64_t wanted = 2 * num_threads();
    constexpr int64_t kLongRun = 4 * kBlock;
    // Only whole steps: nothing may be read behind the last pixel.
    in_place = conv.taps() == 1 && conv.src.c == 1 && whole_steps && runs.from % 1024 != 0 &&
               runs.length >= kLongRun && stays_inside(conv.h) && stays_inside(conv.w);
    int64_t positions;  // of a segment
    if (in_place) {
      pieces = ceil_div(runs.length * runs.from * 2, kSlabBytes);
      while (num_threads() > 1 && tasks(conv) < wanted && runs.length / pieces >= kLongRun) {
        ++pieces;
      }
      while (num_threads() > 1 && tasks(conv) < wanted && filter_blocks < panels) ++filter_blocks;
      while (tasks(conv) % num_threads() != 0 && runs.length / pieces >= kLongRun) ++pieces;
      positions = ceil_div(runs.length, pieces);
    } else {
      const int64_t row_bytes = AmxWindows(conv, 1).pitch * conv.h.step * ld * 2;
      const int64_t most = std::max<int64_t>(1, kSlabBytes / row_bytes);
      rows = std::min(conv.h.out, most);
      blocks = ceil_div(conv.h.out, rows);
      together = blocks > 1 ? 1 : std::clamp<int64_t>(most / conv.h.out, 1, conv.images);
      image_parts = ceil_div(conv.images, together);
      const bool is_shared = num_threads() > 1;
      while (is_shared && tasks(conv) < wanted && image_parts < conv.images) {
        image_parts = std::min(conv.images, 2 * image_parts);
      }
      while (is_shared && tasks(conv) < wanted && conv.h.out / blocks > 8) ++blocks;
      while (is_shared && tasks(conv) < wanted && filter_blocks < panels) ++filter_blocks;
      rows = ceil_div(conv.h.out, blocks);
      blocks = ceil_div(conv.h.out, rows);
      while (image_parts < conv.images && tasks(conv) % num_threads() != 0) ++image_parts;
      together = ceil_div(conv.images, image_parts);
      const AmxWindows windows(conv, rows);
      slab_size = round_up(windows.pixels() * ld + 2 * kStep, kStep);
      positions = windows.positions();
    }
    if (passes > 1) sums_size = round_up(positions, kBlock) * kPanel;
  }
  // Whether the taps of a row are one run of the slab.
  static bool adjacent(const Axis& w) {
    const TapShifts taps(w);
    for (size_t t = 1; t < taps.shifts.size(); ++t) {
      if (taps.shifts[t] != taps.shifts[t - 1] + 1) return false;
    }
    return true;
  }
  // Channels of a pass, and the steps that it has.
  int64_t channels_of(const Convolution& conv, int64_t pass) const {
    return std::min(chunk, conv.channels - pass * chunk);
  }
  int64_t steps_of(const Convolution& conv, int64_t pass) const {
    const int64_t length = taps_of_run * channels_of(conv, pass);
    return conv.taps() / std::max<int64_t>(1, taps_of_run) * ceil_div(length, kStep);
  }
  int64_t tasks(const Convolution& conv) const {
    const int64_t blocks_of_filters = conv.groups * filter_blocks;
    return in_place ? blocks_of_filters * runs.count() * pieces
                    : blocks_of_filters * image_parts * blocks;
  }
  // Bytes of a worker: slabs, sums.
  int64_t scratch() const { return together * slab_size * 2 + sums_size * 4; }

  int64_t panels, rows;  // of filters; of a task's part of an image
  int64_t ld;            // of a slab's pixels
  // A run is what steps go through: a tap's channels, or those of adjacent taps of a row. A pass
  // has all runs of `chunk` channels.
  int64_t taps_of_run, chunk, passes, steps = 0;
  bool whole_steps;                     // none reads beyond the elements that it multiplies
  int64_t packed_weights, packed_size;  // pairs; with a flag for each image
  int64_t together = 1, image_parts;    // most images of a task; parts that all are cut into
  int64_t blocks = 1, filter_blocks = 1;
  int64_t slab_size = 0, sums_size = 2 * kBlock * kPanel;
  // Pixels of 1 x 1 filters are read where they are, a piece of a run for each task.
  PixelRuns runs;
  bool in_place = false;
  int64_t pieces = 1;
};

class AmxConvolution {
  using Plan = AmxPlan;
  static constexpr int64_t kPanel = Plan::kPanel, kStep = Plan::kStep, kBlock = Plan::kBlock;

 public:
  // packed: room for plan.packed_size pairs.
  AmxConvolution(const Convolution& conv, const Plan& plan, float* packed)
      : conv_(conv),
        plan_(plan),
        whole_(conv, plan.rows),
        packed_(reinterpret_cast<uint32_t*>(packed)),
        spoilt_(reinterpret_cast<std::atomic<char>*>(packed_ + plan.packed_weights)),
        bias_(conv.groups * plan.panels * kPanel) {
    for (int64_t i = 0; i < conv.images; ++i) new (spoilt_ + i) std::atomic<char>(0);
    const auto* const biases = static_cast<const BFloat16*>(conv.bias);
    for (int64_t i = 0; biases && i < conv.groups * conv.filters; ++i) {
      const int64_t group = i / conv.filters, filter = i % conv.filters;
      bias_[group * plan.panels * kPanel + filter] = static_cast<float>(biases[i]);
    }
  }

  int64_t panels() const { return conv_.groups * plan_.panels; }
  // Rows of pairs, 32 filters wide, whole steps for each run.
  void pack(int64_t i) const {
    const int64_t group = i / plan_.panels, j = i % plan_.panels;
    const int64_t filters = std::min(kPanel, conv_.filters - j * kPanel);
    const uint16_t* const from = static_cast<const uint16_t*>(conv_.weight) +
                                 group * conv_.weight_group + j * kPanel * conv_.weight_filter;
    uint32_t* to = packed_ + i * plan_.steps * 16 * kPanel;
    each_run([&](int64_t first_channel, int64_t channels, int64_t th, int64_t first_tap) {
      const auto tap = [&](int64_t t) {
        return from + conv_.tap_h[whole_.taps_h.order[th]] * conv_.weight_h +
               conv_.tap_w[whole_.taps_w.order[first_tap + t]] * conv_.weight_w +
               first_channel * conv_.weight_channel;
      };
      to = pack_run(to, channels, tap, filters);
    });
  }

  int64_t tasks() const { return plan_.tasks(conv_); }
  void run(char* scratch, int64_t task) const {
    const int64_t part = task % plan_.filter_blocks, place = task / plan_.filter_blocks;
    const Task filters{place % conv_.groups, part * plan_.panels / plan_.filter_blocks,
                       (part + 1) * plan_.panels / plan_.filter_blocks};
    uint16_t* const slabs = reinterpret_cast<uint16_t*>(scratch);
    float* const sums = reinterpret_cast<float*>(slabs + plan_.together * plan_.slab_size);
    const WholeTiles tiles;
    if (plan_.in_place) return multiply_pixels(sums, filters, place / conv_.groups);
    multiply_windows(slabs, sums, filters, place / conv_.groups);
  }

  const Convolution& convolution() const { return conv_; }
  // The images with results that are not finite: to be done again.
  std::vector<int64_t> spoilt() const {
    std::vector<int64_t> images;
    for (int64_t i = 0; i < conv_.images; ++i) {
      if (spoilt_[i]) images.push_back(i);
    }
    return images;
  }

 private:
  // Panels [first_panel, last_panel) of filters of a group.
  struct Task {
    int64_t group, first_panel, last_panel;
  };
  // Evenly spaced positions: rows of `pitch`, of which the first `width` are results.
  struct Segment {
    const uint16_t* first;
    int64_t ld, count, pitch, width;
    BFloat16* to;
    int64_t row_stride, pixel_stride;  // of results
    int64_t image;
  };
  // 32 positions of a segment and 32 filters.
  struct Block {
    const Segment* segment;
    int64_t position, panel;
    const uint16_t* ahead = nullptr;  // pixels to ask for, of the next block
    float* sums = nullptr;
  };
  // Rows [row, row + rows) of an image.
  struct Part {
    int64_t image, row, rows;
  };

  // f(first channel, channels, tap of h, first tap of w) of each run, in the order of the steps.
  template <typename F>
  void each_run(const F& f) const {
    for (int64_t pass = 0; pass < plan_.passes; ++pass) {
      for (int64_t th = 0; th < conv_.h.taps(); ++th) {
        for (int64_t tw = 0; tw < conv_.w.taps(); tw += plan_.taps_of_run) {
          f(pass * plan_.chunk, plan_.channels_of(conv_, pass), th, tw);
        }
      }
    }
  }

  // A run's weights; tap(t): where those of its tap t begin. Returns where the next one's go.
  template <typename Tap>
  uint32_t* pack_run(uint32_t* to, int64_t channels, const Tap& tap, int64_t filters) const {
    const int64_t length = plan_.taps_of_run * channels, pairs = ceil_div(length, 2);
    if (channels % 2 == 0) {
      for (int64_t t = 0; t < plan_.taps_of_run; ++t) {
        pack_pairs(to + t * channels / 2 * kPanel, kPanel, tap(t), conv_.weight_filter,
                   conv_.weight_channel, filters, channels);
      }
    } else {  // pairs reach from tap to tap
      uint16_t* const values = reinterpret_cast<uint16_t*>(to);
      std::fill_n(to, pairs * kPanel, 0u);
      for (int64_t p = 0; p < length; ++p) {
        const uint16_t* const value = tap(p / channels) + p % channels * conv_.weight_channel;
        uint16_t* const out = values + p / 2 * 2 * kPanel + p % 2;
        for (int64_t f = 0; f < filters; ++f) out[2 * f] = value[f * conv_.weight_filter];
      }
    }
    uint32_t* const end = to + round_up(length, kStep) / 2 * kPanel;
    std::fill(to + pairs * kPanel, end, 0u);
    return end;
  }

  void multiply_windows(uint16_t* slabs, float* sums, const Task& task, int64_t place) const {
    const int64_t row = place % plan_.blocks * plan_.rows;
    const int64_t rows = std::min(plan_.rows, conv_.h.out - row);
    const int64_t part = place / plan_.blocks;
    const int64_t image = part * conv_.images / plan_.image_parts;
    const int64_t images = (part + 1) * conv_.images / plan_.image_parts - image;
    const AmxWindows windows(conv_, rows);
    const Tensor4dRef& d = conv_.dst_strides;
    const int64_t pitch = conv_.taps() ? windows.pitch / windows.step : conv_.w.out;
    // Pixels of the image, and so tiles of 32 channels, begin at a cache line.
    const int64_t skew = round_up(windows.lead * plan_.ld, kStep) - windows.lead * plan_.ld;
    std::vector<Segment> segments;
    for (int64_t i = 0; i < images; ++i) {
      uint16_t* const slab = slabs + i * plan_.slab_size + skew;
      if (conv_.taps() > 0) fill(slab, windows, task.group, {image + i, row, rows});
      segments.push_back(
          {slab, windows.step * plan_.ld, (rows - 1) * pitch + conv_.w.out, pitch, conv_.w.out,
           static_cast<BFloat16*>(conv_.dst) + (image + i) * d.n + row * d.h, d.h, d.w, image + i});
    }
    const std::vector<int64_t> offsets = step_offsets(windows);
    multiply(segments, offsets, sums, task);
  }

  void multiply_pixels(float* sums, const Task& task, int64_t place) const {
    const PixelRuns& runs = plan_.runs;
    const int64_t run = place / plan_.pieces, piece = place % plan_.pieces;
    const int64_t begin = piece * runs.length / plan_.pieces;
    const int64_t count = (piece + 1) * runs.length / plan_.pieces - begin;
    const Tensor4dRef &x = conv_.src, &d = conv_.dst_strides;
    const int64_t image = run / runs.rows, row = run % runs.rows;
    const uint16_t* const from = static_cast<const uint16_t*>(x.data) +
                                 first_pixel(conv_.h, conv_.w, x) + image * x.n +
                                 row * conv_.h.step * x.h + begin * runs.from;
    const Segment segment{
        from + task.group * conv_.channels,
        runs.from,
        count,
        count,
        count,
        static_cast<BFloat16*>(conv_.dst) + image * d.n + row * d.h + begin * runs.to,
        0,
        runs.to,
        image};
    std::vector<int64_t> offsets;
    for (int64_t s = 0; s < plan_.steps; ++s) offsets.push_back(s * kStep);
    multiply({segment}, offsets, sums, task);
  }

  // Segments times panels, so many at once as stay in a second-level cache beside the positions: a
  // block of positions meets all of these, so that results are stored by long parts of pixels.
  void multiply(const std::vector<Segment>& segments, const std::vector<int64_t>& offsets,
                float* sums, const Task& task) const {
    if (plan_.passes > 1) {
      for (int64_t j = task.first_panel; j < task.last_panel; ++j) {
        for (const Segment& segment : segments) multiply_passes(segment, offsets, sums, task, j);
      }
      return;
    }
    constexpr int64_t kHeld = int64_t{256} << 10;
    const int64_t panel_bytes = std::max<int64_t>(1, plan_.steps * 16 * kPanel * 4);
    const int64_t panels = std::max<int64_t>(1, kHeld / panel_bytes);
    // Sums are stored while the next block is multiplied.
    Block before{};
    const auto multiply_next = [&](const Block& next) {
      float* const block = sums == before.sums ? sums + kBlock * kPanel : sums;
      ask_for_results(next, task.group);
      multiply_block_of(next, offsets, 0, plan_.steps, block, task.group);
      if (before.sums) store(before, task.group);
      before = next;
      before.sums = block;
    };
    const auto each_block = [&](const Segment& segment, int64_t begin, int64_t end) {
      for (int64_t p = 0; p < segment.count; p += kBlock) {
        for (int64_t j = begin; j < end; ++j) {
          multiply_next(
              {&segment, place(segment, p), j, j == begin ? behind(segment, p) : nullptr});
        }
      }
    };
    for (int64_t j = task.first_panel; j < task.last_panel; j += panels) {
      const int64_t end = std::min(task.last_panel, j + panels);
      for (const Segment& segment : segments) each_block(segment, j, end);
    }
    if (before.sums) store(before, task.group);
  }

  // A segment times a panel, a pass after the other.
  void multiply_passes(const Segment& segment, const std::vector<int64_t>& offsets, float* sums,
                       const Task& task, int64_t j) const {
    int64_t first = 0;
    Block before{};
    for (int64_t pass = 0; pass < plan_.passes; ++pass) {
      const int64_t steps = plan_.steps_of(conv_, pass);
      for (int64_t p = 0; p < segment.count; p += kBlock) {
        const uint16_t* const ahead = j == task.first_panel ? behind(segment, p) : nullptr;
        const Block block{&segment, place(segment, p), j, ahead, sums + p * kPanel};
        if (pass + 1 == plan_.passes) ask_for_results(block, task.group);
        multiply_block_of(block, offsets, first, steps, block.sums, task.group);
        if (pass + 1 < plan_.passes) continue;
        if (before.sums) store(before, task.group);
        before = block;
      }
      first += steps;
    }
    if (before.sums) store(before, task.group);
  }

  void multiply_block_of(const Block& block, const std::vector<int64_t>& offsets, int64_t first,
                         int64_t steps, float* sums, int64_t group) const {
    const Segment& segment = *block.segment;
    const uint16_t* const rows = segment.first + block.position * segment.ld;
    const int64_t* const at = offsets.data() + first;
    const uint32_t* const panel =
        packed_ + ((group * plan_.panels + block.panel) * plan_.steps + first) * 16 * kPanel;
    multiply_block(
        segment.count - block.position, conv_.filters - block.panel * kPanel, steps,
        [=](int64_t s) { return rows + at[s]; }, segment.ld,
        [=](int64_t s) { return panel + s * 16 * kPanel; }, kPanel, sums, kPanel, first > 0,
        [=, ahead = block.ahead, ld = segment.ld](int64_t s) {
          // A line of each pixel is no stream that the processor foresees. Between the products a
          // core brings 12.3 GB/s of them instead of 9.2 (Xeon); all of a block's at once, no more.
          for (int64_t p = 0; ahead && p < kBlock; ++p) {
            __builtin_prefetch(ahead + p * ld + at[s], 0, 2);
          }
        });
  }

  // The pixels in place of the block behind that at position `p`, or nullptr.
  const uint16_t* behind(const Segment& segment, int64_t p) const {
    return plan_.in_place && p + kBlock < segment.count
               ? segment.first + place(segment, p + kBlock) * segment.ld
               : nullptr;
  }

  // Of pixels in place the last block is a whole one, too: it overlaps the one before.
  int64_t place(const Segment& segment, int64_t p) const {
    return plan_.in_place ? std::min(p, segment.count - kBlock) : p;
  }

  // From a position's first element: where the steps' elements are.
  std::vector<int64_t> step_offsets(const AmxWindows& windows) const {
    std::vector<int64_t> offsets;
    each_run([&](int64_t first_channel, int64_t channels, int64_t th, int64_t tw) {
      const int64_t begin = windows.offset(conv_, th, tw) * plan_.ld + first_channel;
      const int64_t length = plan_.taps_of_run * channels;
      for (int64_t k = 0; k < length; k += kStep) offsets.push_back(begin + k);
    });
    return offsets;
  }

  // Fills a slab with the rows that a task's windows of an image meet.
  void fill(uint16_t* slab, const AmxWindows& windows, int64_t group, const Part& part) const {
    const BFloat16* const src = static_cast<const BFloat16*>(conv_.src.data) +
                                part.image * conv_.src.n + group * conv_.channels * conv_.src.c;
    const int64_t ld = plan_.ld, width = conv_.w.extent, row_size = windows.pitch * ld;
    uint16_t* const end = slab + windows.pixels() * ld;
    std::fill_n(slab, windows.lead * ld, 0);
    uint16_t* to = slab + windows.lead * ld;
    for (int64_t phase = 0; phase < windows.phases; ++phase) {
      for (int64_t row = 0; row < windows.slab_rows; ++row, to += row_size) {
        const int64_t y = (part.row + row) * conv_.h.step + windows.taps_h.first() + phase;
        if (y < 0 || y >= conv_.h.extent) {
          std::fill_n(to, row_size, 0);
          continue;
        }
        copy_pixels(reinterpret_cast<BFloat16*>(to), ld, src + y * conv_.src.h, conv_.src, width,
                    conv_.channels);
        if (ld != conv_.channels) {
          for (int64_t x = 0; x < width; ++x) {
            std::fill_n(to + x * ld + conv_.channels, ld - conv_.channels, 0);
          }
        }
        std::fill(to + width * ld, to + row_size, 0);
      }
    }
    std::fill(to, end, 0);
  }

  // Whether rows of sums are, as far as they have been computed: of few filters one tile.
  static bool are_finite(const float* sums, int64_t rows, int64_t filters) {
    constexpr int64_t kTile = 16;
    if (filters > kTile) return all_finite(sums, rows * kPanel);
    bool finite = true;
    for (int64_t i = 0; i < rows; ++i) finite &= all_finite(sums + i * kPanel, kTile);
    return finite;
  }

  // The lines of a result's pixel are stored one by one, which is no stream that the processor
  // foresees: those that are cold are asked for a block of positions ahead.
  void ask_for_results(const Block& block, int64_t group) const {
    const Segment& segment = *block.segment;
    const int64_t position = block.position + kBlock, each = segment.pixel_stride;
    if (conv_.dst_strides.c != 1 || each <= kPanel || position >= segment.count) return;
    const int64_t row = position / segment.pitch, column = position % segment.pitch;
    const BFloat16* const to = segment.to + group * conv_.filters + block.panel * kPanel +
                               row * segment.row_stride +
                               std::min(column, segment.width - 1) * each;
    for (int64_t i = 0; i < kBlock; ++i) __builtin_prefetch(to + i * each, 1, 2);
  }

  void store(const Block& block, int64_t group) const {
    const Segment& segment = *block.segment;
    const int64_t filter = group * conv_.filters + block.panel * kPanel;
    const int64_t filters = std::min(kPanel, conv_.filters - block.panel * kPanel);
    const int64_t begin = block.position, end = std::min(segment.count, begin + kBlock);
    const int64_t stride = conv_.dst_strides.c;
    const float* const bias = bias_.data() + (group * plan_.panels + block.panel) * kPanel;
    bool finite = true;
    for (int64_t p = begin; p < end;) {
      const int64_t row = p / segment.pitch, column = p % segment.pitch;
      const int64_t next = std::min(end, (row + 1) * segment.pitch);
      const int64_t count = std::min(next, row * segment.pitch + segment.width) - p;
      if (count > 0) {
        const float* const from = block.sums + (p - begin) * kPanel;
        finite &= plan_.whole_steps || are_finite(from, count, filters);
        BFloat16* const to =
            segment.to + filter * stride + row * segment.row_stride + column * segment.pixel_stride;
        if (stride == 1 && dot_bf16_available()) {
          store_rounded(from, kPanel, count, filters, bias, to, segment.pixel_stride);
        } else {
          store_pixels(from, kPanel, count, filters, conv_.bias, filter, to, segment.pixel_stride,
                       stride);
        }
      }
      p = next;
    }
    if (!finite) spoilt_[segment.image] = 1;
  }

  const Convolution& conv_;
  const Plan plan_;
  const AmxWindows whole_;
  uint32_t* packed_;
  std::atomic<char>* spoilt_;  // images with results that are not finite
  std::vector<float> bias_;    // of whole panels
};

#endif

}  // namespace braze::cpu
