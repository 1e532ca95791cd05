#include "launch.cuh"

namespace braze::cuda::hopper {

void run_fp16(Stream stream, const MatmulArgs& p, const Plan& plan, void* workspace) {
  run<__half>(stream, p, plan, workspace);
}

}  // namespace braze::cuda::hopper
