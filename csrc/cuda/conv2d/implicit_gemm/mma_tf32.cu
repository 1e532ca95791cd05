#include "mma.cuh"

namespace braze::cuda {

void mma_conv2d_tf32(Stream stream, const Conv2dArgs& args, void* workspace) {
  MmaConv2d<float>::launch(stream, args, workspace);
}

}  // namespace braze::cuda
