#include "mma.cuh"

namespace braze::cuda {

void mma_conv2d_tf32(Stream stream, const Conv2dArgs& args, int splits, void* workspace) {
  MmaConv2d<float>::launch(stream, args, splits, workspace);
}

}  // namespace braze::cuda
