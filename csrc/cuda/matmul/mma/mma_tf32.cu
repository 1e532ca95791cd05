#include "mma_matmul.cuh"

namespace braze::cuda {

void mma_matmul_tf32(Stream stream, const MatmulArgs& args, void* workspace) {
  mma_matmul<float>(stream, args, workspace);
}

}  // namespace braze::cuda
