#include "launchers/grad_norm.h"

#include <cmath>

#include "cpu/common/multi_tensor.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

const KernelEntry kEntry({"grad_norm", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised; all tensors share the threads"});

}  // namespace

int64_t grad_norm_workspace(const NormTensor* tensors, int64_t count) {
  int64_t parts = 0;
  for (int64_t i = 0; i < count; ++i) parts += ceil_div(tensors[i].numel, kUpdateChunk);
  return parts;
}

void grad_norm(Stream, DType dtype, const NormTensor* tensors, int64_t count, double* workspace,
               const double* all, int64_t sums, const float* grad_scale, double* norm, unsigned*) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_part(tensors, count, [&](int64_t part, int64_t i, int64_t begin, int64_t end) {
      workspace[part] =
          sum_of_squares(static_cast<const T*>(tensors[i].values) + begin, end - begin);
    });
  });
  if (norm == nullptr) return;
  double total = 0;
  for (int64_t i = 0; i < sums; ++i) total += all[i];
  *norm = std::sqrt(total) / (grad_scale == nullptr ? 1.0 : *grad_scale);
}

}  // namespace braze::cpu
