#include "launch.cuh"

namespace braze::cuda::hopper {

void run_tf32(Stream stream, const MatmulArgs& p, const Plan& plan, void* workspace) {
  run<float>(stream, p, plan, workspace);
}

}  // namespace braze::cuda::hopper
