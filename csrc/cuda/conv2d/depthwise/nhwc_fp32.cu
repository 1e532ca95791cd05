#include "nhwc.cuh"

namespace braze::cuda::depthwise {

Function nhwc_fp32(const Kernel& kernel) { return nhwc_function<float>(kernel); }

}  // namespace braze::cuda::depthwise
