#include "launch.cuh"

namespace braze::cuda::im2col {

void run_tf32(Stream stream, const Conv2dArgs& args, int variant, void* workspace,
              const void* added) {
  run<float>(stream, args, variant, workspace, added);
}

void run_norm_grad_tf32(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan,
                        const Conv2dNormGrad& norm, void* workspace) {
  run_norm_grad<float>(stream, args, plan, norm, workspace);
}

}  // namespace braze::cuda::im2col
