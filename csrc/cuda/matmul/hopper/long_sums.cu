// Host side of long_sums.cuh.
#include "long_sums.cuh"

#include <limits>

#include "cuda/common/gemm_problem.cuh"
#include "cuda/matmul/obstacles.h"
#include "hopper.h"
#include "plan.cuh"

namespace braze::cuda::hopper {
namespace {

// The longer side of C is the tile's columns.
enum class LongShape : uint8_t {
  k16x32,
  k32x64,
  k32x128,
  k32x256,
  k64x64,
  k64x128,
  k64x256,
  k128x128
};

struct LongPlan {
  LongShape shape;
  bool swap;
  int splits;
  int64_t row_tiles, column_tiles;
  int64_t parts, workspace_bytes;
  double microseconds;  // estimated
};

// f(a type that is the tile)
template <typename F>
auto dispatch_tile(LongShape shape, F&& f) {
  switch (shape) {
    case LongShape::k16x32: return f(TypeTag<LongTile<1, 1, 32, 256, 16>>{});
    case LongShape::k32x64: return f(TypeTag<LongTile<1, 1, 64, 128, 32>>{});
    case LongShape::k32x128: return f(TypeTag<LongTile<1, 1, 128, 64, 32>>{});
    case LongShape::k32x256: return f(TypeTag<LongTile<1, 2, 128, 32, 32>>{});
    case LongShape::k64x64: return f(TypeTag<LongTile<1, 1, 64, 64>>{});
    case LongShape::k64x128: return f(TypeTag<LongTile<1, 1, 128, 64>>{});
    case LongShape::k64x256: return f(TypeTag<LongTile<1, 2, 128, 32>>{});
    case LongShape::k128x128: break;
  }
  return f(TypeTag<LongTile<2, 1, 128, 32>>{});
}

LongShape shape_of(int64_t least, int64_t most) {
  if (least > 64) return LongShape::k128x128;
  if (least <= 16 && most <= 32) return LongShape::k16x32;
  if (most <= 64) return least <= 32 ? LongShape::k32x64 : LongShape::k64x64;
  if (most <= 128) return least <= 32 ? LongShape::k32x128 : LongShape::k64x128;
  return least <= 32 ? LongShape::k32x256 : LongShape::k64x256;
}

// A matrix whose rows are the depth.
LongOperand long_operand(const Operand& o) {
  const auto* const data = static_cast<const float*>(o.data);
  return {data, o.depth_stride, static_cast<int>(o.outer),
          o.outer % 4 == 0 && o.depth_stride % 4 == 0 && is_vec_aligned(data)};
}

// Microseconds of a stage, measured on an H200.
double stage_microseconds(LongShape shape) {
  switch (shape) {
    case LongShape::k16x32: return 1.8;
    case LongShape::k32x64: return 2.5;
    case LongShape::k32x128: return 2;
    case LongShape::k32x256: return 1.6;
    case LongShape::k64x64: return 2;
    case LongShape::k64x128: return 2.45;
    case LongShape::k64x256: return 1.8;
    case LongShape::k128x128: break;
  }
  return 1.5;
}

LongPlan make_long_plan(const MatmulArgs& p) {
  LongPlan plan{};
  plan.swap = p.m > p.n;
  const int64_t least = std::min(p.m, p.n), most = std::max(p.m, p.n);
  plan.shape = shape_of(least, most);
  dispatch_tile(plan.shape, [&](auto tag) {
    using Tile = typename decltype(tag)::type;
    plan.row_tiles = ceil_div(least, Tile::kRows);
    plan.column_tiles = ceil_div(most, Tile::kColumns);
    const int64_t tiles = plan.row_tiles * plan.column_tiles, stages = ceil_div(p.k, Tile::kDepth);
    const int most_splits = static_cast<int>(
        std::clamp(sm_count() / tiles, int64_t{1}, ceil_div(stages, Tile::kTurns)));
    plan.microseconds = std::numeric_limits<double>::infinity();
    for (int splits = 1; splits <= most_splits; ++splits) {
      const int64_t share = ceil_div(stages, splits), parts = int64_t{splits} * Tile::kTurns;
      const double waves = static_cast<double>(ceil_div(tiles * splits, sm_count()));
      const double sum = 3 + 0.02 * parts + 1e-6 * parts * p.m * p.n;
      const double time = 7 + waves * (3 + stage_microseconds(plan.shape) * share) + sum;
      if (time >= plan.microseconds) continue;
      plan.microseconds = time, plan.splits = splits, plan.parts = parts;
      plan.workspace_bytes = parts * tiles * Tile::kItems * int64_t{sizeof(float4)};
    }
  });
  return plan;
}

template <typename Tile, bool kVectors>
void launch_products(Stream stream, const LongArgs& args) {
  static std::atomic<uint64_t> done{0};
  constexpr auto kKernel = long_kernel<Tile, kVectors>;
  allow_shared_memory(reinterpret_cast<const void*>(kKernel), Tile::kSharedBytes, done);
  launch_early(kKernel, static_cast<unsigned>(args.tiles) * args.splits, kLongThreads,
               Tile::kSharedBytes, stream, args);
  check_launch("matmul wgmma_long");
}

template <typename Tile, int kSlices>
void launch_sum(Stream stream, const LongArgs& args) {
  const dim3 grid(Tile::kItems * kSlices / kLongSumThreads, args.tiles);
  launch_early(long_sum_kernel<Tile, kSlices>, grid, kLongSumThreads, 0, stream, args);
  check_launch("matmul wgmma_long sum");
}

}  // namespace

const char* long_obstacle(const MatmulArgs& p) {
  if (const char* why = fp32_obstacle(p)) return why;
  if (!has_wgmma()) return kNeedsHopper;
  if (p.batch != 1) return "it takes one matrix";
  if ((p.m > 1 && p.a.row != 1) || (p.n > 1 && p.b.col != 1)) {
    return "its operands lie along the rows and columns of C";
  }
  if (p.k == 0) return "there is nothing to multiply";
  const int64_t tiles = ceil_div(p.m, 64) * ceil_div(p.n, 32);
  return tiles > 1 << 15 ? "it takes small results" : nullptr;
}

double long_microseconds(const MatmulArgs& p) { return make_long_plan(p).microseconds; }

void plan_long(const MatmulArgs& p, MatmulPlan* plan) {
  const LongPlan tiling = make_long_plan(p);
  plan->tiling.set(tiling);
  plan->workspace_bytes = tiling.workspace_bytes;
}

void run_long(Stream stream, const MatmulArgs& p, const MatmulPlan& planned, void* workspace) {
  const LongPlan& plan = planned.tiling.get<LongPlan>();
  const LongOperand a = long_operand(operand_a(p)), b = long_operand(operand_b(p));
  LongArgs args{};
  args.first = plan.swap ? b : a, args.second = plan.swap ? a : b;
  args.depth = static_cast<int>(p.k), args.splits = plan.splits;
  args.column_tiles = static_cast<int>(plan.column_tiles);
  args.tiles = static_cast<int>(plan.row_tiles * plan.column_tiles);
  args.parts = static_cast<int>(plan.parts);
  args.partial = static_cast<float4*>(workspace);
  args.c = static_cast<float*>(p.c);
  args.row_stride = plan.swap ? 1 : p.n;
  args.column_stride = plan.swap ? p.n : 1;
  args.bias = static_cast<const float*>(p.bias), args.relu = p.relu;
  args.swapped = plan.swap;
  const bool vectors = a.vectors && b.vectors;
  dispatch_tile(plan.shape, [&](auto tag) {
    using Tile = typename decltype(tag)::type;
    vectors ? launch_products<Tile, true>(stream, args)
            : launch_products<Tile, false>(stream, args);
    plan.parts >= 8 ? launch_sum<Tile, 8>(stream, args) : launch_sum<Tile, 1>(stream, args);
  });
}

}  // namespace braze::cuda::hopper
