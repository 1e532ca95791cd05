// The plans of the convolutions of few channels, and their launches.
#include "narrow.h"

#include <optional>

#include "fprop.cuh"
#include "plan.cuh"
#include "wgrad.cuh"
#include "cuda/common/launch.cuh"

namespace braze::cuda::narrow {
namespace {

constexpr int kMaxChannels = 8, kMaxExtent = 1 << 24, kMaxTaps = 64;
constexpr int kMaxFilters = 1 << 19;  // a grid has 65535 blocks of 16, at least, in a column

// Whether it is the result of the convolution that has few channels: of an input gradient, and of a
// weight gradient if it is not the image.
bool is_of_few_results(const Conv2dArgs& args) {
  if (is_wgrad(args)) return args.shape.c > kMaxChannels && args.shape.k <= kMaxChannels;
  return args.pass == Conv2dPass::kDgrad;
}

// The pass as one of an image of few channels: where it is the result that has few, its gradient is
// the image.
Conv2dArgs in_terms_of_images(const Conv2dArgs& args) {
  if (!is_of_few_results(args)) return args;
  Conv2dArgs to = args;
  to.shape = turned(args.shape);
  if (is_wgrad(args)) {
    to.gathered = args.other, to.other = args.gathered, to.out = turned(args.out, args.shape);
  } else {
    to.pass = Conv2dPass::kFprop, to.other = turned(args.other, args.shape);
  }
  return to;
}
const Tensor4dRef& result_of(const Conv2dArgs& args) {  // y or its gradient
  return is_wgrad(args) ? args.other : args.out;
}
bool is_channels_last(const Tensor4dRef& t) { return t.c == 1; }

template <typename Int>
int rounded_up(Int n, int multiple) {
  return static_cast<int>(ceil_div(n, Int{multiple}) * multiple);
}

bool divides(int64_t width, std::initializer_list<int64_t> steps) {
  return std::all_of(steps.begin(), steps.end(), [&](int64_t s) { return s % width == 0; });
}

// All that does not depend on the tile.
Args problem_of(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const Tensor4dRef &x = args.gathered, &w = is_wgrad(args) ? args.out : args.other,
                    &y = result_of(args);
  Args a{};
  a.x = x.data, a.other = args.other.data, a.bias = args.bias;
  a.out = const_cast<void*>(args.out.data);
  a.moments = args.moments, a.tail = Tail::of(args.tail, s.dtype);
  if (!args.tail) a.tail.low = args.relu ? 0 : -INFINITY, a.tail.high = INFINITY;
  const auto set = [](int& to, int64_t from) { to = static_cast<int>(from); };
  set(a.channels, s.c), set(a.height, s.h), set(a.width, s.w), set(a.filters, s.k);
  set(a.taps_h, s.r), set(a.taps_w, s.s), set(a.rows, s.p), set(a.columns, s.q);
  set(a.stride_h, s.stride_h), set(a.stride_w, s.stride_w);
  set(a.pad_h, s.pad_h), set(a.pad_w, s.pad_w);
  a.x_n = x.n, a.x_c = x.c, a.x_h = x.h, a.x_w = x.w;
  a.y_n = y.n, a.y_c = y.c, a.y_h = y.h, a.y_w = y.w;
  a.w_k = w.n, a.w_c = w.c, a.w_r = w.h, a.w_s = w.w;
  a.by_channels = FastDiv(s.c), a.by_taps_w = FastDiv(s.s), a.by_stride = FastDiv(s.stride_w);
  a.is_linear = (s.c == 1 || x.c == 1) && x.w == s.c;
  return a;
}

// The widest that dy can be copied in, in elements.
int gradient_width(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const Tensor4dRef& y = args.other;
  const bool last = is_channels_last(y);
  for (const int bytes : {16, 4}) {
    const int width = bytes / bytes_of(args);
    const bool in_lines = last ? divides(width, {s.k, y.n, y.h, y.w})
                               : y.w == 1 && divides(width, {s.q, y.n, y.h, y.c});
    if (in_lines && is_aligned(y.data, bytes)) return width;
  }
  return 1;
}

// Whether fprop's results can be stored in vectors.
bool has_vectors(const Conv2dArgs& args, const Args& a, int filters) {
  const Tensor4dRef& y = args.out;
  const int size = bytes_of(args);
  if (is_channels_last(y)) {
    const int run = run_of(size, filters / 8);
    return divides(run, {y.n, y.h, y.w}) && is_aligned(y.data, run * size);
  }
  return y.w == 1 && divides(8, {a.tile_columns, y.n, y.c, y.h}) && is_aligned(y.data, 16);
}

// The arguments for tiles of that size; false if they are too many to count.
bool set_tile(const Conv2dArgs& args, const Tile& tile, Args* a) {
  const Conv2dShape& s = args.shape;
  const int size = bytes_of(args), per = per_word(size), step = a->stride_w * a->channels;
  a->tile_rows = tile.rows, a->tile_columns = tile.columns;
  const int64_t across = ceil_div(s.q, int64_t{tile.columns});
  const int64_t of_image = across * ceil_div(s.p, int64_t{tile.rows});
  if (of_image > INT_MAX / 2 || s.n * of_image > INT_MAX / 2) return false;
  a->tiles = static_cast<int>(s.n * of_image);
  a->tiles_of_image = FastDiv(of_image), a->tiles_across = FastDiv(across);
  a->by_tile_columns = FastDiv(tile.columns);

  // A row's words are whole, and inside of the image or not, where it begins at an even element.
  const bool even = a->is_linear && divides(2, {s.w * s.c, a->x_h, a->x_n}) &&
                    (across == 1 || tile.columns * step % 2 == 0) && is_aligned(a->x, 4);
  a->has_words = per == 1 || even;
  a->lead = per == 2 && even ? std::abs(a->pad_w * a->channels) % 2 : 0;
  a->row_terms = rounded_up(a->taps_w * a->channels + a->lead, per);
  a->by_row_terms = FastDiv(a->row_terms);
  a->pitch = rounded_up((tile.columns - 1) * step + a->row_terms, per);
  a->patch_rows = (tile.rows - 1) * a->stride_h + a->taps_h;
  a->patch_words = rounded_up(a->patch_rows * a->pitch / per + 1, 4);
  if (!is_wgrad(args)) {
    a->steps = static_cast<int>(ceil_div(a->taps_h * a->row_terms, term_step(size)));
    a->copies = per == 2 && step % 2 ? 2 : 1;
    a->vectors = has_vectors(args, *a, tile.filters);
    return true;
  }
  const int shift = (a->taps_w - 1) / a->stride_w;  // of neighbours, at most
  // Eight planes begin in banks of their own.
  const int words = static_cast<int>(ceil_div(tile.columns + shift, per));
  const int plane_words = words + (12 - words % 8) % 8;
  a->plane_pitch = plane_words * per;
  a->plane_words = a->patch_rows * step * plane_words;
  a->plane_used = words;
  a->by_parts = FastDiv(ceil_div(words, kPlanePart)), a->by_step = FastDiv(step);
  a->by_steps = FastDiv(tile.columns / pixel_step(size));
  a->copies = per == 2 && shift > 0 ? 2 : 1;
  a->warps_across = tile.warps_across;
  a->gradient_width = gradient_width(args);
  a->gradient_words = gradient_elements(size, is_channels_last(args.other), tile.filters,
                                        tile.rows * tile.columns) /
                      per;
  return true;
}

// How long a tile keeps a multiprocessor busy, about, in cycles; more where there are not several
// blocks, of which one waits for its copies while others compute.
double cost_of(const Conv2dArgs& args, const Tile& tile, const Args& a) {
  const double product = is_split(args) ? 6.4 : 1.6;
  constexpr double kStagedWord = 0.4, kArrangedWord = 0.6, kStart = 400;
  double cycles = kStart + kStagedWord * a.patch_words * a.copies;
  if (is_wgrad(args)) {
    const double steps = tile.rows * tile.columns / pixel_step(bytes_of(args));
    cycles += steps * (tile.filters / 16) * tile.taps * tile.warps_across * product +
              kArrangedWord * a.plane_words + kStagedWord / 4 * a.gradient_words;
  } else {
    cycles += a.steps * kTilePixels / 16.0 * (tile.filters / 8) * product;
  }
  const int blocks = most_shared_memory() / (tile.shared_bytes + 1024);
  // A tile's lines of contiguous results had better be whole sectors of memory, and more.
  const bool short_lines = !is_channels_last(result_of(args)) && tile.columns * bytes_of(args) < 64;
  return cycles * (blocks < 2 ? 2.4 : blocks < 3 ? 1.3 : 1) * (short_lines ? 1.2 : 1);
}

// The best tile, of as many filters as `tile` has and, in wgrad, taps.
std::optional<Tile> best_tile(const Conv2dArgs& args, Tile tile) {
  const Conv2dShape& s = args.shape;
  const bool wgrad = is_wgrad(args);
  const int unit = wgrad ? pixel_step(bytes_of(args)) : 8, most = most_shared_memory();
  const int64_t sms = sm_count();
  std::optional<Tile> best;
  double least = 0;
  const auto consider = [&](int rows, int columns) {
    tile.rows = rows, tile.columns = columns;
    Args a = problem_of(args);
    if (!set_tile(args, tile, &a)) return;
    tile.shared_bytes = wgrad ? wgrad_shared_bytes(a, tile.filters, tile.taps)
                              : fprop_shared_bytes(a, tile.filters / 8);
    if (tile.shared_bytes > most) return;
    // Of the multiprocessor that has the most tiles to do: few images leave others without any.
    const int64_t blocks = int64_t{a.tiles} * tile.filter_blocks * tile.tap_blocks;
    const double cost = cost_of(args, tile, a) * static_cast<double>(ceil_div(blocks, sms));
    if (!best || cost <= least) best = tile, least = cost;  // of equals the widest
  };
  const int widest = static_cast<int>(std::min<int64_t>(s.q, kTilePixels));
  for (int columns = unit; columns < widest + unit && columns <= kTilePixels; columns += unit) {
    const int tallest = static_cast<int>(std::min<int64_t>(s.p, kTilePixels / columns));
    for (int rows = tallest; rows > 0; rows = rows > 8 ? rows / 2 : rows - 1) {
      consider(rows, columns);
    }
  }
  if (!wgrad) consider(static_cast<int>(std::min<int64_t>(s.p, kTilePixels / widest)), widest);
  return best;
}

std::optional<Tile> fprop_tile(const Conv2dArgs& args) {
  const int64_t k = args.shape.k;
  Tile tile{};
  // Fewer filters where many leave no room.
  for (int most = is_split(args) ? 32 : 64; most > 0; most -= 16) {
    tile.filter_blocks = static_cast<int>(ceil_div(k, int64_t{most}));
    tile.filters = rounded_up(ceil_div(k, int64_t{tile.filter_blocks}), 16);
    tile.tap_blocks = 1;
    if (const auto best = best_tile(args, tile)) return best;
  }
  return std::nullopt;
}

std::optional<Tile> wgrad_tile(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  Tile tile{};
  tile.filters = s.k <= 32 || is_split(args) ? 32 : 64;
  tile.filter_blocks = static_cast<int>(ceil_div(s.k, int64_t{tile.filters}));
  // Products of padding cost time, and so does every further time that dy is read.
  constexpr int kReading = 20;
  const int tiles = static_cast<int>(ceil_div(s.r * s.s * s.c, 8));
  int least = INT_MAX;
  for (const int taps : {4, 5, 8}) {
    for (const int across : {1, 2, 4}) {
      const int blocks = static_cast<int>(ceil_div(tiles, taps * across));
      const int cost = blocks * (taps * across + kReading);
      if (cost >= least) continue;
      least = cost;
      tile.taps = taps, tile.warps_across = across, tile.tap_blocks = blocks;
    }
  }
  return best_tile(args, tile);
}

std::optional<Tile> tile_for(const Conv2dArgs& args) {
  return is_wgrad(args) ? wgrad_tile(args) : fprop_tile(args);
}

Function function_of(const Conv2dArgs& args, const Tile& tile) {
  const bool last = is_channels_last(result_of(args));
  const DType dtype = args.shape.dtype;
  const bool bf16 = dtype == DType::kBFloat16, fp16 = dtype == DType::kFloat16;
  if (is_wgrad(args)) {
    const auto of = bf16             ? wgrad_bf16
                    : fp16           ? wgrad_fp16
                    : is_split(args) ? wgrad_fp32
                                     : wgrad_tf32;
    return of(tile.filters, tile.taps, last);
  }
  const auto of = bf16 ? fprop_bf16 : fp16 ? fprop_fp16 : is_split(args) ? fprop_fp32 : fprop_tf32;
  return of(tile.filters / 8, last);
}

// Asks for the shared memory, and how many blocks a multiprocessor then has.
int blocks_of_sm(Function function, const Tile& tile) {
  allow_shared_memory(function, tile.shared_bytes);
  int blocks = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, kThreads, tile.shared_bytes);
  return std::max(1, blocks);
}

}  // namespace

