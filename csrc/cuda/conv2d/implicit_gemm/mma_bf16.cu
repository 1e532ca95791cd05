#include "mma.cuh"

namespace braze::cuda {

void mma_conv2d_bf16(Stream stream, const Conv2dArgs& args, void* workspace) {
  MmaConv2d<__nv_bfloat16>::launch(stream, args, workspace);
}

}  // namespace braze::cuda
