#include "fprop.cuh"

namespace braze::cuda::narrow {

Function fprop_fp32(int groups, bool pixel_rows) {
  return fprop_function<float, true>(groups, pixel_rows);
}

}  // namespace braze::cuda::narrow
