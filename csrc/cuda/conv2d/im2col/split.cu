// Host side of split.cuh.
#include "split.cuh"

#include <type_traits>

#include "cuda/common/gemm_problem.cuh"
#include "cuda/matmul/hopper/launch.cuh"
#include "cuda/matmul/hopper/split.cuh"
#include "im2col.h"

namespace braze::cuda::im2col {
namespace {

using hopper::aligned;
using hopper::Parts;

// Pixels go through pairs of blocks, which share weights; of few channels of the result, alone. Of
// the weight gradient's filters there may be few.
using WindowTile = hopper::ScaledTile<2>;
template <int kColumns, int kLoadedColumns = kColumns>
using NarrowTile = hopper::PartTile<__half, 2, 4, 1, kColumns, kLoadedColumns>;
using GradientTile = hopper::ScaledTile<1>;
constexpr int kPlanes = WindowTile::kPlanes;

// f(a type that is the tile, of windows with so many channels of the result).
constexpr int64_t kNarrowColumns = 64;
template <bool kDgrad, typename F>
auto dispatch_window_tile(int64_t columns, F&& f) {
  if (columns <= 32) return f(TypeTag<NarrowTile<32, kDgrad ? 64 : 32>>{});
  if (columns <= kNarrowColumns) return f(TypeTag<NarrowTile<kNarrowColumns>>{});
  return f(TypeTag<WindowTile>{});
}

// A tensor, dense and channels last, as `outer` rows of channels.
struct Rows {
  const void* data;
  int64_t outer, channels, row_bytes;  // the latter of a plane
  int64_t block;  // rows that one flag for infinities stands for; 0: 128 columns

