// What layer norm and group norm share on the CPU: the statistics of a row of neighbouring
// elements, and parameters in the accumulation type.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/common/numeric.h"

namespace braze::cpu {

// A vector of parameters in the accumulation type; `absent` where there is none.
template <typename A>
std::vector<A> parameters(const void* values, DType dtype, int64_t size, A absent) {
  std::vector<A> result(size, absent);
  if (!values) return result;
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = static_cast<const T*>(values);
    for (int64_t c = 0; c < size; ++c) result[c] = static_cast<A>(static_cast<acc_t<T>>(from[c]));
  });
  return result;
}

// The mean of a row is pivot + rest: rounded to the type alone it would take away from the
// deviations where it is large beside them.
template <typename A>
struct RowStatistics {
  A pivot, rest, rstd;
};

// The sum of f(c) along a row; in short runs, behind which float64 takes over: a long sum would
// lose what is small beside one large element.
template <typename A, typename F>
double row_sum(int64_t size, const F& f) {
  constexpr int64_t kRun = 512;
  double sum = 0;
  for (int64_t begin = 0; begin < size; begin += kRun) {
    const int64_t end = std::min(begin + kRun, size);
    A run = 0;
#pragma omp simd reduction(+ : run)
    for (int64_t c = begin; c < end; ++c) run += f(c);
    sum += run;
  }
  return sum;
}

template <typename T, typename A>
RowStatistics<A> statistics_of(const T* x, int64_t size, double eps) {
  const double count = static_cast<double>(size);
  const A pivot = static_cast<A>(row_sum<A>(size, [x](int64_t c) { return A(x[c]); }) / count);
  const auto deviation = [x, pivot](int64_t c) { return A(x[c]) - pivot; };
  const double rest = row_sum<A>(size, deviation) / count;
  const double squares = row_sum<A>(size, [deviation](int64_t c) {
    const A d = deviation(c);
    return d * d;
  });
  const double variance = squares / count - rest * rest;
  const double rstd = 1 / std::sqrt((variance < 0 ? 0 : variance) + eps);
  return {pivot, static_cast<A>(rest), static_cast<A>(rstd)};
}

}  // namespace braze::cpu
