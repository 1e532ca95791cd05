#include "product.cuh"

namespace braze::cuda::grouped {

ProductFunction product_bf16(int columns, int granule) {
  return granule == 8 ? product_function<__nv_bfloat16, false, 8>(columns)
                      : product_function<__nv_bfloat16, false, 16>(columns);
}

}  // namespace braze::cuda::grouped
