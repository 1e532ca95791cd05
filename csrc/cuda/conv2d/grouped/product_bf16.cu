#include "product.cuh"

namespace braze::cuda::grouped {

ProductFunction product_bf16(int tile, int granule) {
  return granule == 8 ? product_function<__nv_bfloat16, false, 8>(tile)
                      : product_function<__nv_bfloat16, false, 16>(tile);
}

}  // namespace braze::cuda::grouped