const char* obstacle(const Conv2dArgs& given) {
  if (given.shape.dtype == DType::kFloat64) return "it takes float32, bfloat16 and float16";
  const bool strided = given.shape.stride_h > 1 || given.shape.stride_w > 1;
  if (is_of_few_results(given) && strided) {
    return "it has gradients of results of up to eight channels for a stride of 1";
  }
  const Conv2dArgs args = in_terms_of_images(given);
  const Conv2dShape& s = args.shape;
  const bool few = s.c <= kMaxChannels && s.groups == 1 && s.dilation_h == 1 && s.dilation_w == 1;
  const bool small = std::max({s.r, s.s, s.stride_h, s.stride_w}) <= kMaxTaps &&
                     s.k <= kMaxFilters &&
                     std::max({s.h, s.w, s.p, s.q, s.pad_h, s.pad_w}) < kMaxExtent;
  if (!few || !small || (is_wgrad(args) && !is_dense(given.out, given.shape))) {
    return "it takes up to eight channels, one group, no dilation, filters and strides of up to 64";
  }
  return tile_for(args) ? nullptr : "its tiles do not fit shared memory";
}

void plan(const Conv2dArgs& given, Conv2dPlan* plan) {
  const Conv2dArgs args = in_terms_of_images(given);
  Tile tile = *tile_for(args);
  Args a = problem_of(args);
  set_tile(args, tile, &a);
  // As many blocks as run at once, or fewer with as many tiles for the busiest.
  const int all = sm_count() * blocks_of_sm(function_of(args, tile), tile);
  const int most = std::clamp(all / (tile.filter_blocks * tile.tap_blocks), 1, a.tiles);
  tile.blocks = static_cast<int>(ceil_div(a.tiles, ceil_div(a.tiles, most)));
  plan->tiling.set(tile);
  plan->moment_sets = given.pass == Conv2dPass::kFprop ? tile.blocks : 0;
  if (is_wgrad(args)) {
    const Conv2dShape& s = args.shape;
    plan->workspace_bytes = int64_t{tile.blocks} * s.k * s.c * s.r * s.s * 4;
  }
}

void run(Stream stream, const Conv2dArgs& given, const Conv2dPlan& plan, void* workspace) {
  const Tile& tile = plan.tiling.get<Tile>();
  const Conv2dArgs args = in_terms_of_images(given);
  Args a = problem_of(args);
  set_tile(args, tile, &a);
  if (is_wgrad(args)) {
    a.out = static_cast<float*>(workspace) +
            (is_of_few_results(given) ? last_tap(given.out, given.shape) : 0);
  }
  const Function function = function_of(args, tile);
  allow_shared_memory(function, tile.shared_bytes);
  launch_early(function, dim3(tile.blocks, tile.filter_blocks, tile.tap_blocks), dim3(kThreads),
               tile.shared_bytes, stream, a);
  check_launch("conv2d narrow_input");
  if (!is_wgrad(args)) return;
  add_up(stream, args.shape, tile.blocks, workspace, given.out.data);
}

}  // namespace braze::cuda::narrow
