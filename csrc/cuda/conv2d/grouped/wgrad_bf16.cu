#include "wgrad.cuh"

namespace braze::cuda::grouped {

WgradFunction wgrad_bf16(int tile) { return wgrad_function<__nv_bfloat16>(tile); }

}  // namespace braze::cuda::grouped
