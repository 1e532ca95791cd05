#include "product.cuh"

namespace braze::cuda::grouped {

ProductFunction product_fp16(int columns, int granule) {
  return granule == 8 ? product_function<__half, false, 8>(columns)
                      : product_function<__half, false, 16>(columns);
}

}  // namespace braze::cuda::grouped
