// The plans of narrow/wgmma.cuh's and narrow/wgmma_wgrad.cuh's kernels, and their launches.
#include "wgmma.h"

#include <climits>
#include <optional>

#include "plan.cuh"
#include "wgmma.cuh"
#include "wgmma_wgrad.cuh"
#include "wgmma_wgrad_parts.cuh"
#include "cuda/common/launch.cuh"

namespace braze::cuda::narrow {
namespace {

constexpr int kMostRows = 64;  // of a tile

struct WgmmaTile {
  int rows, columns, shared_bytes;
  dim3 grid;
};

// Parts in which a number is multiplied: of TF32, or in weight gradients of bf16.
int parts_of(const Conv2dArgs& args) {
  if (size_of(args.shape.dtype) == 2) return 1;
  return is_split(args) + (is_wgrad(args) ? 2 : 1);
}
int chunk_pixels(const Conv2dArgs& args) {
  return kChunk / (kPixelElements * (is_wgrad(args) ? 2 : bytes_of(args)));
}
// Copies of a patch, and planes of a copy.
int copies_of(const Conv2dArgs& args) {
  return args.shape.stride_w % chunk_pixels(args) == 0 ? 1 : 2;
}
int planes_of(const Conv2dArgs& args) {
  return static_cast<int>(args.shape.stride_w * copies_of(args) / chunk_pixels(args));
}
int row_steps(const Conv2dArgs& args) {
  return static_cast<int>(ceil_div(args.shape.s, int64_t{2} * chunk_pixels(args)));
}
// Filter rows of a consumer of the weight gradient; groups of consumers by their rows.
int own_rows(const Conv2dArgs& args) {
  const int64_t r = args.shape.r;
  if (parts_of(args) == 1) return static_cast<int>(ceil_div(r, int64_t{kMostGroups}));
  return static_cast<int>(r <= kMostOwn ? std::max<int64_t>(r, 2) : ceil_div(r, 2));
}
int row_groups(const Conv2dArgs& args) {
  return static_cast<int>(ceil_div(args.shape.r, int64_t{own_rows(args)}));
}
// Sums of all gradients that a block leaves.
int sums_of_block(const Conv2dArgs& args) {
  return parts_of(args) == 1 ? 1 : kPartsConsumers / row_groups(args);
}

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
  const int64_t elements = (s.n - 1) * x.n + (s.h - 1) * x.h + s.w * s.c;
  a.x_end = static_cast<const char*>(x.data) + elements * size_of(s.dtype);
  a.x_n = x.n, a.x_h = x.h, a.y_n = y.n, a.y_h = y.h, a.y_w = y.w;
  a.w_k = w.n, a.w_c = w.c, a.w_r = w.h, a.w_s = w.w;
  a.copies = copies_of(args), a.planes = planes_of(args), a.row_steps = row_steps(args);
  a.weight_bytes = a.taps_h * a.row_steps * kStepBytes;
  a.by_planes = FastDiv(a.planes), a.by_stride_h = FastDiv(s.stride_h);
  a.weights = s.k * s.c * s.r * s.s;
  a.groups = row_groups(args);
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
  a->part_bytes = a->copies * a->copy_bytes;
  const int parts = parts_of(args);
  a->stage_bytes = parts * a->part_bytes;
  a->positions = tile.rows * a->pitch;
  a->products = (a->positions + kPositions - 1) / kPositions;
  for (int step = 0; step < a->row_steps; ++step) {
    a->step_bytes[step] = 2 * step % a->planes * a->plane_bytes + 2 * step / a->planes * kChunk;
  }
  // Products read past a patch, for positions that are not stored; no more than they would of
  // chunks that are not shared, as which compute-sanitizer counts them.
  constexpr int kPast = kPositions * 2 * kChunk;
  if (is_wgrad(args)) {
    // A copy of dy by TMA has to end where the tile's columns do.
    const bool in_stripes = s.q % tile.columns == 0 && tile.columns % a->copies == 0;
    const bool by_tma = parts == 1;
    if (by_tma && ((across > 1 && !in_stripes) || a->pitch > 256)) return false;
    a->dy_bytes = halo::aligned((a->positions + kDepth - 1) / kDepth * kDepth * kDyRowBytes);
    a->stage_bytes = halo::aligned(a->stage_bytes + kPast) + parts * a->copies * a->dy_bytes;
    tile.shared_bytes = 1024 + kPatchStages * a->stage_bytes;
  } else {
    tile.shared_bytes = 1024 + wgmma_out_bytes(bytes_of(args), parts) + parts * a->weight_bytes +
                        kPatchStages * a->stage_bytes + kPast;
  }
  return tile.shared_bytes <= halo::kSharedBytes;
}

// What the busiest block takes, about, in cycles: a tile is staged while the one before it is
// multiplied, whose products wait for each other.
double cost_of(const Conv2dArgs& args, const WgmmaWgradArgs& a, int blocks) {
  constexpr double kStep = 200, kResults = 1000, kStage = 1500;
  constexpr double kStagedGradient = 1.5;
  const int parts = parts_of(args), pairs = parts * (parts + 1) / 2;
  const double staged_chunk = bytes_of(args) == 2 ? 2 : 3.5;
  const double product = a.taps_h * a.row_steps * kStep * pairs + kResults;
  double products = a.copies * a.products * product / consumers(parts);
  double staging = kStage + staged_chunk * a.copies * a.patch_rows * a.row_chunks;
  if (is_wgrad(args)) {
    products = a.copies * ceil_div(a.positions, kDepth) * own_rows(args) * a.groups * pairs *
               (parts == 1 ? 24 : 16);
    if (parts > 1) staging += kStagedGradient * a.copies * a.positions * kFilterRows / 8;
  }
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

// f(std::integral_constant) of the channels.
template <typename F>
auto with_channels(int64_t channels, const F& f) {
  switch (channels) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    default: return f(std::integral_constant<int, 4>{});
  }
}

template <typename T, int kParts>
auto fprop_kernel(const Conv2dArgs& args) {
  return with_channels(args.shape.c, [](auto channels) {
    return narrow_wgmma_fprop_kernel<T, kParts, decltype(channels)::value>;
  });
}
auto fprop_kernel(const Conv2dArgs& args) {
  if (args.shape.dtype == DType::kBFloat16) return fprop_kernel<__nv_bfloat16, 1>(args);
  if (args.shape.dtype == DType::kFloat16) return fprop_kernel<__half, 1>(args);
  return parts_of(args) == 1 ? fprop_kernel<float, 1>(args) : fprop_kernel<float, 2>(args);
}

template <typename T>
auto wgrad_kernel(const Conv2dArgs& args) {
  return with_channels(args.shape.c, [&](auto channels) {
    constexpr int kChannels = decltype(channels)::value;
    return own_rows(args) == 1 ? narrow_wgmma_wgrad_kernel<T, kChannels, 1>
                               : narrow_wgmma_wgrad_kernel<T, kChannels, 2>;
  });
}

template <int kParts>
auto wgrad_parts_kernel(const Conv2dArgs& args) {
  return with_channels(args.shape.c, [&](auto channels) {
    constexpr int kChannels = decltype(channels)::value;
    switch (own_rows(args)) {
      case 2: return narrow_wgmma_wgrad_parts_kernel<kParts, kChannels, 2>;
      case 3: return narrow_wgmma_wgrad_parts_kernel<kParts, kChannels, 3>;
      default: return narrow_wgmma_wgrad_parts_kernel<kParts, kChannels, kMostOwn>;
    }
  });
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
  if (planes_of(args) > 1 || s.r > 2 * kMostGroups || s.s > 2 * kMostSteps ||
      s.q < copies_of(args)) {
    return "it has weight gradients of filters of up to 8 x 8, for strides of 1 and 2";
  }
  return is_dense(args.out, s) ? nullptr : "it has weight gradients that are dense";
}

}  // namespace

