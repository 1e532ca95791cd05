#include "mma_matmul.cuh"

namespace braze::cuda {

void mma_matmul_tf32(Stream stream, const MatmulArgs& args, const GemmPlan& plan, void* workspace) {
  mma_matmul<float>(stream, args, plan, workspace);
}

}  // namespace braze::cuda
