#include "wgrad.cuh"

namespace braze::cuda::narrow {

Function wgrad_fp16(int filters, int taps, bool filters_last) {
  return wgrad_function<__half>(filters, taps, filters_last);
}

}  // namespace braze::cuda::narrow
