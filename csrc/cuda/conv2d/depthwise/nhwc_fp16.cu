#include "nhwc.cuh"

namespace braze::cuda::depthwise {

Function nhwc_fp16(const Kernel& kernel) { return nhwc_function<__half>(kernel); }

}  // namespace braze::cuda::depthwise
