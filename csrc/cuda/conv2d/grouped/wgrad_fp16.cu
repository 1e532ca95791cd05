#include "wgrad.cuh"

namespace braze::cuda::grouped {

WgradFunction wgrad_fp16(int tile) { return wgrad_function<__half>(tile); }

}  // namespace braze::cuda::grouped
