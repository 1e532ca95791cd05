#include "nchw.cuh"

namespace braze::cuda::depthwise {

Function nchw_bf16(const Kernel& kernel) { return nchw_function<__nv_bfloat16>(kernel); }

}  // namespace braze::cuda::depthwise
