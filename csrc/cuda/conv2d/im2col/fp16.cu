#include "launch.cuh"

namespace braze::cuda::im2col {

void run_fp16(Stream stream, const Conv2dArgs& args, int variant, void* workspace) {
  run<__half>(stream, args, variant, workspace);
}

void run_norm_grad_fp16(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan,
                        const Conv2dNormGrad& norm, void* workspace) {
  run_norm_grad<__half>(stream, args, plan, norm, workspace);
}

}  // namespace braze::cuda::im2col
