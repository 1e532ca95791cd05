// Elements of many tensors, each made from those at the same place of others.
#pragma once

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"

namespace braze::cpu {

// to[j] = value(j), rounded, of `count` tensors that have `numel` and `to`. value_of: what, for a
// tensor and a value of the sources' type, gives `value`.
template <typename Tensor, typename ValueOf>
void convert_all(DType from, DType to, const Tensor* tensors, int64_t count,
                 const ValueOf& value_of) {
  dispatch(from, [&](auto source) {
    dispatch(to, [&](auto target) {
      using From = typename decltype(source)::type;
      using To = typename decltype(target)::type;
      for (int64_t i = 0; i < count; ++i) {
        const auto value = value_of(tensors[i], From{});
        To* const out = static_cast<To*>(tensors[i].to);
        parallel_for(0, tensors[i].numel, 32768, [&](int64_t begin, int64_t end) {
#pragma omp simd
          for (int64_t j = begin; j < end; ++j) out[j] = To(value(j));
        });
      }
    });
  });
}

}  // namespace braze::cpu
