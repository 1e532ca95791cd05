#include "mma_matmul.cuh"

namespace braze::cuda {

void mma_matmul_split(Stream stream, const MatmulArgs& args, void* workspace) {
  const MatmulPlan plan = plan_split_matmul(args);
  dispatch_majors(args, [&](auto a_depth, auto b_depth) {
    using Op = MatrixOperand<float>;
    using Kernel = MmaKernel<DeepTile<b_depth.value>, a_depth.value, b_depth.value, Load::kEither,
                             Load::kEither, Op, Op, true>;
    launch_gemm<Kernel>(stream, matmul_problem<float>(args), plan.splits, workspace,
                        plan.clustered);
  });
}

}  // namespace braze::cuda
