#include "mma_matmul.cuh"

namespace braze::cuda {

void mma_matmul_fp64(Stream stream, const MatmulArgs& args, void* workspace) {
  mma_matmul<double>(stream, args, workspace);
}

}  // namespace braze::cuda
