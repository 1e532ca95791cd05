#include "hopper_launch.cuh"

namespace braze::cuda::hopper {

void run_tf32(Stream stream, const MatmulArgs& p, const Plan& plan) { run<float>(stream, p, plan); }

}  // namespace braze::cuda::hopper
