#include "wgrad.cuh"

namespace braze::cuda::grouped {

WgradFunction wgrad_tf32(int tile) { return wgrad_function<float, false>(tile); }

}  // namespace braze::cuda::grouped
