#include "hopper_launch.cuh"

namespace braze::cuda::hopper {

void run_fp16(Stream stream, const MatmulArgs& p, const Plan& plan, void* sums) {
  run<__half>(stream, p, plan, sums);
}

}  // namespace braze::cuda::hopper
