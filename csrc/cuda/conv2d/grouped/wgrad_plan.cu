// The plan of wgrad, and its launch.
#include "plan.cuh"
#include "wgrad.cuh"

namespace braze::cuda::grouped {
namespace {

constexpr int kMostPixels = 512;     // of a tile
constexpr int kMostSlabBytes = 512;  // of a pixel, where there are several units

// All that does not depend on the tile.
WgradArgs problem_of(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const Tensor4dRef& w = args.out;
  const auto set = [](auto& to, int64_t from) { to = static_cast<int>(from); };
  WgradArgs a{};
  set(a.channels, s.c / s.groups), set(a.filters, s.k / s.groups);
  set(a.all_channels, s.c), set(a.all_filters, s.k);
  a.out_size = s.k * a.channels * s.r * s.s;
  // Sixteen filters are the rows of a product: those of several groups, if they are few.
  set(a.unit_groups, std::clamp<int64_t>(16 / a.filters, 1, s.groups));
  set(a.units, ceil_div(s.groups, a.unit_groups));
  set(a.taps, s.r * s.s), set(a.taps_w, s.s);
  set(a.column_tiles, a.taps * ceil_div(a.unit_groups * a.channels, 8));
  set(a.tap_row_step, s.dilation_h), set(a.tap_column_step, s.dilation_w);
  set(a.w_filter, w.n), set(a.w_channel, w.c), set(a.w_row, w.h), set(a.w_column, w.w);
  set(a.cells.batch, s.n), set(a.cells.rows, s.p), set(a.cells.columns, s.q);
  set(a.cells.step_h, s.stride_h), set(a.cells.step_w, s.stride_w);
  set(a.cells.first_h, -s.pad_h), set(a.cells.first_w, -s.pad_w);
  a.by_taps = FastDiv(a.taps), a.by_taps_w = FastDiv(a.taps_w);
  a.by_channels = FastDiv(a.channels), a.by_filters = FastDiv(a.filters);
  return a;
}

// The arguments of a tile, and its shared memory; false if there are too many of something.
bool set_tile(const Conv2dArgs& args, Tile* tile, WgradArgs* a) {
  const Conv2dShape& s = args.shape;
  const int size = bytes_of(args);
  const WarpTile of_warp = kWarpTiles[tile->warp_tile];
  if (!set_tile(&a->cells, *tile)) return false;
  const int64_t rows = int64_t{tile->rows - 1} * s.stride_h + (s.r - 1) * s.dilation_h + 1;
  const int64_t columns = int64_t{tile->columns - 1} * s.stride_w + (s.s - 1) * s.dilation_w + 1;
  if (rows * columns * tile->images > 1 << 14) return false;
  const int64_t channels = int64_t{a->channels} * a->unit_groups;
  const int64_t filters = int64_t{a->filters} * a->unit_groups;
  const int granule = 8 * size, threads = 32 * tile->warps_across * tile->pixel_parts;
  a->x = source_of(args.gathered, s.h, s.w, s.c, channels, tile->slab, granule, size, threads);
  a->dy = source_of(args.other, s.p, s.q, s.k, filters, tile->slab, granule, size, threads);
  spread_banks(&a->x, size == 4), spread_banks(&a->dy, size == 4);
  set_extents(&a->x, tile->images, static_cast<int>(rows), static_cast<int>(columns),
              static_cast<int>(s.stride_w));
  set_extents(&a->dy, tile->images, tile->rows, tile->columns, 1);
  a->x_unit_pitch = static_cast<int>(round_up(channels * size, granule));
  a->dy_unit_pitch = static_cast<int>(round_up(filters * size, granule));
  a->slab_units = tile->slab, a->parts = tile->parts;
  a->warps_across = tile->warps_across, a->pixel_parts = tile->pixel_parts;
  a->tiles_down = static_cast<int>(ceil_div(filters, 16 * of_warp.rows));
  a->tiles_of_unit = a->tiles_down * static_cast<int>(ceil_div(a->column_tiles, of_warp.columns));
  a->by_tiles_of_unit = FastDiv(a->tiles_of_unit), a->by_tiles_down = FastDiv(a->tiles_down);

  const int64_t pixels = round_up(a->cells.pixels, wgrad_step(size));
  const int64_t x_bytes = int64_t{a->x.pixels()} * a->x.pitch;
  // The last sixteen filters may reach beyond the slab.
  const int64_t dy_bytes = pixels * a->dy.pitch, slack = int64_t{16} * of_warp.rows * size;
  a->pixels_at = kZeroBytes;
  a->x_at = static_cast<int>(kZeroBytes + round_up(2 * pixels * 4, 16));
  const int64_t dy_at = a->x_at + 2 * x_bytes;
  if (dy_at > most_shared_memory()) return false;
  a->dy_at = static_cast<int>(dy_at), a->dy_bytes = static_cast<int>(dy_bytes);
  const int64_t tiles_end = dy_at + 2 * dy_bytes + slack;
  const int64_t sums_end = a->x_at + (tile->pixel_parts > 1 ? int64_t{tile->warps_across} : 0) *
                                         of_warp.rows * of_warp.columns * 512;
  const int64_t bytes = std::max(tiles_end, sums_end);
  if (bytes > most_shared_memory()) return false;
  tile->shared_bytes = static_cast<int>(bytes);
  tile->slabs = static_cast<int>(ceil_div(a->units, tile->slab)) * tile->parts;
  return tile->slabs <= 65535;
}

int blocks_at_once(const Tile& tile) {
  const int warps = tile.warps_across * tile.pixel_parts;
  const int by_memory = (most_shared_memory() + 1024) / (tile.shared_bytes + 1024);
  return std::clamp(wgrad_warps(tile.warp_tile) / warps, 1, std::max(1, by_memory));
}

// How long a tile keeps a multiprocessor busy, about, in cycles.
double cost_of(const Conv2dArgs& args, const Tile& tile, const WgradArgs& a) {
  const int size = bytes_of(args);
  const auto [rows, columns] = kWarpTiles[tile.warp_tile];
  const int x_slab = a.x.slab * size, dy_slab = a.dy.slab * size;
  const double pixels = double{1} * a.cells.pixels;
  const double patch = double{1} * a.x.images * a.x.rows * a.x.columns;
  const double own = std::min(patch, pixels * a.cells.step_h * a.cells.step_w);
  Work work;
  work.memory = (own * memory_bytes(x_slab) + pixels * memory_bytes(dy_slab)) / tile.parts;
  work.cache = patch * cache_bytes(x_slab) + pixels * cache_bytes(dy_slab);
  work.lines = patch * lines_of(x_slab) + pixels * lines_of(dy_slab);
  const int warps = tile.warps_across * tile.pixel_parts;
  const int64_t all_steps = ceil_div(a.cells.pixels, wgrad_step(size));
  const double steps = static_cast<double>(ceil_div(all_steps, tile.pixel_parts)) * warps;
  // Warps are spread over four schedulers, of which the busiest decides.
  const double uneven =
      blocks_at_once(tile) > 1 ? 1 : 4.0 * static_cast<double>(ceil_div(warps, 4)) / warps;
  work.products = steps * rows * columns * uneven * (is_split(args) ? 4 : 1);
  const double loads =
      size == 2 ? rows + columns * 1.5 : rows * 8 + columns * (is_split(args) ? 24 : 8);
  const double copies = patch * a.x.by_copies.divisor() + pixels * a.dy.by_copies.divisor();
  work.instructions = steps * (12 + loads + rows * columns) + copies * 24 / 32;
  work.shared = steps * (rows * 512 + columns * 256) + patch * x_slab + pixels * dy_slab;
  return cycles_of(work, blocks_at_once(tile));
}

WgradFunction function_of(const Conv2dArgs& args, const Tile& tile) {
  switch (args.shape.dtype) {
    case DType::kBFloat16: return wgrad_bf16(tile.warp_tile);
    case DType::kFloat16: return wgrad_fp16(tile.warp_tile);
    default: break;
  }
  return is_split(args) ? wgrad_fp32(tile.warp_tile) : wgrad_tf32(tile.warp_tile);
}

}  // namespace

std::optional<Tile> wgrad_tile(const Conv2dArgs& given) {
  const Conv2dArgs args = without_skipped_pixels(given);
  const WgradArgs problem = problem_of(args);
  const int size = bytes_of(args), sms = sm_count();
  std::optional<Tile> best;
  double least = 0;
  const auto consider = [&](Tile tile) {
    WgradArgs a = problem;
    if (!set_tile(args, &tile, &a)) return;
    // Every block leaves its sums, which are read again.
    constexpr double kDeviceRate = 2000;  // bytes of memory in a cycle
    const double sums = static_cast<double>(problem.out_size) * 8 / kDeviceRate;
    const Schedule s = schedule(a.cells.tiles, tile.slabs, blocks_at_once(tile), sms,
                                cost_of(args, tile, a), kStart, sums);
    tile.blocks = s.blocks;
    if (!best || s.cycles < least) best = tile, least = s.cycles;
  };
  const int64_t channels = int64_t{problem.channels} * problem.unit_groups;
  const int64_t filters = int64_t{problem.filters} * problem.unit_groups;
  for (int i = 0; i < kWarpTileCount; ++i) {
    if (!has_warp_tile(is_split(args), size, i)) continue;
    Tile tile{};
    tile.warp_tile = i;
    const int most = wgrad_warps(i);
    const int64_t of_unit = ceil_div(filters, 16 * kWarpTiles[i].rows) *
                            ceil_div(problem.column_tiles, kWarpTiles[i].columns);
    for (int units = 1; units <= problem.units; units *= 2) {
      if (units > 1 &&
          (units * of_unit > most || units * std::max(channels, filters) * size > kMostSlabBytes)) {
        break;
      }
      tile.slab = units;
      tile.parts = units > 1 ? 1 : static_cast<int>(ceil_div(of_unit, most));
      tile.warps_across = static_cast<int>(ceil_div(units * of_unit, tile.parts));
      for (int pixel_parts = 1; pixel_parts * tile.warps_across <= most; pixel_parts *= 2) {
        tile.pixel_parts = pixel_parts;
        for_each_tile(problem.cells, kMostPixels, [&](int images, int rows, int columns) {
          tile.images = images, tile.rows = rows, tile.columns = columns;
          consider(tile);
        });
      }
    }
  }
  return best;
}

void launch_wgrad(Stream stream, const Conv2dArgs& given, const Tile& planned, float* out) {
  const Conv2dArgs args = without_skipped_pixels(given);
  Tile tile = planned;
  WgradArgs a = problem_of(args);
  set_tile(args, &tile, &a);
  a.out = out;
  const WgradFunction function = function_of(args, tile);
  allow_shared_memory(function, tile.shared_bytes);
  launch_early(function, dim3(tile.blocks, tile.slabs),
               dim3(32 * tile.warps_across * tile.pixel_parts), tile.shared_bytes, stream, a);
  check_launch("conv2d grouped wgrad");
}

}  // namespace braze::cuda::grouped
