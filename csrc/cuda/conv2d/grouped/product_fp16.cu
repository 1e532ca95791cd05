#include "product.cuh"

namespace braze::cuda::grouped {

ProductFunction product_fp16(int tile, int granule) {
  return granule == 8 ? product_function<__half, false, 8>(tile)
                      : product_function<__half, false, 16>(tile);
}

}  // namespace braze::cuda::grouped
