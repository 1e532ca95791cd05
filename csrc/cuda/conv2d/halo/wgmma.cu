#include "wgmma.cuh"

#include "cuda/common/launch.cuh"

namespace braze::cuda::halo {
namespace {

// A pass as the kernel sees it, and its tiling.
struct Plan {
  Args args;
  int in_w, in_h;
  int pixels = 0;  // positions per tile; 0: the kernel does not take this pass
  int row_bytes;   // of shared memory: a channel block
  int planes = 1;  // parts that each value is split into
  int shared_bytes;
  dim3 grid;
};

// Whether there are kernels for stages of a channel block.
bool goes_in_pieces(const Plan& plan, DType dtype) {
  return dtype == DType::kFloat32 && plan.planes == 1 && plan.row_bytes == 128 &&
         plan.args.r * plan.args.s > 1;
}

// Tiles of `pixels` positions, in stages of all channels, or in TF32 of a block of 128 bytes where
// those do not fit; false where neither do.
bool tile(Plan& plan, int pixels, DType dtype) {
  Args& a = plan.args;
  if (!cut_into_tiles(a, plan.in_w, plan.in_h, pixels, plan.row_bytes,
                      copied_and_multiplied(pixels))) {
    return false;
  }
  const int size = static_cast<int>(size_of(dtype));
  const int blocks = static_cast<int>(ceil_div(a.c * size, plan.row_bytes));
  const int groups = consumers(pixels, plan.planes);
  const int weight_rows = a.k < kFilters ? (a.k + 7) / 8 * 8 : kFilters;
  // Parts are bf16: half as wide as the fp32 rows that they are made from.
  const int operand_row = plan.planes == 1 ? plan.row_bytes : plan.row_bytes / 2;
  const int weights = aligned(a.r * a.s * blocks * plan.planes * weight_rows * operand_row);
  int stage = blocks * aligned(a.plane_rows * plan.row_bytes);
  const int parts =
      plan.planes == 1 ? 0 : groups * blocks * plan.planes * aligned(a.plane_rows * operand_row);
  const int fixed = 1024 + weights + parts + (size == 2 ? groups * pixels * 128 : 0);
  const int turn = size == 4 ? groups * 4 * kTurnBytes : 0;
  // A stage that is split is free again before its products begin: one is enough.
  int needed = plan.planes == 1 ? 2 : 1;
  a.stage_blocks = blocks, a.pieces = 1;
  if (fixed + needed * stage > kSharedBytes && goes_in_pieces(plan, dtype) && blocks > 1) {
    stage /= blocks, needed = groups;
    a.stage_blocks = 1, a.pieces = blocks;
  }
  if (fixed + needed * stage > kSharedBytes) return false;
  a.wide_stores = turn > 0 && fixed + turn + needed * stage <= kSharedBytes;
  plan.shared_bytes = fixed + (a.wide_stores ? turn : 0);
  plan.pixels = pixels;
  const int filter_blocks = (a.k + kFilters - 1) / kFilters;
  plan.grid = dim3(std::min(a.tiles, std::max(1, sm_count() / filter_blocks)), filter_blocks);
  // wgmma may read a whole tile of weights past the last one: the stages follow. No more than a
  // block has tiles, so that the next kernel's blocks may start beside this one's.
  const int tiles = static_cast<int>(ceil_div(a.tiles, plan.grid.x));
  a.stages = std::min({kMaxStages, (kSharedBytes - plan.shared_bytes) / stage, tiles * a.pieces});
  plan.shared_bytes += a.stages * stage;
  a.set_divisors();
  return true;
}

constexpr int kSmallestTile = 64;

// Positions of a tile that there are kernels for. (TF32 has sums of 256 in memory, in part.)
std::initializer_list<int> tile_sizes(const Plan& plan, DType dtype) {
  static constexpr std::initializer_list<int> kSplit{112, kSmallestTile};
  static constexpr std::initializer_list<int> kSingle{224, 128, kSmallestTile};
  static constexpr std::initializer_list<int> kPairs{256, 224, 128, kSmallestTile};
  return plan.planes > 1 ? kSplit : dtype == DType::kFloat32 ? kSingle : kPairs;
}

// What a tiling takes: the work of the busiest block's groups, which take a tile each at a time, in
// positions; a tile's fixed cost counted as 32 of them. In 16 bits a third group hides no more than
// smaller tiles cost.
int64_t cost_of(const Plan& plan, DType dtype) {
  const int64_t groups = size_of(dtype) == 2 ? 2 : consumers(plan.pixels, plan.planes);
  const int64_t tiles = ceil_div(plan.args.tiles, plan.grid.x);
  return ceil_div(tiles, groups) * (plan.pixels + 32);
}

// Whether there is a tile for most multiprocessors: then the smallest ones, of which more would lie
// beside each other, take longer (H100, 64 images of 14 x 14 in bf16: 7.5 us against 6.9).
bool fills_gpu(const Plan& plan) {
  return plan.pixels > 0 && int64_t{plan.args.tiles} * plan.grid.y >= sm_count() * 3 / 4;
}

Plan make_plan(Conv2dPass pass, const Conv2dShape& s) {
  Plan plan{};
  Args& a = plan.args;
  const bool dgrad = pass == Conv2dPass::kDgrad;
  a.c = static_cast<int>(dgrad ? s.k : s.c);
  a.k = static_cast<int>(dgrad ? s.c : s.k);
  a.r = static_cast<int>(s.r), a.s = static_cast<int>(s.s);
  a.images = static_cast<int>(s.n);
  a.p = static_cast<int>(dgrad ? s.h : s.p), a.q = static_cast<int>(dgrad ? s.w : s.q);
  a.pad_t = static_cast<int>(dgrad ? s.r - 1 - s.pad_h : s.pad_h);
  a.pad_l = static_cast<int>(dgrad ? s.s - 1 - s.pad_w : s.pad_w);
  a.flip = dgrad;
  plan.in_h = static_cast<int>(dgrad ? s.p : s.h), plan.in_w = static_cast<int>(dgrad ? s.q : s.w);
  const int channel_bytes = a.c * static_cast<int>(size_of(s.dtype));
  plan.row_bytes = channel_bytes % 128 == 0 ? 128 : channel_bytes % 64 == 0 ? 64 : 32;
  if (s.dtype == DType::kFloat32 && !s.allow_tf32) plan.planes = 3, plan.row_bytes = 128;
  int64_t best = 0;
  Plan chosen{};
  for (int pixels : tile_sizes(plan, s.dtype)) {
    Plan candidate = plan;
    if (pixels == kSmallestTile && fills_gpu(chosen)) break;
    if (!tile(candidate, pixels, s.dtype)) continue;
    const int64_t cost = cost_of(candidate, s.dtype);
    if (chosen.pixels == 0 || cost < best) chosen = candidate, best = cost;
  }
  return chosen;
}

template <typename T, int kPixels, int kChannelBlock, int kPlanes = 1, bool kInPieces = false>
void launch(Stream stream, const Plan& plan, const CUtensorMap& x_map, const CUtensorMap& w_map,
            const CUtensorMap& y_map, const void* w, const void* bias, bool relu, const Tail& tail,
            const void* y, Moments* moments) {
  const auto kernel = conv_kernel<T, kPixels, kChannelBlock, kPlanes, kInPieces>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
  launch_early(kernel, plan.grid, threads(consumers(kPixels, kPlanes)), plan.shared_bytes, stream,
               x_map, w_map, y_map, plan.args, static_cast<const T*>(w),
               static_cast<const T*>(bias), relu, tail, static_cast<T*>(const_cast<void*>(y)),
               moments);
  check_launch("conv2d halo_wgmma");
}

template <typename T, int kPixels>
constexpr auto launcher(int row_bytes) {
  return row_bytes == 128  ? launch<T, kPixels, 128 / sizeof(T)>
         : row_bytes == 64 ? launch<T, kPixels, 64 / sizeof(T)>
                           : launch<T, kPixels, 32 / sizeof(T)>;
}

template <typename T>
constexpr auto launcher(const Plan& plan) {
  if constexpr (sizeof(T) == 2) {
    if (plan.pixels == 256) return launcher<T, 256>(plan.row_bytes);
  }
  return plan.pixels == 224   ? launcher<T, 224>(plan.row_bytes)
         : plan.pixels == 128 ? launcher<T, 128>(plan.row_bytes)
                              : launcher<T, 64>(plan.row_bytes);
}

constexpr auto pieces_launcher(const Plan& plan) {
  return plan.pixels == 224   ? launch<float, 224, 32, 1, true>
         : plan.pixels == 128 ? launch<float, 128, 32, 1, true>
                              : launch<float, 64, 32, 1, true>;
}

constexpr auto split_launcher(const Plan& plan) {
  return plan.pixels == 112 ? launch<float, 112, 32, 3> : launch<float, 64, 32, 3>;
}

}  // namespace

bool supports(const Conv2dArgs& args) {
  if (args.pass == Conv2dPass::kWgrad) return supports_wgrad(args);
  const Conv2dShape& s = args.shape;
  return takes(s) && tma_takes(s.dtype, args.gathered) &&
         (size_of(s.dtype) == 4 || tma_takes(s.dtype, args.out)) &&
         make_plan(args.pass, s).pixels > 0;
}

void plan(const Conv2dArgs& args, Conv2dPlan* plan) {
  if (args.pass == Conv2dPass::kWgrad) return plan_wgrad(args, plan);
  const Plan tiling = make_plan(args.pass, args.shape);
  if (args.pass == Conv2dPass::kFprop) {
    // fp32: of each group.
    const int groups = size_of(args.shape.dtype) == 2 ? 1 : consumers(tiling.pixels, tiling.planes);
    plan->moment_sets = static_cast<int>(tiling.grid.x) * groups;
  }
  plan->tiling.set(tiling);
}

void run(Stream stream, const Conv2dArgs& args, const Conv2dPlan& planned, void* workspace) {
  if (args.pass == Conv2dPass::kWgrad) return run_wgrad(stream, args, planned, workspace);
  const auto& [pass, s, in, w, out, bias, moments, relu, tail] = args;
  const bool dgrad = pass == Conv2dPass::kDgrad;
  Plan plan = planned.tiling.get<Plan>();
  Args& a = plan.args;
  a.w_k = dgrad ? w.c : w.n, a.w_c = dgrad ? w.n : w.c, a.w_r = w.h, a.w_s = w.w;
  a.wide_stores = a.wide_stores && a.k % 4 == 0 && tma_takes(s.dtype, out);
  a.y_n = out.n, a.y_k = out.c, a.y_h = out.h, a.y_w = out.w;
  const auto extent = [](int v) { return static_cast<uint32_t>(v); };
  const uint32_t block = extent(plan.row_bytes / static_cast<int>(size_of(s.dtype)));
  const CUtensorMap x_map =
      tensor_map(s.dtype, in, a.c, plan.in_w, plan.in_h, s.n,
                 {block, extent(a.pitch), extent(a.load_rows), extent(a.tile_images)},
                 plan.row_bytes, plan.planes == 1);
  CUtensorMap w_map = x_map;  // unused where weights are transposed or split on the way
  a.early_weights = may_read_early(stream, weight_span(s, w));
  a.copy_weights = !dgrad && plan.planes == 1 && tma_takes(s.dtype, w) &&
                   a.r * a.s * ceil_div(a.c, block) <= kMaxWeightTiles;
  if (a.copy_weights) {
    const int rows = std::min(kFilters, (a.k + 7) / 8 * 8);
    w_map = tensor_map(s.dtype, w, a.c, a.s, a.r, a.k, {block, 1, 1, extent(rows)}, plan.row_bytes,
                       true);
  }
  CUtensorMap y_map = x_map;  // unused where results are stored from registers
  if (size_of(s.dtype) == 2) {
    const int rows = a.tile_images > 1 ? a.image_rows : a.tile_rows;
    y_map = stripe_map(s.dtype, out, a.k, a.q, a.stripes, a.p, s.n,
                       {kFilters, extent(a.pitch), extent(rows), extent(a.tile_images)}, 128);
  }
  const auto launch = plan.planes > 1               ? split_launcher(plan)
                      : a.pieces > 1                ? pieces_launcher(plan)
                      : s.dtype == DType::kFloat32  ? launcher<float>(plan)
                      : s.dtype == DType::kBFloat16 ? launcher<__nv_bfloat16>(plan)
                                                    : launcher<__half>(plan);
  launch(stream, plan, x_map, w_map, y_map, w.data, bias, relu, Tail::of(tail, s.dtype), out.data,
         moments);
}

}  // namespace braze::cuda::halo
