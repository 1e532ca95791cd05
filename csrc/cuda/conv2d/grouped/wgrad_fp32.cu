#include "wgrad.cuh"

namespace braze::cuda::grouped {

WgradFunction wgrad_fp32(int tile) { return wgrad_function<float, true>(tile); }

}  // namespace braze::cuda::grouped
