#include "launch.cuh"

namespace braze::cuda::im2col {

void run_bf16(Stream stream, const Conv2dArgs& args, int variant, void* workspace) {
  run<__nv_bfloat16>(stream, args, variant, workspace);
}

void run_norm_grad_bf16(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan,
                        const Conv2dNormGrad& norm, void* workspace) {
  run_norm_grad<__nv_bfloat16>(stream, args, plan, norm, workspace);
}

}  // namespace braze::cuda::im2col
