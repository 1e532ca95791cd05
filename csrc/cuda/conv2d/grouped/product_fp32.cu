#include "product.cuh"

namespace braze::cuda::grouped {

ProductFunction product_fp32(int columns) { return product_function<float, true, 16>(columns); }

}  // namespace braze::cuda::grouped
