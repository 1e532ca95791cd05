// Matrix product on the tensor cores for one element type; each .cu beside it compiles one.
#pragma once

#include "cuda/matmul/gemm_plan.cuh"
#include "cuda/common/gemm_mma.cuh"

namespace braze::cuda {

// The kernels, one dtype a file.
void mma_matmul_bf16(Stream stream, const MatmulArgs& args, const GemmPlan& plan, void* workspace);
void mma_matmul_fp16(Stream stream, const MatmulArgs& args, const GemmPlan& plan, void* workspace);
void mma_matmul_tf32(Stream stream, const MatmulArgs& args, const GemmPlan& plan, void* workspace);
void mma_matmul_fp64(Stream stream, const MatmulArgs& args, const GemmPlan& plan, void* workspace);

// Its stages: 96 or 128 KiB, which not every device has.
template <bool kBDepthMajor, int kN = kBDepthMajor ? 16 : 32>
using DeepTile = MmaTile<32, kN, 32, kN, 2, kDeepGroups>;

template <typename T>
void mma_matmul_plain(Stream stream, const MatmulArgs& args, const GemmPlan& plan,
                      void* workspace) {
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
void mma_matmul_full(Stream stream, const MatmulArgs& args, const GemmPlan& plan, void* workspace) {
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

template <typename T>
void mma_matmul(Stream stream, const MatmulArgs& args, const GemmPlan& plan, void* workspace) {
  args.has_full_epilogue() ? mma_matmul_full<T>(stream, args, plan, workspace)
                           : mma_matmul_plain<T>(stream, args, plan, workspace);
}

}  // namespace braze::cuda
