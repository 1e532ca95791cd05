// Matrix product on the CUDA cores: full fp32 accuracy, and fp64.
#include "gemm_plan.cuh"
#include "kernels/common/gemm_simt.cuh"

namespace braze::cuda {
namespace {

constexpr int kDepth = 16;

MatmulPlan plan(const MatmulArgs& args) {
  // fp64 has small tiles only: nothing but gradient checks computes in it
  const bool fp32 = args.dtype == DType::kFloat32;
  return plan_matmul(args, {kDepth, fp32, fp32, false, runs_sm90_code(), int64_t{1} << 28});
}

template <typename T, typename Tile>
void launch(Stream stream, const MatmulArgs& args, const MatmulPlan& plan, void* workspace) {
  static_assert(Tile::kDepth == kDepth);
  dispatch_majors(args, [&](auto a_depth, auto b_depth) {
    using Op = MatrixOperand<T>;
    using Kernel = SimtKernel<Tile, a_depth.value, b_depth.value, Op, Op>;
    launch_gemm<Kernel>(stream, matmul_problem<T>(args), plan.splits, workspace, plan.clustered);
  });
}

}  // namespace

int64_t simt_matmul_workspace_bytes(const MatmulArgs& args) {
  const MatmulPlan p = plan(args);
  if (p.clustered) return 0;
  return args.dtype == DType::kFloat64 ? split_bytes<double>(p.splits, args.batch, args.m, args.n)
                                       : split_bytes<float>(p.splits, args.batch, args.m, args.n);
}

void simt_matmul(Stream stream, const MatmulArgs& args, void* workspace) {
  const MatmulPlan p = plan(args);
  if (args.dtype == DType::kFloat64) {
    if (p.tile == TileShape::kTiny) {
      return launch<double, SimtTile<32, 32, 4, 4>>(stream, args, p, workspace);
    }
    return launch<double, SimtTile<64, 64, 8, 4>>(stream, args, p, workspace);
  }
  switch (p.tile) {
    case TileShape::kLarge:
      return launch<float, SimtTile<128, 128, 8, 8>>(stream, args, p, workspace);
    case TileShape::kSmall:
      return launch<float, SimtTile<64, 64, 8, 4>>(stream, args, p, workspace);
    case TileShape::kTiny:
    case TileShape::kDeep:
      return launch<float, SimtTile<32, 32, 4, 4, 8, 2>>(stream, args, p, workspace);
    case TileShape::kTall:
      return launch<float, SimtTile<128, 32, 8, 4>>(stream, args, p, workspace);
    case TileShape::kWide:
      return launch<float, SimtTile<32, 128, 8, 4>>(stream, args, p, workspace);
  }
}

}  // namespace braze::cuda
