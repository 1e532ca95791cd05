#include "mma_matmul.cuh"

namespace braze::cuda {

void mma_matmul_bf16(Stream stream, const MatmulArgs& args, void* workspace) {
  mma_matmul<__nv_bfloat16>(stream, args, workspace);
}

}  // namespace braze::cuda