  int64_t flags() const { return ceil_div(block ? outer : channels, block ? block : 128); }
  int64_t plane_bytes() const { return outer * row_bytes; }
};

struct SplitPlan {
  int splits;
  int64_t flag_bytes[2], plane_bytes[2], partial_bytes;
  // Of flags, behind which the largest magnitudes lie.
  int64_t flags() const {
    return flag_bytes[0] + flag_bytes[1] + aligned(2 * hopper::maxima_bytes());
  }
  int64_t total() const { return flags() + plane_bytes[0] + plane_bytes[1] + partial_bytes; }
};

// The image that windows are of, and the other operand.
struct Operands {
  Rows image, other;
};
Operands operands_of(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const bool dgrad = args.pass == Conv2dPass::kDgrad, wgrad = args.pass == Conv2dPass::kWgrad;
  const auto rows = [](const void* data, int64_t outer, int64_t channels, int64_t block) {
    return Rows{data, outer, channels, hopper::padded(channels) * 2, block};
  };
  const int64_t taps = s.r * s.s, image = dgrad ? s.p * s.q : s.h * s.w;
  return {rows(args.gathered.data, s.n * image, dgrad ? s.k : s.c, wgrad ? 0 : image),
          wgrad ? rows(args.other.data, s.n * s.p * s.q, s.k, 0)
                : rows(args.other.data, s.k * taps, s.c, dgrad ? 0 : 128 * taps)};
}

Parts parts_of(const Rows& t, void* flags, uint32_t* largest, void* planes) {
  const auto* const data = static_cast<const float*>(t.data);
  return {data,
          0,
          t.channels,
          1,
          t.outer,
          t.channels,
          t.row_bytes / 2,
          planes,
          static_cast<int*>(flags),
          static_cast<int>(t.flags()),
          t.block == 0,
          is_vec_aligned(data) && t.channels % 4 == 0,
          t.block ? t.block : 128,
          hopper::Scaled::kAll,
          largest};
}

// Weights in planes: channels, filters, taps.
CUtensorMap weight_map(const Conv2dShape& s, const Rows& t, const void* planes, int filters) {
  const auto u = [](int64_t v) { return static_cast<uint64_t>(v); };
  const int64_t taps = s.r * s.s;
  return make_tensor_map(CU_TENSOR_MAP_DATA_TYPE_FLOAT16, planes,
                         {u(s.c), u(s.k), u(taps), kPlanes},
                         {u(taps * t.row_bytes), u(t.row_bytes), u(t.plane_bytes())},
                         {64, static_cast<uint32_t>(filters), 1, 1}, kRowBytes);
}

// Gradients in planes: filters, pixels.
CUtensorMap gradient_map(const Rows& t, const void* planes) {
  const auto u = [](int64_t v) { return static_cast<uint64_t>(v); };
  return make_tensor_map(CU_TENSOR_MAP_DATA_TYPE_FLOAT16, planes,
                         {u(t.channels), u(t.outer), 1, kPlanes},
                         {u(t.row_bytes), u(t.plane_bytes()), u(t.plane_bytes())},
                         {64, hopper::kSplitDepth, 1, 1}, kRowBytes);
}

// Windows of images in planes, which follow each other.
CUtensorMap plane_window_map(const Conv2dArgs& args, const Rows& t, const void* planes,
                             int pixels) {
  const Conv2dShape& s = args.shape;
  const int64_t pixel = t.row_bytes / 2, width = args.pass == Conv2dPass::kDgrad ? s.q : s.w;
  const Tensor4dRef image{planes, t.outer / s.n * pixel, 1, width * pixel, pixel};
  return window_map(args, pixels, DType::kFloat16, image, s.n * kPlanes);
}

// The pass as a product, for its extents.
struct Extents {
  int64_t batch, rows, columns, stages;
};
Extents extents_of(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const int64_t stage = hopper::kSplitDepth;
  if (args.pass == Conv2dPass::kWgrad) {
    return {s.r * s.s, s.k, s.c, ceil_div(s.n * s.p * s.q, stage)};
  }
  Phases phases;
  const bool dgrad = args.pass == Conv2dPass::kDgrad;
  const Pass pass = dgrad ? pass_of(args, &phases) : pass_of(args);
  return {dgrad ? s.stride_h * s.stride_w : 1, pass.pixels, pass.filters,
          pass.taps * ceil_div(pass.channels, stage)};
}

constexpr double kNarrowStage = 0.6;  // microseconds, as kScaledStage

SplitPlan make_plan(const Conv2dArgs& args) {
  const auto [image, other] = operands_of(args);
  const Extents e = extents_of(args);
  SplitPlan plan{};
  plan.flag_bytes[0] = aligned(image.flags() * 4), plan.flag_bytes[1] = aligned(other.flags() * 4);
  plan.plane_bytes[0] = aligned(kPlanes * image.plane_bytes());
  plan.plane_bytes[1] = aligned(kPlanes * other.plane_bytes());
  const bool wgrad = args.pass == Conv2dPass::kWgrad,
             narrow = !wgrad && e.columns <= kNarrowColumns;
  const int64_t rows = wgrad || narrow ? ceil_div(e.rows, 128) : 2 * ceil_div(e.rows, 256);
  // Phases are not all as deep.
  const int64_t most = wgrad ? 64 : args.pass == Conv2dPass::kDgrad ? 1 : 16;
  plan.splits = hopper::choose_splits(e.batch * rows * ceil_div(e.columns, 128), e.stages, most,
                                      e.batch * e.rows * e.columns,
                                      narrow ? kNarrowStage : hopper::kScaledStage)
                    .splits;
  if (plan.splits > 1) plan.partial_bytes = plan.splits * e.batch * e.rows * e.columns * 4;
  return plan;
}

template <typename Tile>
void set_tiles(hopper::SplitArgs& a, const Extents& e, const SplitPlan& plan) {
  const int64_t tile_rows = ceil_div(e.rows, Tile::kRows * Tile::kCluster);
  const int64_t tile_columns = ceil_div(e.columns, Tile::kColumns);
  const int64_t tiles = e.batch * plan.splits * tile_rows * tile_columns;
  if (tiles > INT_MAX) throw std::runtime_error("conv2d: more than 2^31 - 1 tiles");
  a.rows = static_cast<int>(e.rows), a.columns = static_cast<int>(e.columns);
  a.order = TileOrder(tile_rows, tile_columns);
  a.depth_tiles = static_cast<int>(e.stages), a.tiles = static_cast<int>(tiles);
  a.batch = static_cast<int>(e.batch);
  a.splits = plan.splits, a.by_splits = FastDiv(plan.splits);
}

}  // namespace

const char* split_obstacle(const Conv2dArgs& args) {
  const auto [image, other] = operands_of(args);
  if (image.outer * kPlanes > INT_MAX || other.outer * kPlanes > INT_MAX) {
    return "it counts rows of parts with 31 bits";
  }
  return nullptr;
}

void plan_split(const Conv2dArgs& args, Conv2dPlan* plan) {
  const SplitPlan tiling = make_plan(args);
  plan->tiling.set(tiling);
  plan->workspace_bytes = tiling.total();
}

void run_split(Stream stream, const Conv2dArgs& args, const Conv2dPlan& planned, void* workspace) {
  const SplitPlan& plan = planned.tiling.get<SplitPlan>();
  const Conv2dShape& s = args.shape;
  const Operands operands = operands_of(args);
  const Rows &image = operands.image, &other = operands.other;
  const Extents e = extents_of(args);
  char* const image_flags = static_cast<char*>(workspace);
  char* const other_flags = image_flags + plan.flag_bytes[0];
  auto* const largest = reinterpret_cast<uint32_t*>(other_flags + plan.flag_bytes[1]);
  char* const image_planes = image_flags + plan.flags();
  char* const other_planes = image_planes + plan.plane_bytes[0];
  auto* const partial =
      plan.splits > 1 ? reinterpret_cast<float*>(other_planes + plan.plane_bytes[1]) : nullptr;
  const Parts image_parts = parts_of(image, image_flags, largest, image_planes);
  const Parts other_parts =
      parts_of(other, other_flags, largest + hopper::maxima_bytes() / 4, other_planes);
  hopper::launch_split_planes(stream, image_parts, other_parts);

  const bool dgrad = args.pass == Conv2dPass::kDgrad;
  const auto set = [&](auto& a, const Pass& pass, const Parts& rows, const Parts& columns) {
    a.windows = pass.windows;
    // A stage of parts is 64 channels deep.
    a.windows.set_blocks(ceil_div(pass.channels, hopper::kSplitDepth));
    a.row.special = rows.special, a.row.blocks = rows.blocks;
    a.column.special = columns.special, a.column.blocks = columns.blocks;
    a.row.largest = rows.largest, a.column.largest = columns.largest;  // of all: no strides
    a.partial = partial;
    a.c = const_cast<void*>(args.out.data), a.bias = args.bias, a.relu = args.relu;
    a.plain.image = image_parts.data, a.plain.other = other_parts.data;
    a.plain.images = static_cast<int>(s.n);
    a.plain.height = static_cast<int>(dgrad ? s.p : s.h);
    a.plain.width = static_cast<int>(dgrad ? s.q : s.w);
    a.plain.channels = static_cast<int>(image.channels);
    const int64_t taps = s.r * s.s;
    a.plain.tap = s.c;
    a.plain.filter = dgrad ? 1 : taps * s.c, a.plain.channel = dgrad ? taps * s.c : 1;
  };
  Output<float> out{};  // of the parts' sum
  out.data = static_cast<float*>(const_cast<void*>(args.out.data));
  out.batch = e.rows * e.columns, out.row_stride = e.columns;
  out.bias = static_cast<const float*>(args.bias), out.relu = args.relu;
  // Weights lie along the filters, to which the input gradient sums; there a box is a stage deep.
  const auto over_windows = [&](auto& a, const Pass& pass, auto by_filters) {
    constexpr bool kDgrad = decltype(by_filters)::value;
    set(a, pass, image_parts, other_parts);
    a.c_ld = e.columns;
    dispatch_window_tile<kDgrad>(e.columns, [&](auto tag) {
      using Tile = typename decltype(tag)::type;
      constexpr int kFilters = kDgrad ? hopper::kSplitDepth : Tile::kShare;
      set_tiles<Tile>(a, e, plan);
      using Args = std::remove_reference_t<decltype(a)>;
      if constexpr (Args::kScattered) a.set_order(e.batch, Tile::kCluster);
      hopper::launch_persistent<Tile, hopper::split_kernel<Tile, 0, kDgrad, Args>>(
          stream, a.tiles, true, plane_window_map(args, image, image_planes, Tile::kRows),
          weight_map(s, other, other_planes, kFilters), a);
    });
  };
  switch (args.pass) {
    case Conv2dPass::kFprop: {
      SplitWindowArgs a{};
      over_windows(a, pass_of(args), std::false_type{});
      break;
    }
    case Conv2dPass::kDgrad: {
      SplitPhaseArgs a{};
      over_windows(a, pass_of(args, &a.phases), std::true_type{});
      break;
    }
    case Conv2dPass::kWgrad: {
      SplitWgradArgs a{};
      set(a, pass_of(args), other_parts, image_parts);
      set_tiles<GradientTile>(a, e, plan);
      a.depth = static_cast<int>(s.n * s.p * s.q);
      a.c_batch = s.c, a.c_ld = e.batch * s.c;
      out.batch = s.c, out.row_stride = e.batch * s.c;
      hopper::launch_persistent<GradientTile,
                                hopper::split_kernel<GradientTile, 1, 1, SplitWgradArgs>>(
          stream, a.tiles, true, gradient_map(other, other_planes),
          plane_window_map(args, image, image_planes, hopper::kSplitDepth), a);
      break;
    }
  }
  if (partial) {
    out.vectors = out.row_stride % 4 == 0 && out.batch % 4 == 0 && is_vec_aligned(out.data);
    launch_gemm_reduce<float>(stream, partial, out, e.batch, static_cast<int>(e.rows),
                              static_cast<int>(e.columns), plan.splits);
  }
}

}  // namespace braze::cuda::im2col