const char* wgmma_obstacle(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (!has_wgmma()) return "it needs Hopper's tensor cores";
  if (args.pass == Conv2dPass::kDgrad) return "it has no input gradients";
  if (s.dtype == DType::kFloat64) return "it takes float32, bfloat16 and float16";
  if (s.c > kPixelElements || s.groups > 1 || s.dilation_h > 1 || s.dilation_w > 1) {
    return "it takes up to four channels, one group, no dilation";
  }
  const int planes = planes_of(args);
  if (row_steps(args) > kMostSteps || (planes > 1 && planes % 2 == 1)) {
    return "it takes filters of up to 16 columns, 8 in float32, and not every stride";
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
    plan->workspace_bytes = int64_t{tile.grid.x} * sums_of_block(args) * problem_of(args).weights *
                            int64_t{sizeof(float)};
  } else {
    plan->moment_sets = static_cast<int>(tile.grid.x) * consumers(parts_of(args));
  }
}

void run_wgmma(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace) {
  WgmmaTile tile = plan.tiling.get<WgmmaTile>();
  WgmmaWgradArgs a = problem_of(args);
  set_tile(args, tile, &a);
  const auto launch = [&](auto kernel, int threads, const auto&... arguments) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, tile.shared_bytes);
    launch_early(kernel, tile.grid, dim3(threads), tile.shared_bytes, stream, arguments...);
    check_launch("conv2d narrow_input_wgmma");
  };
  if (!is_wgrad(args)) {
    return launch(fprop_kernel(args), wgmma_threads(parts_of(args)),
                  static_cast<const WgmmaArgs&>(a));
  }
  a.partial = static_cast<float*>(workspace);
  const int parts = parts_of(args);
  if (parts > 1) {
    const auto kernel = parts == 2 ? wgrad_parts_kernel<2>(args) : wgrad_parts_kernel<3>(args);
    launch(kernel, kPartsThreads, a);
  } else {
    const CUtensorMap even = gradient_map(args, a, 0);
    const CUtensorMap odd = a.copies > 1 ? gradient_map(args, a, 1) : even;
    const auto kernel = args.shape.dtype == DType::kBFloat16 ? wgrad_kernel<__nv_bfloat16>(args)
                                                             : wgrad_kernel<__half>(args);
    launch(kernel, a.groups * 128 + kProducers, even, odd, a);
  }
  const int sums = static_cast<int>(tile.grid.x) * sums_of_block(args);
  add_up(stream, args.shape, sums, workspace, args.out.data);
}

}  // namespace braze::cuda::narrow
