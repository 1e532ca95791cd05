#include "hopper_launch.cuh"

namespace braze::cuda::hopper {

void run_tf32(Stream stream, const MatmulArgs& p, const Plan& plan, void* sums) {
  run<float>(stream, p, plan, sums);
}

}  // namespace braze::cuda::hopper
