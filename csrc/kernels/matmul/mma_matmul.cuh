// Matrix product on the tensor cores for one element type; each .cu beside it compiles one.
#pragma once

#include "gemm_plan.cuh"
#include "kernels/common/gemm_mma.cuh"

namespace braze::cuda {

inline MatmulPlan plan_mma_matmul(const MatmulArgs& args) {
  return plan_matmul(args, 128 / static_cast<int>(size_of(args.dtype)), false, true);
}

template <typename T>
void mma_matmul(Stream stream, const MatmulArgs& args, void* workspace) {
  const MatmulPlan plan = plan_mma_matmul(args);
  dispatch_majors(args, [&](auto a_depth, auto b_depth) {
    using Op = MatrixOperand<T>;
    constexpr bool kA = a_depth.value, kB = b_depth.value;
    if (plan.tile == TileShape::kLarge) {
      using Kernel =
          MmaKernel<MmaTile<128, 128, 64, 32>, kA, kB, Load::kEither, Load::kEither, Op, Op>;
      launch_gemm<Kernel>(stream, matmul_problem<T>(args), plan.splits, workspace);
    } else {
      using Kernel =
          MmaKernel<MmaTile<64, 64, 32, 32>, kA, kB, Load::kEither, Load::kEither, Op, Op>;
      launch_gemm<Kernel>(stream, matmul_problem<T>(args), plan.splits, workspace);
    }
  });
}

}  // namespace braze::cuda
