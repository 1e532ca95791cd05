#include "launchers/cast.h"

#include "cpu/common/convert_all.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

const KernelEntry kEntry({"cast", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised"});

}  // namespace

void cast(Stream, DType from, DType to, const CastTensor* tensors, int64_t count) {
  convert_all(from, to, tensors, count, [](const CastTensor& t, auto of_type) {
    using From = decltype(of_type);
    const From* const in = static_cast<const From*>(t.from);
    return [in](int64_t j) { return acc_t<From>(in[j]); };
  });
}

}  // namespace braze::cpu
