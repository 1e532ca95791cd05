// The SGD update of a whole parameter list in one launch.
#include "launchers/sgd.h"

#include "cuda/common/multi_tensor.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

const KernelEntry kEntry({"sgd", "multi_tensor", "float64 float32 bfloat16 float16", "sm_80+", true,
                          "all parameters in one launch, pointers as kernel parameters"});

}  // namespace

void sgd(Stream stream, DType dtype, const SgdTensor* tensors, int64_t count,
         const SgdOptions& options) {
  multi_tensor_update<SgdUpdate>("sgd", stream, dtype, tensors, count, options);
}

}  // namespace braze::cuda
