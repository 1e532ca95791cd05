// What kernels multiply in a step of a reduction.
#pragma once

#include "cpu/common/numeric.h"
#include "cpu/matmul/dot_bf16.h"

namespace braze::cpu {

// Calls f with tags of the element type and of a step: a pair of bf16 where the processor gains by
// multiplying pairs, else a value of the accumulation type.
template <typename F>
void with_steps(DType dtype, const F& f) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (dot_bf16_pays()) return f(tag, TypeTag<Bf16Pair>{});
    }
    f(tag, TypeTag<acc_t<T>>{});
  });
}

}  // namespace braze::cpu
