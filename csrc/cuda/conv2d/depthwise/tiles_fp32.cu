#include "tiles.cuh"

namespace braze::cuda::depthwise {

Function tiles_fp32(const Kernel& kernel) { return tiles_function<float>(kernel); }

}  // namespace braze::cuda::depthwise
