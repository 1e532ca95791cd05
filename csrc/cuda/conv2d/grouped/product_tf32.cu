#include "product.cuh"

namespace braze::cuda::grouped {

ProductFunction product_tf32(int tile) { return product_function<float, false, 16>(tile); }

}  // namespace braze::cuda::grouped
