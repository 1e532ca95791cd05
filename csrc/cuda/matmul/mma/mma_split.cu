#include "cuda/matmul/kernels.h"
#include "mma_matmul.cuh"

namespace braze::cuda {

void run_mma_split(Stream stream, const MatmulArgs& args, const MatmulPlan& planned,
                   void* workspace) {
  const GemmPlan& plan = planned.tiling.get<GemmPlan>();
  dispatch_majors(args, [&](auto a_depth, auto b_depth) {
    const auto launch = [&](auto output) {
      using Op = MatrixOperand<float>;
      using Out = typename decltype(output)::type;
      using Kernel = MmaKernel<DeepTile<b_depth.value>, a_depth.value, b_depth.value, Load::kEither,
                               Load::kEither, Op, Op, true, Out>;
      if constexpr (Out::kFull) {
        launch_full<Kernel>(stream, args, plan, workspace);
      } else {
        launch_gemm<Kernel>(stream, matmul_problem<float>(args), plan.splits, workspace,
                            plan.clustered);
      }
    };
    args.has_full_epilogue() ? launch(TypeTag<FullOutput<float>>{})
                             : launch(TypeTag<Output<float>>{});
  });
}

}  // namespace braze::cuda
