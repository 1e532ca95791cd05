// What the plans of both kernels have in common.
#pragma once

#include <algorithm>
#include <climits>
#include <optional>

#include "args.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/conv2d/narrow/plan.cuh"

namespace braze::cuda::grouped {

using narrow::allow_shared_memory;
using narrow::bytes_of;
using narrow::is_aligned;
using narrow::is_split;

// What is decided when a pass is planned; the arguments follow from it.
struct Tile {
  int images, rows, columns;      // of cells
  int slab;                       // groups or units of a block
  int parts;                      // of a group or unit
  int warp_tile;                  // the number of a warp's tile
  int buffers;                    // product: of the source's tile
  int passes;                     // product: warps' tiles of a group's, or a part's, results
  int warps_across, pixel_parts;  // wgrad
  int blocks, slabs, shared_bytes;
};

std::optional<Tile> product_tile(const Conv2dArgs& args);
std::optional<Tile> wgrad_tile(const Conv2dArgs& args);
void launch_product(Stream stream, const Conv2dArgs& args, const Tile& tile);
// out: a part of the gradient for each of the tile's blocks.
void launch_wgrad(Stream stream, const Conv2dArgs& args, const Tile& tile, float* out);

inline int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }

// Filters of one tap that a stride keeps apart read a part of the image only, as if it were all.
inline bool skips_pixels(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  return args.pass != Conv2dPass::kDgrad && s.r == 1 && s.s == 1 && s.pad_h == 0 && s.pad_w == 0;
}
inline Conv2dArgs without_skipped_pixels(Conv2dArgs args) {
  if (!skips_pixels(args)) return args;
  Conv2dShape& s = args.shape;
  args.gathered.h *= s.stride_h, args.gathered.w *= s.stride_w;
  s.h = s.p, s.w = s.q, s.stride_h = s.stride_w = 1;
  return args;
}

// Bytes of the widest copies of runs of channels that begin at multiples of `run` channels.
inline int copy_of(const Tensor4dRef& t, int64_t channels, int64_t run, int size) {
  for (const int bytes : {16, 8}) {
    const auto divides = [&](int64_t n) { return n * size % bytes == 0; };
    if (divides(channels) && divides(run) && divides(t.n) && divides(t.h) && divides(t.w) &&
        is_aligned(t.data, bytes)) {
      return bytes;
    }
  }
  return size;
}

// Pixels that so many threads copy side by side.
inline int lanes_of(int threads, int64_t copies) {
  return static_cast<int>(std::max<int64_t>(1, threads / copies));
}

// The channels of a tensor for each block: `count` runs of `run`, padded to multiples of `granule`
// bytes, by blocks of so many threads. The tile's extents are set later.
inline Source source_of(const Tensor4dRef& t, int64_t h, int64_t w, int64_t channels, int64_t run,
                        int count, int granule, int size, int threads) {
  Source s{};
  s.data = t.data;
  s.n = t.n, s.h = t.h, s.w = t.w;
  s.height = static_cast<int>(h), s.width = static_cast<int>(w);
  s.channels = static_cast<int>(channels);
  s.slab = static_cast<int>(run * count);
  const bool is_padded = run * size % granule != 0;
  s.run = static_cast<int>(is_padded ? run : s.slab);
  s.runs = is_padded ? count : 1;
  s.run_pitch = static_cast<int>(round_up(s.run * size, granule));
  s.copy = copy_of(t, channels, s.run, size);
  const int64_t copies = ceil_div(s.run * size, s.copy);
  s.by_run_copies = FastDiv(copies), s.by_copies = FastDiv(copies * s.runs);
  s.lanes = lanes_of(threads, copies * s.runs);
  s.pitch = static_cast<int>(round_up(s.runs * s.run_pitch, 16));
  return s;
}

// So that eight pixels begin in banks of their own when eights of their words are read side by
// side, or when four pixels' eight words are.
inline void spread_banks(Source* s, bool by_words) {
  while (s->pitch / 16 % (by_words ? 4 : 2) != (by_words ? 2 : 1)) s->pitch += 16;
}

inline void set_extents(Source* s, int images, int rows, int columns, int step) {
  s->images = images, s->rows = rows, s->columns = columns, s->step = step;
  s->phase_columns = static_cast<int>(ceil_div(columns, step));
  s->by_columns = FastDiv(columns), s->by_rows = FastDiv(rows), s->by_step = FastDiv(step);
}

