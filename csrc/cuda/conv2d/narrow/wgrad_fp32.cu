#include "wgrad.cuh"

namespace braze::cuda::narrow {

Function wgrad_fp32(int filters, int taps, bool filters_last) {
  return wgrad_function<float, true>(filters, taps, filters_last);
}

}  // namespace braze::cuda::narrow
