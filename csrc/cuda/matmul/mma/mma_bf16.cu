#include "mma_matmul.cuh"

namespace braze::cuda {

void mma_matmul_bf16(Stream stream, const MatmulArgs& args, const GemmPlan& plan, void* workspace) {
  mma_matmul<__nv_bfloat16>(stream, args, plan, workspace);
}

}  // namespace braze::cuda
