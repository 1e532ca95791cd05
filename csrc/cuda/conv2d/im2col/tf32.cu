#include "launch.cuh"

namespace braze::cuda::im2col {

void run_tf32(Stream stream, const Conv2dArgs& args, int tile, void* workspace, const void* added) {
  run<float>(stream, args, tile, workspace, added);
}

}  // namespace braze::cuda::im2col
