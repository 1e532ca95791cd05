// The RMSprop update of a whole parameter list in one launch.
#include "launchers/rmsprop.h"

#include "cuda/common/multi_tensor.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

const KernelEntry kEntry({"rmsprop", "multi_tensor", "float64 float32 bfloat16 float16", "sm_80+",
                          true, "all parameters in one launch, pointers as kernel parameters"});

}  // namespace

void rmsprop(Stream stream, DType dtype, const RMSpropTensor* tensors, int64_t count,
             const RMSpropOptions& options) {
  multi_tensor_update<RMSpropUpdate>("rmsprop", stream, dtype, tensors, count, options);
}

}  // namespace braze::cuda
