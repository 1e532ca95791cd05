#include "nchw.cuh"

namespace braze::cuda::depthwise {

Function nchw_fp32(const Kernel& kernel) { return nchw_function<float>(kernel); }

}  // namespace braze::cuda::depthwise
