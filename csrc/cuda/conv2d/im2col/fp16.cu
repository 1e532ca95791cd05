#include "launch.cuh"

namespace braze::cuda::im2col {

void run_fp16(Stream stream, const Conv2dArgs& args, int tile, void* workspace) {
  run<__half>(stream, args, tile, workspace);
}

}  // namespace braze::cuda::im2col
