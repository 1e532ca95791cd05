#include "nhwc.cuh"

namespace braze::cuda::depthwise {

Function nhwc_bf16(const Kernel& kernel) { return nhwc_function<__nv_bfloat16>(kernel); }

}  // namespace braze::cuda::depthwise
