#include "launchers/sgd.h"

#include "cpu/common/multi_tensor.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

const KernelEntry kEntry({"sgd", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised; all parameters share the threads"});

}  // namespace

void sgd(Stream, DType dtype, const SgdTensor* tensors, int64_t count, const SgdOptions& options) {
  multi_tensor_update<SgdUpdate>(dtype, tensors, count, options);
}

}  // namespace braze::cpu
