#include "launchers/adam.h"

#include "cpu/common/multi_tensor.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

const KernelEntry kEntry({"adam", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised; all parameters share the threads"});

}  // namespace

void adam(Stream, DType dtype, const AdamTensor* tensors, int64_t count,
          const AdamOptions& options) {
  multi_tensor_update<AdamUpdate>(dtype, tensors, count, options);
}

}  // namespace braze::cpu
