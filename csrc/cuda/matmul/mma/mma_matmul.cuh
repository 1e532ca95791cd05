// Matrix product on the tensor cores for one element type; each .cu beside it compiles one.
#pragma once

#include "cuda/matmul/gemm_plan.cuh"
#include "cuda/common/gemm_mma.cuh"

namespace braze::cuda {

constexpr int64_t kLongProduct = int64_t{1} << 31, kLongFp64Product = int64_t{1} << 29;

// Its stages: 96 or 128 KiB, which not every device has.
template <bool kBDepthMajor, int kN = kBDepthMajor ? 16 : 32>
using DeepTile = MmaTile<32, kN, 32, kN, 2, kDeepGroups>;
inline bool takes_deep_tiles() {
  return most_shared_memory() >= kDeepGroups * DeepTile<false>::kStages * (32 + 32) * 128;
}

inline MatmulPlan plan_mma_matmul(const MatmulArgs& args) {
  const bool fp64 = args.dtype == DType::kFloat64;
  const bool vectors =
      args.dtype == DType::kFloat32 ? takes_vectors<float>(args) : takes_vectors<__half>(args);
  const int large = !fp64 ? (vectors ? 128 : 0) : args.has_full_epilogue() ? 0 : 64;
  return plan_matmul(args,
                     {128 / static_cast<int>(size_of(args.dtype)), large, false, takes_deep_tiles(),
                      runs_sm90_code(), fp64 ? kLongFp64Product : kLongProduct});
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
    if constexpr (sizeof(T) == 8) {
      // Slow enough for large tiles to be copied by single elements; but the code of both ways to
      // copy takes registers that fast kernels lack.
      const auto launch_fp64 = [&](auto tile) {
        takes_vectors<T>(args) ? launch(tile, kVectors) : launch(tile, kEither);
      };
      if (plan.tile == TileShape::kLarge) return launch_fp64(MmaTile<128, 64, 64, 32>{});
      if (plan.tile == TileShape::kSmall) return launch_fp64(MmaTile<64, 64, 32, 32>{});
    } else {
      if (plan.tile == TileShape::kLarge) return launch(MmaTile<128, 128, 64, 32>{}, kVectors);
      if (plan.tile == TileShape::kSmall) return launch(MmaTile<64, 64, 32, 32>{}, kEither);
    }
    if (plan.tile == TileShape::kDeep) return launch(DeepTile<kB>{}, kEither);
    launch(MmaTile<32, 32, 16, 16, 6>{}, kEither);
  });
}

// The full epilogue is compiled for few tile shapes.
template <typename T>
void mma_matmul_full(Stream stream, const MatmulArgs& args, const MatmulPlan& plan,
                     void* workspace) {
  dispatch_majors(args, [&](auto a_depth, auto b_depth) {
    const auto launch = [&](auto tile, auto load) {
      using Op = MatrixOperand<T>;
      constexpr Load kLoad = decltype(load)::value;
      launch_full<MmaKernel<decltype(tile), a_depth.value, b_depth.value, kLoad, kLoad, Op, Op,
                            false, FullOutput<T>>>(stream, args, plan, workspace);
    };
    if constexpr (sizeof(T) < 8) {
      if (plan.tile == TileShape::kLarge) {
        return launch(MmaTile<128, 128, 64, 32>{}, std::integral_constant<Load, Load::kVectors>{});
      }
    }
    launch(MmaTile<64, 64, 32, 32>{}, std::integral_constant<Load, Load::kEither>{});
  });
}

constexpr int64_t kShortestSplitSum = 64, kLongSplitSum = 1536;  // CUDA cores lose to the latter
inline bool prefers_deep_tiles(const MatmulArgs& args) {
  return args.k >= kShortestSplitSum &&
         plan_mma_matmul(args.with_plain_epilogue()).tile == TileShape::kDeep;
}

// fp32 in two parts of TF32 has one tile shape; it pays where C is small and deep.
inline MatmulPlan plan_split_matmul(const MatmulArgs& args) {
  const MatmulPlan plan = plan_mma_matmul(args.with_plain_epilogue());
  if (plan.tile == TileShape::kDeep) return plan;
  return {TileShape::kDeep, 1, false, 32, depth_major_b(args) ? 16 : 32};
}

template <typename T>
void mma_matmul(Stream stream, const MatmulArgs& args, void* workspace) {
  const MatmulPlan plan = plan_mma_matmul(args);
  args.has_full_epilogue() ? mma_matmul_full<T>(stream, args, plan, workspace)
                           : mma_matmul<T>(stream, args, plan, workspace);
}

}  // namespace braze::cuda
