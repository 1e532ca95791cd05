// The plan of fprop and dgrad, and their launch.
#include "plan.cuh"
#include "product.cuh"

namespace braze::cuda::grouped {
namespace {

constexpr int kMostPixels = 512;  // of a tile, and of all classes
constexpr int kMostParts = 32;
constexpr int kMostSlabBytes = 512;  // of a pixel, where there are several groups

bool is_dgrad(const Conv2dArgs& args) { return args.pass == Conv2dPass::kDgrad; }

// Where a tap is, or begins, along one axis.
struct Axis {
  int64_t cells, first, taps_reach;  // taps_reach: source rows that a cell's taps span
  int64_t first_cell;                // dgrad: of the cells that x's pixels are counted in
};

Axis axis_of(bool dgrad, int64_t x, int64_t y, int64_t taps, int64_t stride, int64_t pad,
             int64_t dilation) {
  if (!dgrad) return {y, -pad, (taps - 1) * dilation + 1, 0};
  // x's pixel h lies at h + pad = stride * cell + remainder, and tap remainder + stride * i of dy's
  // pixel cell - i meets it (if the dilation is not 1, the stride is).
  const int64_t first = pad / stride, last = (x - 1 + pad) / stride;
  const int64_t reach = (ceil_div(taps, stride) - 1) * dilation;
  return {last - first + 1, first - reach, reach + 1, first};
}

void set_classes(const Conv2dShape& s, const Axis& down, const Axis& across, ProductArgs* a) {
  for (int i = 0; i < s.stride_h; ++i) {
    for (int j = 0; j < s.stride_w; ++j) {
      Class& to = a->classes[a->class_count++];
      to.row = i, to.column = j;
      to.rows = static_cast<int>(i < s.r ? ceil_div(s.r - i, s.stride_h) : 0);
      to.columns = static_cast<int>(j < s.s ? ceil_div(s.s - j, s.stride_w) : 0);
      to.out_row = static_cast<int>(s.stride_h * down.first_cell + i - s.pad_h);
      to.out_column = static_cast<int>(s.stride_w * across.first_cell + j - s.pad_w);
    }
  }
}

int granule_of(const Conv2dArgs& args) {
  const int64_t channels = (is_dgrad(args) ? args.shape.k : args.shape.c) / args.shape.groups;
  return bytes_of(args) == 2 && channels % 8 != 0 ? 8 : 16;
}

// All that does not depend on the tile.
ProductArgs problem_of(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const Tensor4dRef &w = args.other, &y = args.out;
  const bool dgrad = is_dgrad(args);
  const auto set = [](auto& to, int64_t from) { to = static_cast<int>(from); };
  const Axis down = axis_of(dgrad, s.h, s.p, s.r, s.stride_h, s.pad_h, s.dilation_h);
  const Axis across = axis_of(dgrad, s.w, s.q, s.s, s.stride_w, s.pad_w, s.dilation_w);
  const int64_t c = s.c / s.groups, k = s.k / s.groups;
  ProductArgs a{};
  a.weights = w.data, a.bias = args.bias, a.out = const_cast<void*>(y.data), a.relu = args.relu;
  set(a.groups, s.groups), set(a.channels, dgrad ? k : c), set(a.results, dgrad ? c : k);
  set(a.cells.batch, s.n), set(a.cells.rows, down.cells), set(a.cells.columns, across.cells);
  set(a.cells.first_h, down.first), set(a.cells.first_w, across.first);
  set(a.cells.step_h, dgrad ? 1 : s.stride_h), set(a.cells.step_w, dgrad ? 1 : s.stride_w);
  set(a.source.rows, down.taps_reach), set(a.source.columns, across.taps_reach);  // of one cell
  // dgrad's taps go backwards.
  set(a.tap_row, dgrad ? down.taps_reach - 1 : 0);
  set(a.tap_column, dgrad ? across.taps_reach - 1 : 0);
  set(a.tap_row_step, dgrad ? -s.dilation_h : s.dilation_h);
  set(a.tap_column_step, dgrad ? -s.dilation_w : s.dilation_w);
  set(a.w_row_step, dgrad ? s.stride_h : 1), set(a.w_column_step, dgrad ? s.stride_w : 1);
  set(a.w_group, k * w.n), set(a.w_row, w.h), set(a.w_column, w.w);
  set(a.w_result, dgrad ? w.c : w.n), set(a.w_channel, dgrad ? w.n : w.c);
  if (dgrad) {
    set_classes(s, down, across, &a);
  } else {
    a.class_count = 1;
    a.classes[0] = {0, 0, 0, 0, static_cast<int>(s.r), static_cast<int>(s.s), 0, 0};
  }
  set(a.out_height, dgrad ? s.h : s.p), set(a.out_width, dgrad ? s.w : s.q);
  set(a.out_channels, dgrad ? s.c : s.k);
  set(a.out_step_h, dgrad ? s.stride_h : 1), set(a.out_step_w, dgrad ? s.stride_w : 1);
  a.out_n = y.n, a.out_h = y.h, a.out_w = y.w;
  const int size = bytes_of(args), granule = granule_of(args);
  set(a.granules, ceil_div(a.channels * size, granule));
  for (int i = 0; i < a.class_count; ++i) {
    Class& of = a.classes[i];
    of.first_step = a.steps;
    set(of.steps, ceil_div(of.rows * of.columns * a.granules, 32 / granule));
    a.steps += of.steps;
  }
  set(a.group_pitch, round_up(a.channels * size, granule));
  a.weight_pairs = size == 2 && a.w_channel == 1 && a.channels % 2 == 0 &&
                   (a.w_group | a.w_result | a.w_row | a.w_column) % 2 == 0 &&
                   is_aligned(w.data, 4);
  a.pairs = a.results % 2 == 0;
  return a;
}

// The arguments of a tile, and its shared memory; false if there are too many of something.
bool set_tile(const Conv2dArgs& args, Tile* tile, ProductArgs* a) {
  const int size = bytes_of(args), granule = granule_of(args);
  const bool dgrad = is_dgrad(args);
  const Conv2dShape& s = args.shape;
  const int reach_h = a->source.rows, reach_w = a->source.columns;
  if (!set_tile(&a->cells, *tile)) return false;
  a->source = source_of(args.gathered, dgrad ? s.p : s.h, dgrad ? s.q : s.w, dgrad ? s.k : s.c,
                        a->channels, tile->slab, granule, size, kThreads);
  spread_banks(&a->source, false);
  a->padded = a->source.runs > 1 || a->source.run_pitch != a->source.run * size;
  const int64_t rows = int64_t{tile->rows - 1} * a->cells.step_h + reach_h;
  const int64_t columns = int64_t{tile->columns - 1} * a->cells.step_w + reach_w;
  if (rows * columns * tile->images > 1 << 14) return false;
  set_extents(&a->source, tile->images, static_cast<int>(rows), static_cast<int>(columns),
              a->cells.step_w);
  a->slab_groups = tile->slab, a->parts = tile->parts, a->passes = tile->passes;
  const ProductTile of_warp = kProductTiles[tile->warp_tile];
  const int columns_of_block = tile->passes * of_warp.columns;
  a->part_results = tile->parts > 1 ? columns_of_block * 8 : a->results;
  a->out_slab = tile->parts > 1 ? a->part_results : a->results * tile->slab;
  // (A part is a multiple of eight results.)
  a->out_copy = copy_of(args.out, a->out_channels, a->results * tile->slab, size);
  const int64_t copies = ceil_div(a->out_slab * size, a->out_copy);
  a->by_out_copies = FastDiv(copies), a->by_pixels = FastDiv(a->cells.pixels);
  a->out_lanes = lanes_of(kThreads, copies);
  a->out_pitch = static_cast<int>(round_up(a->out_slab * size, 16));
  if (a->out_pitch / 16 % 2 == 0) a->out_pitch += 16;
  const int rows_of_warp = 16 * of_warp.rows;
  a->chunks = static_cast<int>(ceil_div(a->cells.pixels, rows_of_warp));
  a->items = a->chunks * a->class_count * tile->slab * tile->passes;
  a->by_chunks = FastDiv(a->chunks), a->by_products = FastDiv(tile->slab * tile->passes);
  a->by_passes = FastDiv(tile->passes), a->by_steps = FastDiv(a->steps);
  a->by_column_tiles = FastDiv(columns_of_block);

  int64_t at = kZeroBytes;
  const auto room = [&](int64_t bytes) {
    const int64_t begin = at;
    at += round_up(bytes, 16);
    return static_cast<int>(std::min<int64_t>(begin, INT_MAX));
  };
  a->granules_at = room(int64_t{a->steps} * (32 / granule) * sizeof(Granule));
  a->pixels_at = room(int64_t{a->chunks} * rows_of_warp * 4);
  a->weights_at = room(int64_t{tile->slab} * columns_of_block * a->steps * 32 * sizeof(uint2));
  a->out_at = room(int64_t{a->class_count} * a->cells.pixels * a->out_pitch);
  a->buffers = tile->buffers;
  a->tiles_at = room(tile->buffers * int64_t{a->source.pixels()} * a->source.pitch);
  if (at > most_shared_memory()) return false;
  tile->shared_bytes = static_cast<int>(at);
  tile->slabs = static_cast<int>(ceil_div(a->groups, tile->slab)) * tile->parts;
  return tile->slabs <= 65535;
}

int blocks_at_once(const Tile& tile) {
  const int by_memory = (most_shared_memory() + 1024) / (tile.shared_bytes + 1024);
  return std::clamp(product_blocks(tile.warp_tile), 1, std::max(1, by_memory));
}

// How long a tile keeps a multiprocessor busy, about, in cycles.
double cost_of(const Conv2dArgs& args, const Tile& tile, const ProductArgs& a) {
  const int size = bytes_of(args), granule = granule_of(args);
  const auto [rows, columns] = kProductTiles[tile.warp_tile];
  const int slab = a.source.slab * size, out = a.out_slab * size;
  const double pixels = double{1} * a.cells.pixels, results = pixels * a.class_count;
  const double patch = double{1} * a.source.images * a.source.rows * a.source.columns;
  const double copies = patch * a.source.by_copies.divisor();
  const double stores = results * a.by_out_copies.divisor();
  const double own = std::min(patch, pixels * a.cells.step_h * a.cells.step_w);
  Work work;
  work.memory = own * memory_bytes(slab) / tile.parts + results * memory_bytes(out);
  work.cache = patch * cache_bytes(slab) + results * cache_bytes(out);
  work.lines = patch * lines_of(slab) + results * lines_of(out);
  // Warps that have no item wait for those that have.
  const double idle = double{1} * round_up(a.items, kWarps) / a.items;
  const double steps = double{1} * a.steps * a.chunks * tile.slab * tile.passes * idle;
  work.products = steps * rows * columns * (is_split(args) ? 4 : 1);
  const double row = is_split(args) ? 40 : size == 4 ? 9 : granule == 16 ? 4 : 7;
  work.instructions = steps * (6 + columns * 2 + rows * (row + columns)) + copies * 24 / 32 +
                      stores * 30 / 32 + a.items * (60 + rows * columns * 20);
  work.shared = steps * (rows * 512 + columns * 256) + 2 * patch * slab + 2 * results * out;
  return cycles_of(work, blocks_at_once(tile), tile.buffers);
}

ProductFunction function_of(const Conv2dArgs& args, const Tile& tile) {
  switch (args.shape.dtype) {
    case DType::kBFloat16: return product_bf16(tile.warp_tile, granule_of(args));
    case DType::kFloat16: return product_fp16(tile.warp_tile, granule_of(args));
    default: break;
  }
  return is_split(args) ? product_fp32(tile.warp_tile) : product_tf32(tile.warp_tile);
}

}  // namespace

std::optional<Tile> product_tile(const Conv2dArgs& given) {
  const Conv2dArgs args = without_skipped_pixels(given);
  const ProductArgs problem = problem_of(args);
  const int size = bytes_of(args), granule = granule_of(args), sms = sm_count();
  const int eights = static_cast<int>(ceil_div(problem.results, 8));
  std::optional<Tile> best;
  double least = 0;
  const auto consider = [&](Tile tile) {
    ProductArgs a = problem;
    if (!set_tile(args, &tile, &a)) return;
    const double weights =
        double{1} * tile.slab * tile.passes * kProductTiles[tile.warp_tile].columns * a.steps * 32;
    const Schedule s = schedule(a.cells.tiles, tile.slabs, blocks_at_once(tile), sms,
                                cost_of(args, tile, a), kStart + weights / kThreads * 60, 0);
    tile.blocks = s.blocks;
    if (!best || s.cycles < least) best = tile, least = s.cycles;
  };
  const int64_t widest = std::max(problem.channels, problem.results) * int64_t{size};
  for (int i = 0; i < kProductTileCount; ++i) {
    if (!has_product_tile(is_split(args), size, granule, i)) continue;
    Tile tile{};
    tile.warp_tile = i;
    const int columns = kProductTiles[i].columns;
    for (int parts = 1; parts <= std::min(eights, kMostParts); ++parts) {
      tile.passes = static_cast<int>(ceil_div(ceil_div(eights, parts), columns));
      tile.parts = parts > 1 ? static_cast<int>(ceil_div(eights, tile.passes * columns)) : 1;
      if (tile.parts < parts) continue;  // that many are not needed
      for (int groups = 1; groups <= problem.groups; groups *= 2) {
        if (groups > 1 && (parts > 1 || groups * widest > kMostSlabBytes)) break;
        tile.slab = groups;
        for_each_tile(problem.cells, kMostPixels / problem.class_count,
                      [&](int images, int rows, int columns) {
                        tile.images = images, tile.rows = rows, tile.columns = columns;
                        for (tile.buffers = 1; tile.buffers <= 2; ++tile.buffers) consider(tile);
                      });
      }
    }
  }
  return best;
}

void launch_product(Stream stream, const Conv2dArgs& given, const Tile& planned) {
  const Conv2dArgs args = without_skipped_pixels(given);
  Tile tile = planned;
  ProductArgs a = problem_of(args);
  set_tile(args, &tile, &a);
  const ProductFunction function = function_of(args, tile);
  allow_shared_memory(function, tile.shared_bytes);
  launch_early(function, dim3(tile.blocks, tile.slabs), dim3(kThreads), tile.shared_bytes, stream,
               a);
  check_launch("conv2d grouped");
}

}  // namespace braze::cuda::grouped
