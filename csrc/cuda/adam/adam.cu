// The Adam update of a whole parameter list in one launch.
#include "launchers/adam.h"

#include "cuda/common/multi_tensor.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

const KernelEntry kEntry({"adam", "multi_tensor", "float64 float32 bfloat16 float16", "sm_80+",
                          true, "all parameters in one launch, pointers as kernel parameters"});

}  // namespace

void adam(Stream stream, DType dtype, const AdamTensor* tensors, int64_t count,
          const AdamOptions& options) {
  multi_tensor_update<AdamUpdate>("adam", stream, dtype, tensors, count, options);
}

}  // namespace braze::cuda
