// Convolution as an implicit matrix product on the CUDA cores: full fp32 accuracy, and fp64.
#include "cuda/conv2d/gather.cuh"
#include "cuda/conv2d/kernels.h"
#include "cuda/common/gemm_simt.cuh"

namespace braze::cuda {
namespace {

// fp64 has one tile shape: nothing but gradient checks computes in it.
using Fp64Tile = SimtTile<64, 64, 8, 4>;
using WgradTile = SimtTile<64, 64, 8, 4>;
constexpr int kDepth = 16;

struct SimtTiling {
  int pixels, channels;  // tile extents
  int splits;
};

SimtTiling tiling_of(const Conv2dArgs& args) {
  const ConvExtents e = conv_extents(args);
  const bool square = args.pass == Conv2dPass::kWgrad || args.shape.dtype == DType::kFloat64;
  SimtTiling result{square ? 64 : 128, square ? 64 : e.n <= 32 ? 32 : e.n <= 64 ? 64 : 128, 1};
  const int64_t blocks =
      args.shape.groups * ceil_div(e.m, result.pixels) * ceil_div(e.n, result.channels);
  result.splits = plan_splits(blocks, ceil_div(e.k, kDepth), result.channels == 128 ? 2 : 3);
  return result;
}

// Threads that load a tile walk along whatever is closest in memory: channels where those are
// fastest, pixels otherwise (the depth of wgrad, the outer index of the patches in fprop and
// dgrad).
template <typename Tile, bool kADepthFast, bool kBDepthFast, typename OpA, typename OpB>
void launch(Stream stream, const GemmProblem<OpA, OpB>& problem, int splits, void* workspace) {
  static_assert(Tile::kDepth == kDepth);
  launch_gemm<SimtKernel<Tile, kADepthFast, kBDepthFast, OpA, OpB>>(stream, problem, splits,
                                                                    workspace);
}

template <typename T, typename Tile>
void launch_wgrad(Stream stream, const Conv2dArgs& args, int splits, void* workspace) {
  const auto problem = patches_second<T, int>(args);
  if (is_channels_last(args)) {
    launch<Tile, false, false>(stream, problem, splits, workspace);
  } else {
    launch<Tile, true, true>(stream, problem, splits, workspace);
  }
}

template <typename T, typename TallTile, typename WideTile>
void launch_patches(Stream stream, const Conv2dArgs& args, int splits, void* workspace) {
  if (is_channels_last(args)) {
    launch<TallTile, true, true>(stream, patches_first<T, int>(args), splits, workspace);
  } else {
    launch<WideTile, true, false>(stream, patches_second<T, int>(args), splits, workspace);
  }
}

}  // namespace

void plan_simt(const Conv2dArgs& args, Conv2dPlan* plan) {
  const ConvExtents e = conv_extents(args);
  const SimtTiling tiling = tiling_of(args);
  const int64_t groups = args.shape.groups;
  plan->workspace_bytes = args.shape.dtype == DType::kFloat64
                              ? split_bytes<double>(tiling.splits, groups, e.m, e.n)
                              : split_bytes<float>(tiling.splits, groups, e.m, e.n);
  plan->tiling.set(tiling);
}

void run_simt(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace) {
  const auto& p = plan.tiling.get<SimtTiling>();
  const bool wgrad = args.pass == Conv2dPass::kWgrad;
  if (args.shape.dtype == DType::kFloat64) {
    if (wgrad) return launch_wgrad<double, Fp64Tile>(stream, args, p.splits, workspace);
    return launch_patches<double, Fp64Tile, Fp64Tile>(stream, args, p.splits, workspace);
  }
  if (wgrad) return launch_wgrad<float, WgradTile>(stream, args, p.splits, workspace);
  switch (p.channels) {
    case 32:
      return launch_patches<float, SimtTile<128, 32, 8, 4>, SimtTile<32, 128, 8, 4>>(
          stream, args, p.splits, workspace);
    case 64:
      return launch_patches<float, SimtTile<128, 64, 8, 8>, SimtTile<64, 128, 8, 8>>(
          stream, args, p.splits, workspace);
    default:
      return launch_patches<float, SimtTile<128, 128, 8, 8>, SimtTile<128, 128, 8, 8>>(
          stream, args, p.splits, workspace);
  }
}

}  // namespace braze::cuda
