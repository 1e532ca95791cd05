// Matrix product on the tensor cores for one element type; each .cu beside it compiles one.
#pragma once

#include "gemm_plan.cuh"
#include "kernels/common/gemm_mma.cuh"

namespace braze::cuda {

constexpr int64_t kLongProduct = int64_t{1} << 31;

// Its stages: 96 or 128 KiB, which not every device has.
template <bool kBDepthMajor, int kN = kBDepthMajor ? 16 : 32>
using DeepTile = MmaTile<32, kN, 32, kN, 2, kDeepGroups>;
inline bool takes_deep_tiles() {
  return most_shared_memory() >= kDeepGroups * DeepTile<false>::kStages * (32 + 32) * 128;
}

inline MatmulPlan plan_mma_matmul(const MatmulArgs& args) {
  const bool vectors =
      args.dtype == DType::kFloat32 ? takes_vectors<float>(args) : takes_vectors<__half>(args);
  return plan_matmul(args, {128 / static_cast<int>(size_of(args.dtype)), vectors, false,
                            takes_deep_tiles(), runs_sm90_code(), kLongProduct});
}

template <typename T>
void mma_matmul(Stream stream, const MatmulArgs& args, const MatmulPlan& plan, void* workspace) {
  dispatch_majors(args, [&](auto a_depth, auto b_depth) {
    using Op = MatrixOperand<T>;
    constexpr bool kA = a_depth.value, kB = b_depth.value;
    const auto launch = [&](auto tile, auto load) {
      constexpr Load kLoad = decltype(load)::value;
      using Kernel = MmaKernel<decltype(tile), kA, kB, kLoad, kLoad, Op, Op>;
      launch_gemm<Kernel>(stream, matmul_problem<T>(args), plan.splits, workspace, plan.clustered);
    };
    constexpr std::integral_constant<Load, Load::kVectors> kVectors{};
    constexpr std::integral_constant<Load, Load::kEither> kEither{};
    switch (plan.tile) {
      case TileShape::kLarge: return launch(MmaTile<128, 128, 64, 32>{}, kVectors);
      case TileShape::kTiny: return launch(MmaTile<32, 32, 16, 16, 6>{}, kEither);
      case TileShape::kDeep: return launch(DeepTile<kB>{}, kEither);
      default: return launch(MmaTile<64, 64, 32, 32>{}, kEither);
    }
  });
}

constexpr int64_t kShortestSplitSum = 64;
inline bool prefers_deep_tiles(const MatmulArgs& args) {
  return args.k >= kShortestSplitSum && plan_mma_matmul(args).tile == TileShape::kDeep;
}

// fp32 in two parts of TF32 has one tile shape; it pays where C is small and deep.
inline MatmulPlan plan_split_matmul(const MatmulArgs& args) {
  const MatmulPlan plan = plan_mma_matmul(args);
  return plan.tile == TileShape::kDeep ? plan : MatmulPlan{TileShape::kDeep, 1, false};
}

template <typename T>
void mma_matmul(Stream stream, const MatmulArgs& args, void* workspace) {
  mma_matmul<T>(stream, args, plan_mma_matmul(args), workspace);
}

}  // namespace braze::cuda
