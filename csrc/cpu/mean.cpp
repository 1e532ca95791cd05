#include "launchers/mean.h"

#include "cpu/common/convert_all.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

const KernelEntry kEntry({"mean", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised"});

}  // namespace

void mean(Stream, DType to, const MeanTensor* tensors, int64_t count) {
  const auto mean_of = [](const MeanTensor& t, auto of_type) {
    using From = decltype(of_type);
    using Acc = acc_t<From>;
    const From* const first = static_cast<const From*>(t.first);
    const From* const second = static_cast<const From*>(t.second);
    return
        [first, second](int64_t j) { return Acc(first[j]) * Acc(0.5) + Acc(second[j]) * Acc(0.5); };
  };
  for (int64_t i = 0; i < count; ++i) convert_all(tensors[i].from, to, tensors + i, 1, mean_of);
}

}  // namespace braze::cpu
