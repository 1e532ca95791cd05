#include "launchers/mean.h"

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

const KernelEntry kEntry({"mean", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised"});

}  // namespace

void mean(Stream, DType from, DType to, const MeanTensor* tensors, int64_t count) {
  dispatch(from, [&](auto source) {
    dispatch(to, [&](auto target) {
      using From = typename decltype(source)::type;
      using To = typename decltype(target)::type;
      using Acc = acc_t<From>;
      for (int64_t i = 0; i < count; ++i) {
        const From* const first = static_cast<const From*>(tensors[i].first);
        const From* const second = static_cast<const From*>(tensors[i].second);
        To* const out = static_cast<To*>(tensors[i].to);
        parallel_for(0, tensors[i].numel, 32768, [&](int64_t begin, int64_t end) {
#pragma omp simd
          for (int64_t j = begin; j < end; ++j) {
            out[j] = To(Acc(first[j]) * Acc(0.5) + Acc(second[j]) * Acc(0.5));
          }
        });
      }
    });
  });
}

}  // namespace braze::cpu
