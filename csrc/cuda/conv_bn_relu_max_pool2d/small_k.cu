// What conv_bn_relu_max_pool2d.h promises besides the two passes, which are in small_k_forward.cu
// and small_k_backward.cu.
#include <algorithm>
#include <iterator>

#include "launchers/common/registry.h"
#include "small_k.cuh"

namespace braze::cuda {
namespace {

const KernelEntry kEntry({"conv_bn_relu_max_pool2d", "small_k", "float64 float32 bfloat16 float16",
                          "sm_80+", true,
                          "statistics from patch moments; no convolution output in memory"});

}  // namespace

bool small_k_supports(const SmallKShape& a) {
  const bool taps =
      std::any_of(std::begin(kSmallKFilters), std::end(kSmallKFilters),
                  [&](const SmallKFilter& f) { return a.r == f.r && a.s == f.s && a.c == f.c; });
  // Tiles, places in an image's output and strides within an image are 31-bit numbers.
  constexpr int64_t kLimit = int64_t{1} << 31;
  return taps && a.p < kLimit / 2 && a.q < kLimit / 2 && a.p * a.q < kLimit && a.k < 4096 &&
         ceil_div(a.k, 8) * 8 * (a.p / 2) * (a.q / 2) < kLimit &&
         a.n * ceil_div(a.p, 4) * ceil_div(a.q, 16) < kLimit && a.x_c < kLimit && a.x_h < kLimit &&
         a.x_w < kLimit;
}

}  // namespace braze::cuda
