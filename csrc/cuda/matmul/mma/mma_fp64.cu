#include "mma_matmul.cuh"

namespace braze::cuda {

void mma_matmul_fp64(Stream stream, const MatmulArgs& args, const GemmPlan& plan, void* workspace) {
  mma_matmul<double>(stream, args, plan, workspace);
}

}  // namespace braze::cuda
