// Matrix product on the CUDA cores, at full fp32 accuracy.
#include "cuda/matmul/gemm_plan.cuh"
#include "cuda/matmul/kernels.h"
#include "cuda/common/gemm_simt.cuh"

namespace braze::cuda {
namespace {

constexpr int kDepth = 16;

GemmPlan tiling_of(const MatmulArgs& args) {
  return plan_gemm(args, {kDepth, 128, true, false, runs_sm90_code(), int64_t{1} << 28});
}

template <typename Tile, typename Out = Output<float>>
void launch(Stream stream, const MatmulArgs& args, const GemmPlan& plan, void* workspace) {
  static_assert(Tile::kDepth == kDepth);
  dispatch_majors(args, [&](auto a_depth, auto b_depth) {
    using Op = MatrixOperand<float>;
    using Kernel = SimtKernel<Tile, a_depth.value, b_depth.value, Op, Op, Out>;
    if constexpr (Out::kFull) {
      launch_full<Kernel>(stream, args, plan, workspace);
    } else {
      launch_gemm<Kernel>(stream, matmul_problem<float>(args), plan.splits, workspace,
                          plan.clustered);
    }
  });
}

}  // namespace

double simt_microseconds(const MatmulArgs& args) {
  const GemmPlan p = tiling_of(args);
  if (p.tile != TileShape::kLarge) return 0;
  const int64_t blocks =
      args.batch * ceil_div(args.m, 128) * ceil_div(args.n, 128) * int64_t{p.splits};
  const int64_t depth_tiles = ceil_div(ceil_div(args.k, kDepth), p.splits);
  const double sum = p.splits == 1 ? 0 : p.clustered ? 7 : 7 + 0.75e-6 * blocks * 128 * 128;
  return 8.6 + ceil_div(blocks, sm_count()) * depth_tiles * 1.5 + sum;
}

void plan_simt(const MatmulArgs& args, MatmulPlan* plan) { set_plan(args, tiling_of(args), plan); }

void run_simt(Stream stream, const MatmulArgs& args, const MatmulPlan& plan, void* workspace) {
  const GemmPlan& p = plan.tiling.get<GemmPlan>();
  if (args.has_full_epilogue()) {  // compiled for two tile shapes
    using Full = FullOutput<float>;
    if (p.tile == TileShape::kLarge) {
      return launch<SimtTile<128, 128, 8, 8>, Full>(stream, args, p, workspace);
    }
    return launch<SimtTile<64, 64, 8, 4>, Full>(stream, args, p, workspace);
  }
  switch (p.tile) {
    case TileShape::kLarge: return launch<SimtTile<128, 128, 8, 8>>(stream, args, p, workspace);
    case TileShape::kSmall: return launch<SimtTile<64, 64, 8, 4>>(stream, args, p, workspace);
    case TileShape::kTiny:
    case TileShape::kDeep: return launch<SimtTile<32, 32, 4, 4, 8, 2>>(stream, args, p, workspace);
    case TileShape::kTall: return launch<SimtTile<128, 32, 8, 4>>(stream, args, p, workspace);
    case TileShape::kWide: return launch<SimtTile<32, 128, 8, 4>>(stream, args, p, workspace);
  }
}

}  // namespace braze::cuda
