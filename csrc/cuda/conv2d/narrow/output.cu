// The plans of the convolutions of few results, and their launches.
#include "output.h"

#include <optional>

#include "output.cuh"
#include "plan.cuh"
#include "cuda/common/launch.cuh"

namespace braze::cuda::narrow {
namespace {

constexpr int kMaxExtent = 1 << 24, kMaxTaps = 64, kMaxSteps = 4;  // of a chunk

struct OutputTile {
  int rows, columns, steps, blocks, shared_bytes;
};

using OutputFunction = void (*)(OutputArgs);

bool is_dgrad(const Conv2dArgs& args) { return args.pass == Conv2dPass::kDgrad; }

OutputFunction function_of(const Conv2dArgs& args) {
  switch (args.shape.dtype) {
    case DType::kBFloat16: return narrow_output_kernel<__nv_bfloat16, false>;
    case DType::kFloat16: return narrow_output_kernel<__half, false>;
    default: break;
  }
  return is_split(args) ? narrow_output_kernel<float, true> : narrow_output_kernel<float, false>;
}

// All that does not depend on the tile.
OutputArgs problem_of(const Conv2dArgs& args) {
  const bool dgrad = is_dgrad(args);
  const Conv2dShape s = dgrad ? turned(args.shape) : args.shape;
  const Tensor4dRef w = dgrad ? turned(args.other, args.shape) : args.other;
  const Tensor4dRef &x = args.gathered, &y = args.out;
  OutputArgs a{};
  a.source = x.data, a.weights = w.data, a.bias = args.bias, a.out = const_cast<void*>(y.data);
  const auto set = [](int& to, int64_t from) { to = static_cast<int>(from); };
  set(a.results, s.k), set(a.channels, s.c), set(a.height, s.h), set(a.width, s.w);
  set(a.taps_h, s.r), set(a.taps_w, s.s), set(a.rows, s.p), set(a.columns, s.q);
  set(a.stride_h, s.stride_h), set(a.stride_w, s.stride_w);
  set(a.pad_h, s.pad_h), set(a.pad_w, s.pad_w);
  set(a.dilation_h, s.dilation_h), set(a.dilation_w, s.dilation_w);
  a.x_n = x.n, a.x_h = x.h, a.x_w = x.w;
  a.y_n = y.n, a.y_c = y.c, a.y_h = y.h, a.y_w = y.w;
  a.w_k = w.n, a.w_c = w.c, a.w_r = w.h, a.w_s = w.w;
  a.by_taps = FastDiv(s.r * s.s), a.by_taps_w = FastDiv(s.s);
  const bool even = a.results % 2 == 0 && y.c == 1 && (y.n | y.h | y.w) % 2 == 0;
  a.pairs = even && is_aligned(y.data, 2 * bytes_of(args)), a.relu = args.relu;
  return a;
}

// The arguments for tiles of that size; false if they are too many to count.
bool set_tile(const Conv2dArgs& args, const OutputTile& tile, OutputArgs* a) {
  const int64_t across = ceil_div(int64_t{a->columns}, int64_t{tile.columns});
  const int64_t of_image = across * ceil_div(int64_t{a->rows}, int64_t{tile.rows});
  if (of_image > INT_MAX / 2 || args.shape.n * of_image > INT_MAX / 2) return false;
  a->tile_rows = tile.rows, a->tile_columns = tile.columns;
  a->tiles = static_cast<int>(args.shape.n * of_image);
  a->tiles_of_image = FastDiv(of_image), a->tiles_across = FastDiv(across);
  a->by_tile_columns = FastDiv(tile.columns);
  a->patch_rows = (tile.rows - 1) * a->stride_h + (a->taps_h - 1) * a->dilation_h + 1;
  a->patch_columns = (tile.columns - 1) * a->stride_w + (a->taps_w - 1) * a->dilation_w + 1;
  a->steps = tile.steps;
  const int all_steps = ceil_div(a->channels, channel_step(bytes_of(args)));
  a->chunks = ceil_div(all_steps, tile.steps);
  // Rows of ldmatrix, eight pixels, begin in banks of their own.
  a->pitch = 32 * tile.steps + 16;
  a->by_units = FastDiv(2 * tile.steps), a->by_patch_columns = FastDiv(a->patch_columns);
  return true;
}

// How long a tile keeps a multiprocessor busy, about, in cycles.
double cost_of(const Conv2dArgs& args, const OutputArgs& a, int shared_bytes) {
  constexpr double kStart = 600, kStagedUnit = 0.4;
  const double product = is_split(args) ? 80 : 24;
  const double units = 2.0 * a.steps * a.chunks * a.patch_rows * a.patch_columns;
  const int row_tiles = ceil_div(a.tile_rows * a.tile_columns, 16 * kOutputWarps);  // of a warp
  const double products = double{1} * a.taps_h * a.taps_w * a.steps * a.chunks * row_tiles;
  const int blocks = most_shared_memory() / (shared_bytes + 1024);
  return (kStart + kStagedUnit * units + product * products) * (blocks < 2   ? 1.6
                                                                : blocks < 3 ? 1.1
                                                                             : 1);
}

std::optional<OutputTile> tile_for(const Conv2dArgs& args) {
  const OutputArgs problem = problem_of(args);
  const int64_t sms = sm_count();
  const int most = most_shared_memory(), pixels = kRowTiles * kOutputWarps * 16;
  const int all_steps = ceil_div(problem.channels, channel_step(bytes_of(args)));
  std::optional<OutputTile> best;
  double least = 0;
  for (int columns = std::min(problem.columns, pixels);; columns = ceil_div(columns, 2)) {
    const int tallest = std::min(problem.rows, pixels / columns);
    for (int rows = tallest; rows > 0; rows = rows > 8 ? rows / 2 : rows - 1) {
      for (int steps = std::min(kMaxSteps, all_steps); steps > 0; steps /= 2) {
        OutputTile tile{rows, columns, steps, 0, 0};
        OutputArgs a = problem;
        if (!set_tile(args, tile, &a)) continue;
        const int64_t taps = int64_t{a.taps_h} * a.taps_w;
        if (taps * a.chunks * steps > most / 256 ||
            int64_t{a.patch_rows} * a.patch_columns > most / 16) {
          continue;  // far too large: products of these would not fit an int
        }
        tile.shared_bytes = output_shared_bytes(a);
        if (tile.shared_bytes > most) continue;
        const double cost = cost_of(args, a, tile.shared_bytes) *
                            static_cast<double>(ceil_div(int64_t{a.tiles}, sms));
        if (!best || cost < least) best = tile, least = cost;
      }
    }
    if (columns == 1) break;
  }
  return best;
}

}  // namespace

const char* output_obstacle(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (args.pass == Conv2dPass::kWgrad) return "it has no weight gradient";
  if (s.dtype == DType::kFloat64) return "it takes float32, bfloat16 and float16";
  const bool dgrad = is_dgrad(args);
  const int64_t results = dgrad ? s.c : s.k, channels = dgrad ? s.k : s.c;
  const int64_t unit = 16 / bytes_of(args);
  const Tensor4dRef& x = args.gathered;
  const bool strided = s.stride_h > 1 || s.stride_w > 1;
  if (results > kResults || s.groups > 1 || (dgrad && strided)) {
    return "it takes up to eight results a pixel, one group, and gradients of a stride of 1";
  }
  const bool vectors = x.c == 1 && channels % unit == 0 && x.n % unit == 0 && x.h % unit == 0 &&
                       x.w % unit == 0 && is_aligned(x.data, 16);
  if (!vectors) return "it reads 16 bytes of a pixel's channels at a time, channels last";
  const bool small =
      std::max({s.r, s.s, s.stride_h, s.stride_w, s.dilation_h, s.dilation_w}) <= kMaxTaps &&
      std::max({s.h, s.w, s.p, s.q, s.pad_h, s.pad_w, channels}) < kMaxExtent;
  if (!small) return "it takes filters, strides and dilations of up to 64";
  return tile_for(args) ? nullptr : "its tiles do not fit shared memory";
}

void plan_output(const Conv2dArgs& args, Conv2dPlan* plan) {
  OutputTile tile = *tile_for(args);
  OutputArgs a = problem_of(args);
  set_tile(args, tile, &a);
  const OutputFunction function = function_of(args);
  allow_shared_memory(function, tile.shared_bytes);
  int at_once = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at_once, function, kOutputThreads,
                                                tile.shared_bytes);
  // As many blocks as run at once, or fewer with as many tiles for the busiest.
  const int most = std::min(std::max(1, at_once) * sm_count(), a.tiles);
  tile.blocks = ceil_div(a.tiles, ceil_div(a.tiles, most));
  plan->tiling.set(tile);
}

void run_output(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void*) {
  const OutputTile& tile = plan.tiling.get<OutputTile>();
  OutputArgs a = problem_of(args);
  set_tile(args, tile, &a);
  const OutputFunction function = function_of(args);
  allow_shared_memory(function, tile.shared_bytes);
  launch_early(function, dim3(tile.blocks), dim3(kOutputThreads), tile.shared_bytes, stream, a);
  check_launch("conv2d narrow_output");
}

}  // namespace braze::cuda::narrow
