#include "product.cuh"

namespace braze::cuda::grouped {

ProductFunction product_tf32(int columns) { return product_function<float, false, 16>(columns); }

}  // namespace braze::cuda::grouped
