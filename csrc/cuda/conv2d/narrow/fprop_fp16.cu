#include "fprop.cuh"

namespace braze::cuda::narrow {

Function fprop_fp16(int groups, bool pixel_rows) {
  return fprop_function<__half>(groups, pixel_rows);
}

}  // namespace braze::cuda::narrow