// false if they are too many to count.
inline bool set_tile(Cells* c, const Tile& tile) {
  const int64_t across = ceil_div(c->columns, tile.columns);
  const int64_t of_image = across * ceil_div(c->rows, tile.rows);
  if (of_image > INT_MAX / 2) return false;
  const int64_t tiles = of_image * ceil_div(c->batch, tile.images);
  if (tiles > INT_MAX / 2) return false;
  c->images = tile.images, c->tile_rows = tile.rows, c->tile_columns = tile.columns;
  c->pixels = tile.images * tile.rows * tile.columns;
  c->tiles = static_cast<int>(tiles);
  c->tiles_of_images = FastDiv(of_image), c->tiles_across = FastDiv(across);
  c->by_tile_columns = FastDiv(tile.columns), c->by_tile_rows = FastDiv(tile.rows);
  return true;
}

// Calls f(images, rows, columns) for the tiles worth a try: whole images and several of them, or
// parts of one, in equal shares.
template <typename F>
void for_each_tile(const Cells& c, int most_pixels, const F& f) {
  if (int64_t{c.rows} * c.columns <= most_pixels) {
    const int most = std::min(c.batch, most_pixels / (c.rows * c.columns));
    for (int images = 1; images <= most; images = images < 4 ? images + 1 : images * 2) {
      f(images, c.rows, c.columns);
    }
  }
  int last_columns = 0, last_rows = 0;
  for (int across = 1; across <= 64; ++across) {
    const int columns = static_cast<int>(ceil_div(c.columns, across));
    if (columns == last_columns || columns > most_pixels) continue;
    last_columns = columns, last_rows = 0;
    for (int down = 1; down <= 64; ++down) {
      const int rows = static_cast<int>(ceil_div(c.rows, down));
      if (rows == last_rows || int64_t{rows} * columns > most_pixels) continue;
      last_rows = rows;
      f(1, rows, columns);
      if (rows == 1) break;
    }
    if (columns <= 8) break;
  }
}

// What a tile asks of a multiprocessor: bytes of memory, of L2 and of shared memory, lines that
// copies touch, products of mma.sync, warps' instructions.
struct Work {
  double memory, cache, lines, shared, products, instructions;
};

// Of a run of contiguous bytes, which begins anywhere in a sector of 32 bytes if it does not fill
// some. Short runs are less of what memory reads at a time.
inline double cache_bytes(int run) { return run % 32 == 0 ? run : round_up(run, 32) + 16; }
inline double memory_bytes(int run) { return run + 24; }
inline double lines_of(int run) { return std::max(1.0, run / 128.0); }

// In cycles, of which an H200 has 1.755e9 a second, on one of `blocks` that share the
// multiprocessor: the fewer, the less of one hides behind another's.
inline double cycles_of(const Work& work, int blocks, int buffers = 2) {
  constexpr double kMemory = 18, kCache = 32, kShared = 128, kProduct = 1.6, kIssue = 3;
  const double each[] = {
      work.memory / kMemory, work.cache / kCache,      work.lines,
      work.shared / kShared, work.products * kProduct, work.instructions / kIssue};
  double sum = 0, most = 0;
  for (const double cycles : each) sum += cycles, most = std::max(most, cycles);
  const double apart = blocks == 1 ? 0.3 : blocks == 2 ? 0.15 : 0.1;
  // With one buffer a block computes and copies in turns.
  const double in_turns = buffers == 1 ? (work.memory / kMemory + 900) / blocks : 0;
  return most + apart * (sum - most) + 900.0 / blocks + in_turns;
}

constexpr double kStart = 3000;  // cycles of a block, and of the launch

// The number of blocks for each slab that is done first, and the cycles it takes. tile_cycles: of a
// tile, if its multiprocessor has as many blocks as it can; block_cycles: of a block's start and
// end; joint_cycles: of the whole device, for each block of all slabs.
struct Schedule {
  int blocks;
  double cycles;
};
inline Schedule schedule(int tiles, int slabs, int at_once, int sms, double tile_cycles,
                         double block_cycles, double joint_cycles) {
  Schedule best{1, 0};
  const auto consider = [&](int most) {
    // Fewer, if the busiest has as many tiles as it has with all of them.
    const int64_t each = ceil_div(tiles, most), blocks = ceil_div(tiles, each);
    const int64_t of_sm = ceil_div(blocks * slabs, sms);
    // Blocks that share a multiprocessor share its time.
    const double alone = of_sm < 2 && at_once > 1 ? 1.3 : 1;  // its waits are not hidden
    const double cycles =
        of_sm * (each * tile_cycles * alone + block_cycles) + joint_cycles * blocks;
    if (best.cycles == 0 || cycles < best.cycles) best = {static_cast<int>(blocks), cycles};
  };
  for (int of_sm = 1; of_sm <= at_once; ++of_sm) {
    for (int most = std::min(tiles, of_sm * sms / slabs); most > 1; most /= 2) consider(most);
  }
  consider(1);
  return best;
}

}  // namespace braze::cuda::grouped
