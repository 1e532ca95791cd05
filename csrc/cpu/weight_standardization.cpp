#include "launchers/weight_standardization.h"

#include <algorithm>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "cpu/common/row_norm.h"

namespace braze::cpu {
namespace {

constexpr int64_t kGrainElements = 16384;  // of a task

const KernelEntry kEntry({"weight_standardization", "filters", "float64 float32 bfloat16 float16",
                          "cpu", true, "vectorised along the filter"});

// f(weight's tag, result's tag).
template <typename F>
void dispatch_pair(const FiltersShape& shape, const F& f) {
  dispatch(shape.dtype, [&](auto tag) {
    if constexpr (std::is_same_v<typename decltype(tag)::type, float>) {
      if (shape.result == DType::kBFloat16) return f(tag, TypeTag<BFloat16>{});
      if (shape.result == DType::kFloat16) return f(tag, TypeTag<Half>{});
    }
    f(tag, tag);
  });
}

// The rows that a task has at least.
int64_t grain_of(const FiltersShape& shape) {
  return ceil_div(kGrainElements, std::max<int64_t>(shape.size, 1));
}

template <typename T>
acc_t<T> factor_of(const T* gain, int64_t row, double scale) {
  using A = acc_t<T>;
  const A by = static_cast<A>(scale);
  return gain ? static_cast<A>(gain[row]) * by : by;
}

}  // namespace

void weight_standardization(Stream, const FiltersShape& shape, const void* w, const void* gain,
                            double scale, double eps, void* y, void* mean, void* rstd) {
  dispatch_pair(shape, [&](auto tag, auto result) {
    using T = typename decltype(tag)::type;
    using R = typename decltype(result)::type;
    using A = acc_t<T>;
    const int64_t size = shape.size;
    parallel_for(0, shape.rows, grain_of(shape), [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const T* from = static_cast<const T*>(w) + r * size;
        R* to = static_cast<R*>(y) + r * size;
        const auto [pivot, rest, by] = statistics_of<T, A>(from, size, eps);
        static_cast<A*>(mean)[r] = pivot + rest;
        static_cast<A*>(rstd)[r] = by;
        const A factor = factor_of(static_cast<const T*>(gain), r, scale);
        const A p = pivot, d = rest, s = by;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) to[i] = R(((A(from[i]) - p) - d) * s * factor);
      }
    });
  });
}

void weight_standardization_backward(Stream, const FiltersShape& shape, const void* dy,
                                     const void* w, const void* gain, double scale,
                                     const void* mean, const void* rstd, void* dw, void* dgain) {
  dispatch_pair(shape, [&](auto tag, auto result) {
    using T = typename decltype(tag)::type;
    using R = typename decltype(result)::type;
    using A = acc_t<T>;
    const int64_t size = shape.size;
    parallel_for(0, shape.rows, grain_of(shape), [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const T* x = static_cast<const T*>(w) + r * size;
        const R* g = static_cast<const R*>(dy) + r * size;
        const A m = static_cast<const A*>(mean)[r], by = static_cast<const A*>(rstd)[r];
        const double sum = row_sum<A>(size, [=](int64_t i) { return A(g[i]); });
        const double dot =
            row_sum<A>(size, [=](int64_t i) { return A(g[i]) * ((A(x[i]) - m) * by); });
        if (dgain) static_cast<T*>(dgain)[r] = T(static_cast<A>(dot * scale));
        if (!dw) continue;
        const double count = static_cast<double>(size);
        const A by_count = static_cast<A>(sum / count), by_xhat = static_cast<A>(dot / count);
        const A factor = factor_of(static_cast<const T*>(gain), r, scale) * by;
        T* to = static_cast<T*>(dw) + r * size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
          const A xhat = (A(x[i]) - m) * by;
          to[i] = T((A(g[i]) - by_count - xhat * by_xhat) * factor);
        }
      }
    });
  });
}

}  // namespace braze::cpu
