#include "nchw.cuh"

namespace braze::cuda::depthwise {

Function nchw_fp16(const Kernel& kernel) { return nchw_function<__half>(kernel); }

}  // namespace braze::cuda::depthwise
