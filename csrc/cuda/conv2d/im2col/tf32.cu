#include "launch.cuh"

namespace braze::cuda::im2col {

void run_tf32(Stream stream, const Conv2dArgs& args, int tile) { run<float>(stream, args, tile); }

}  // namespace braze::cuda::im2col
