#include "fprop.cuh"

namespace braze::cuda::narrow {

Function fprop_tf32(int groups, bool pixel_rows) {
  return fprop_function<float>(groups, pixel_rows);
}

}  // namespace braze::cuda::narrow
