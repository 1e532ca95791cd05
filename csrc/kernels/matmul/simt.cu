// Matrix product on the CUDA cores: full fp32 accuracy, and fp64.
#include "gemm_plan.cuh"
#include "kernels/common/gemm_simt.cuh"

namespace braze::cuda {
namespace {

constexpr int kDepth = 16;

MatmulPlan plan(const MatmulArgs& args) {
  // fp64 has one tile shape: nothing but gradient checks computes in it
  const bool fp32 = args.dtype == DType::kFloat32;
  return plan_matmul(args, kDepth, fp32, fp32);
}

template <typename T, typename Tile>
void launch(Stream stream, const MatmulArgs& args, int splits, void* workspace) {
  static_assert(Tile::kDepth == kDepth);
  dispatch_majors(args, [&](auto a_depth, auto b_depth) {
    using Op = MatrixOperand<T>;
    using Kernel = SimtKernel<Tile, a_depth.value, b_depth.value, Op, Op>;
    launch_gemm<Kernel>(stream, matmul_problem<T>(args), splits, workspace);
  });
}

}  // namespace

int64_t simt_matmul_workspace_bytes(const MatmulArgs& args) {
  const int splits = plan(args).splits;
  return args.dtype == DType::kFloat64 ? split_bytes<double>(splits, args.batch, args.m, args.n)
                                       : split_bytes<float>(splits, args.batch, args.m, args.n);
}

void simt_matmul(Stream stream, const MatmulArgs& args, void* workspace) {
  const MatmulPlan p = plan(args);
  if (args.dtype == DType::kFloat64) {
    return launch<double, SimtTile<64, 64, 8, 4>>(stream, args, p.splits, workspace);
  }
  switch (p.tile) {
    case TileShape::kLarge:
      return launch<float, SimtTile<128, 128, 8, 8>>(stream, args, p.splits, workspace);
    case TileShape::kSmall:
      return launch<float, SimtTile<64, 64, 8, 4>>(stream, args, p.splits, workspace);
    case TileShape::kTall:
      return launch<float, SimtTile<128, 32, 8, 4>>(stream, args, p.splits, workspace);
    case TileShape::kWide:
      return launch<float, SimtTile<32, 128, 8, 4>>(stream, args, p.splits, workspace);
  }
}

}  // namespace braze::cuda
