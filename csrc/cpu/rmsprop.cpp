#include "launchers/rmsprop.h"

#include "cpu/common/multi_tensor.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

const KernelEntry kEntry({"rmsprop", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised; all parameters share the threads"});

}  // namespace

void rmsprop(Stream, DType dtype, const RMSpropTensor* tensors, int64_t count,
             const RMSpropOptions& options) {
  multi_tensor_update<RMSpropUpdate>(dtype, tensors, count, options);
}

}  // namespace braze::cpu
