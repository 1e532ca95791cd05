#include "mma_matmul.cuh"

namespace braze::cuda {

void mma_matmul_fp16(Stream stream, const MatmulArgs& args, void* workspace) {
  mma_matmul<__half>(stream, args, workspace);
}

}  // namespace braze::cuda
