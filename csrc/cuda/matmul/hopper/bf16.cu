#include "hopper.h"
#include "launch.cuh"

namespace braze::cuda::hopper {

void run_bf16(Stream stream, const MatmulArgs& p, const Plan& plan, void* workspace) {
  run<__nv_bfloat16>(stream, p, plan, workspace);
}

}  // namespace braze::cuda::hopper
