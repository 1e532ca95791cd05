#include "fprop.cuh"

namespace braze::cuda::narrow {

Function fprop_bf16(int groups, bool pixel_rows) {
  return fprop_function<__nv_bfloat16>(groups, pixel_rows);
}

}  // namespace braze::cuda::narrow
