#include "tiles.cuh"

namespace braze::cuda::depthwise {

Function tiles_fp16(const Kernel& kernel) { return tiles_function<__half>(kernel); }

}  // namespace braze::cuda::depthwise
