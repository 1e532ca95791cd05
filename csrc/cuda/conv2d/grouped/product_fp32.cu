#include "product.cuh"

namespace braze::cuda::grouped {

ProductFunction product_fp32(int tile) { return product_function<float, true, 16>(tile); }

}  // namespace braze::cuda::grouped
