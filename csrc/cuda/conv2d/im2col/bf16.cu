#include "launch.cuh"

namespace braze::cuda::im2col {

void run_bf16(Stream stream, const Conv2dArgs& args, int tile, void* workspace) {
  run<__nv_bfloat16>(stream, args, tile, workspace);
}

}  // namespace braze::cuda::im2col
