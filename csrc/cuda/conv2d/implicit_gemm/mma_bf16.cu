#include "mma.cuh"

namespace braze::cuda {

void mma_conv2d_bf16(Stream stream, const Conv2dArgs& args, int splits, void* workspace) {
  MmaConv2d<__nv_bfloat16>::launch(stream, args, splits, workspace);
}

}  // namespace braze::cuda
