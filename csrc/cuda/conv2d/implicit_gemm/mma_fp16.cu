#include "mma.cuh"

namespace braze::cuda {

void mma_conv2d_fp16(Stream stream, const Conv2dArgs& args, void* workspace) {
  MmaConv2d<__half>::launch(stream, args, workspace);
}

}  // namespace braze::cuda
