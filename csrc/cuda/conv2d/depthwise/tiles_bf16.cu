#include "tiles.cuh"

namespace braze::cuda::depthwise {

Function tiles_bf16(const Kernel& kernel) { return tiles_function<__nv_bfloat16>(kernel); }

}  // namespace braze::cuda::depthwise
