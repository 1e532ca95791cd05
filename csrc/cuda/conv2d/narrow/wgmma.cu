// The plans of narrow/wgmma.cuh's and narrow/wgmma_wgrad.cuh's kernels, and their launches.
#include "wgmma.h"

#include <climits>
#include <optional>

#include "plan.cuh"
#include "wgmma.cuh"
#include "wgmma_wgrad.cuh"
#include "cuda/common/launch.cuh"

namespace braze::cuda::narrow {
namespace {

constexpr int kMostRows = 64;  // of a tile

struct WgmmaTile {
  int rows, columns, shared_bytes;
  dim3 grid;
};

int chunk_pixels(const Conv2dShape& s) {
  return kChunk / (kPixelElements * static_cast<int>(size_of(s.dtype)));
}
// Copies of a patch, and planes of a copy.
int copies_of(const Conv2dShape& s) { return s.stride_w % chunk_pixels(s) == 0 ? 1 : 2; }
int planes_of(const Conv2dShape& s) {
  return static_cast<int>(s.stride_w * copies_of(s) / chunk_pixels(s));
}
int row_steps(const Conv2dShape& s) {
  return static_cast<int>(ceil_div(s.s, int64_t{2} * chunk_pixels(s)));
}
// Filter rows of a consumer of the weight gradient.
int own_rows(const Conv2dShape& s) { return static_cast<int>(ceil_div(s.r, int64_t{kMostGroups})); }

// All that does not depend on the tile.
WgmmaWgradArgs problem_of(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const bool wgrad = is_wgrad(args);
  const Tensor4dRef &x = args.gathered, &w = wgrad ? args.out : args.other,
                    &y = wgrad ? args.other : args.out;
  WgmmaWgradArgs a{};
  a.x = x.data, a.w = w.data, a.bias = args.bias, a.y = const_cast<void*>(y.data);
  a.moments = args.moments, a.tail = Tail::of(args.tail, s.dtype);
  if (!args.tail) a.tail.low = args.relu ? 0 : -INFINITY, a.tail.high = INFINITY;
  a.bounds = a.tail.low > -INFINITY || a.tail.high < INFINITY;
  const auto set = [](int& to, int64_t from) { to = static_cast<int>(from); };
  set(a.channels, s.c), set(a.height, s.h), set(a.width, s.w), set(a.filters, s.k);
  set(a.taps_h, s.r), set(a.taps_w, s.s), set(a.rows, s.p), set(a.columns, s.q);
  set(a.stride_h, s.stride_h), set(a.stride_w, s.stride_w);
  set(a.pad_h, s.pad_h), set(a.pad_w, s.pad_w);
  a.x_n = x.n, a.x_h = x.h, a.y_n = y.n, a.y_h = y.h, a.y_w = y.w;
  a.w_k = w.n, a.w_c = w.c, a.w_r = w.h, a.w_s = w.w;
  a.copies = copies_of(s), a.planes = planes_of(s), a.row_steps = row_steps(s);
  a.by_planes = FastDiv(a.planes), a.by_stride_h = FastDiv(s.stride_h);
  a.weights = s.k * s.c * s.r * s.s;
  a.groups = static_cast<int>(ceil_div(s.r, int64_t{own_rows(s)}));
  return a;
}

// The arguments for tiles of that size; false if they do not fit.
bool set_tile(const Conv2dArgs& args, WgmmaTile& tile, WgmmaWgradArgs* a) {
  const Conv2dShape& s = args.shape;
  a->tile_rows = tile.rows, a->tile_columns = tile.columns;
  const int64_t across = ceil_div(s.q, int64_t{tile.columns});
  const int64_t of_image = across * ceil_div(s.p, int64_t{tile.rows});
  if (of_image > INT_MAX / 2 || s.n * of_image > INT_MAX / 2) return false;
  a->tiles = static_cast<int>(s.n * of_image);
  a->tiles_of_image = FastDiv(of_image), a->tiles_across = FastDiv(across);
  a->pitch = (tile.columns + a->copies - 1) / a->copies + (2 * a->row_steps - 1) / a->planes;
  a->by_pitch = FastDiv(a->pitch);
  a->row_chunks = a->pitch * a->planes;
  a->by_row_chunks = FastDiv(a->row_chunks);
  a->patch_rows = (tile.rows - 1) * a->stride_h + a->taps_h;
  a->plane_bytes = (a->patch_rows + a->stride_h - 1) / a->stride_h * a->pitch * kChunk;
  a->phase_bytes = a->planes * a->plane_bytes, a->copy_bytes = a->stride_h * a->phase_bytes;
  a->stage_bytes = a->copies * a->copy_bytes;
  a->positions = tile.rows * a->pitch;
  a->products = (a->positions + kPositions - 1) / kPositions;
  for (int step = 0; step < a->row_steps; ++step) {
    a->step_bytes[step] = 2 * step % a->planes * a->plane_bytes + 2 * step / a->planes * kChunk;
  }
  // Products read past a patch, for positions that are not stored; no more than they would of
  // chunks that are not shared, as which compute-sanitizer counts them.
  constexpr int kPast = kPositions * 2 * kChunk;
  if (is_wgrad(args)) {
    // A copy of dy has to end where the tile's columns do.
    const bool in_stripes = s.q % tile.columns == 0 && tile.columns % a->copies == 0;
    if ((across > 1 && !in_stripes) || a->pitch > 256) return false;
    a->dy_bytes = halo::aligned((a->positions + kDepth - 1) / kDepth * kDepth * kDyRowBytes);
    a->stage_bytes = halo::aligned(a->stage_bytes + kPast) + a->copies * a->dy_bytes;
    tile.shared_bytes = 1024 + kPatchStages * a->stage_bytes;
  } else {
    tile.shared_bytes = 1024 + wgmma_out_bytes(bytes_of(args)) + wgmma_weight_bytes(*a) +
                        kPatchStages * a->stage_bytes + kPast;
  }
  return tile.shared_bytes <= halo::kSharedBytes;
}

// What the busiest block takes, about, in cycles: a tile is staged while the one before it is
// multiplied, whose products wait for each other.
double cost_of(const Conv2dArgs& args, const WgmmaWgradArgs& a, int blocks) {
  constexpr double kStep = 200, kResults = 1000, kStage = 1500, kWgradStep = 24;
  const double kStagedChunk = bytes_of(args) == 2 ? 2 : 3.5;
  const double product = a.taps_h * a.row_steps * kStep + kResults;
  double products = a.copies * a.products * product / kConsumers;
  if (is_wgrad(args)) {
    products =
        a.copies * ceil_div(a.positions, kDepth) * own_rows(args.shape) * a.groups * kWgradStep;
  }
  const double staging = kStage + kStagedChunk * a.copies * a.patch_rows * a.row_chunks;
  const auto tiles = static_cast<double>(ceil_div(a.tiles, blocks));
  return staging + (tiles - 1) * std::max(products, staging) + products;
}

std::optional<WgmmaTile> tile_for(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const int filter_blocks = static_cast<int>(ceil_div(s.k, int64_t{kFilterRows}));
  std::optional<WgmmaTile> best;
  double least = 0;
  WgmmaWgradArgs a = problem_of(args);
  for (int64_t across = 1; across <= s.q; across *= 2) {
    const int columns = static_cast<int>(ceil_div(ceil_div(s.q, across), a.copies) * a.copies);
    const int tallest = static_cast<int>(std::min<int64_t>(s.p, kMostRows));
    for (int rows = 1; rows <= tallest; ++rows) {
      WgmmaTile tile{rows, columns, 0, {}};
      if (!set_tile(args, tile, &a)) break;
      tile.grid = dim3(std::min(a.tiles, std::max(1, sm_count() / filter_blocks)), filter_blocks);
      const double cost = cost_of(args, a, static_cast<int>(tile.grid.x));
      if (!best || cost < least) best = tile, least = cost;
    }
  }
  return best;
}

template <typename T>
void (*fprop_kernel(int channels))(WgmmaArgs) {
  switch (channels) {
    case 1: return narrow_wgmma_fprop_kernel<T, 1>;
    case 2: return narrow_wgmma_fprop_kernel<T, 2>;
    case 3: return narrow_wgmma_fprop_kernel<T, 3>;
    default: return narrow_wgmma_fprop_kernel<T, 4>;
  }
}

using WgradKernel = void (*)(CUtensorMap, CUtensorMap, WgmmaWgradArgs);

template <typename T, int kOwn>
WgradKernel wgrad_kernel(int channels) {
  switch (channels) {
    case 1: return narrow_wgmma_wgrad_kernel<T, 1, kOwn>;
    case 2: return narrow_wgmma_wgrad_kernel<T, 2, kOwn>;
    case 3: return narrow_wgmma_wgrad_kernel<T, 3, kOwn>;
    default: return narrow_wgmma_wgrad_kernel<T, 4, kOwn>;
  }
}
template <typename T>
WgradKernel wgrad_kernel(const Conv2dShape& s) {
  const auto channels = static_cast<int>(s.c);
  return own_rows(s) == 1 ? wgrad_kernel<T, 1>(channels) : wgrad_kernel<T, 2>(channels);
}

// Of dy's columns whose number modulo the copies is `copy`.
CUtensorMap gradient_map(const Conv2dArgs& args, const WgmmaWgradArgs& a, int copy) {
  const Conv2dShape& s = args.shape;
  Tensor4dRef dy = args.other;
  dy.data = static_cast<const char*>(dy.data) + copy * dy.w * size_of(s.dtype);
  const int64_t stripes = ceil_div(s.q, int64_t{a.tile_columns});
  const int64_t columns = ceil_div((stripes > 1 ? a.tile_columns : s.q) - copy, int64_t{a.copies});
  dy.w *= a.copies;
  const auto extent = [](int v) { return static_cast<uint32_t>(v); };
  return halo::stripe_map(s.dtype, dy, s.k, columns, stripes, s.p, s.n,
                          {kFilterRows, extent(a.pitch), extent(a.tile_rows), 1}, kDyRowBytes);
}

// Why the weight gradient cannot be taken, or nullptr.
const char* wgrad_obstacle(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (size_of(s.dtype) != 2) return "it has weight gradients of 16 bits";
  if (planes_of(s) > 1 || own_rows(s) > 2 || s.s > 2 * kMostSteps || s.q < copies_of(s)) {
    return "it has weight gradients of filters of up to 8 x 8, for strides of 1 and 2";
  }
  return is_dense(args.out, s) ? nullptr : "it has weight gradients that are dense";
}

}  // namespace

const char* wgmma_obstacle(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (!has_wgmma()) return "it needs Hopper's tensor cores";
  if (args.pass == Conv2dPass::kDgrad) return "it has no input gradients";
  if (s.dtype == DType::kFloat64 || is_split(args)) return "it takes bfloat16, float16 and TF32";
  if (s.c > kPixelElements || s.groups > 1 || s.dilation_h > 1 || s.dilation_w > 1) {
    return "it takes up to four channels, one group, no dilation";
  }
  const int planes = planes_of(s);
  if (row_steps(s) > kMostSteps || (planes > 1 && planes % 2 == 1)) {
    return "it takes filters of up to 16 columns, 8 in TF32, and not every stride";
  }
  constexpr int64_t kMostExtent = 1 << 20, kMostTaps = 32, kMostFilters = 1 << 19;
  if (std::max({s.h, s.w, s.p, s.q, s.pad_h, s.pad_w}) >= kMostExtent ||
      std::max({s.r, s.stride_h, s.stride_w}) > kMostTaps || s.k > kMostFilters) {
    return "it is too large";
  }
  const Tensor4dRef &x = args.gathered, &y = is_wgrad(args) ? args.other : args.out;
  if ((s.c > 1 && x.c != 1) || x.w != s.c || !is_aligned(x.data, 4)) {
    return "it takes channels-last images whose pixels lie side by side";
  }
  const int width = kChunk / bytes_of(args);
  if (s.k % width != 0 || !halo::tma_takes(s.dtype, y) || y.h * kMostRows > INT_MAX / 2) {
    return "it takes channels-last results of filters in multiples of 16 bytes";
  }
  if (const char* why = is_wgrad(args) ? wgrad_obstacle(args) : nullptr) return why;
  return tile_for(args) ? nullptr : "its tiles do not fit shared memory";
}

void plan_wgmma(const Conv2dArgs& args, Conv2dPlan* plan) {
  const WgmmaTile tile = *tile_for(args);
  plan->tiling.set(tile);
  if (is_wgrad(args)) {
    plan->workspace_bytes = tile.grid.x * problem_of(args).weights * int64_t{sizeof(float)};
  } else {
    plan->moment_sets = static_cast<int>(tile.grid.x) * kConsumers;
  }
}

void run_wgmma(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace) {
  WgmmaTile tile = plan.tiling.get<WgmmaTile>();
  WgmmaWgradArgs a = problem_of(args);
  set_tile(args, tile, &a);
  const DType dtype = args.shape.dtype;
  const bool is_bf16 = dtype == DType::kBFloat16;
  const auto launch = [&](auto kernel, int threads, const auto&... arguments) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, tile.shared_bytes);
    launch_early(kernel, tile.grid, dim3(threads), tile.shared_bytes, stream, arguments...);
    check_launch("conv2d narrow_input_wgmma");
  };
  if (!is_wgrad(args)) {
    const auto kernel = dtype == DType::kFloat32 ? fprop_kernel<float>(a.channels)
                        : is_bf16                ? fprop_kernel<__nv_bfloat16>(a.channels)
                                                 : fprop_kernel<__half>(a.channels);
    return launch(kernel, kWgmmaThreads, static_cast<const WgmmaArgs&>(a));
  }
  a.partial = static_cast<float*>(workspace);
  const auto kernel =
      is_bf16 ? wgrad_kernel<__nv_bfloat16>(args.shape) : wgrad_kernel<__half>(args.shape);
  const CUtensorMap even = gradient_map(args, a, 0);
  const CUtensorMap odd = a.copies > 1 ? gradient_map(args, a, 1) : even;
  launch(kernel, a.groups * 128 + kProducers, even, odd, a);
  add_up(stream, args.shape, static_cast<int>(tile.grid.x), workspace, args.out.data);
}

}  // namespace braze::cuda::narrow
