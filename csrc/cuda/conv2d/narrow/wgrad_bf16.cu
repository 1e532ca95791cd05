#include "wgrad.cuh"

namespace braze::cuda::narrow {

Function wgrad_bf16(int filters, int taps, bool filters_last) {
  return wgrad_function<__nv_bfloat16>(filters, taps, filters_last);
}

}  // namespace braze::cuda::narrow
