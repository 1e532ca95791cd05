// Walks the rows of a RowShape in parallel, and finds the maximum and the sum of exponentials of
// rows. Strided rows are taken in tiles of neighbours, so that loops run along memory.
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/common/exp.h"
#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "launchers/softmax.h"

namespace braze::cpu {

constexpr int kTileRows = 128;

// Calls f(first row, offset of its first element, rows in the tile) for tiles that cover the shape,
// on many threads. A tile is one row where rows are contiguous (inner = 1).
template <typename F>
void for_each_tile(const RowShape& shape, const F& f) {
  constexpr int64_t kGrainElements = 8192;
  const int64_t tiles = ceil_div(shape.inner, kTileRows);
  const int64_t tile_elements =
      std::max<int64_t>(1, shape.size * std::min<int64_t>(shape.inner, kTileRows));
  const int64_t grain = ceil_div(kGrainElements, tile_elements);
  parallel_for(0, shape.outer * tiles, grain, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const int64_t outer = t / tiles, inner = t % tiles * kTileRows;
      const int count = static_cast<int>(std::min<int64_t>(kTileRows, shape.inner - inner));
      f(outer * shape.inner + inner, outer * shape.size * shape.inner + inner, count);
    }
  });
}

template <typename A>
struct RowSum {
  A maximum;
  A sum;  // of exp(x - maximum); NaN where the row holds NaN or +inf, or nothing but -inf
};

template <typename T>
RowSum<acc_t<T>> sum_of_row(const T* x, int64_t size) {
  using A = acc_t<T>;
  A maximum = -std::numeric_limits<A>::infinity(), sum = 0;
#pragma omp simd reduction(max : maximum)
  for (int64_t c = 0; c < size; ++c) maximum = A(x[c]) > maximum ? A(x[c]) : maximum;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < size; ++c) sum += vector_exp(A(x[c]) - maximum);
  return {maximum, sum};
}

// The same for `count` <= kTileRows neighbouring rows of stride `inner`.
template <typename T>
void sums_of_tile(const T* x, int64_t size, int64_t inner, int count, acc_t<T>* maximum,
                  acc_t<T>* sum) {
  using A = acc_t<T>;
  std::fill_n(maximum, count, -std::numeric_limits<A>::infinity());
  std::fill_n(sum, count, A(0));
  for (int64_t c = 0; c < size; ++c) {
#pragma omp simd
    for (int i = 0; i < count; ++i) {
      const A v = x[c * inner + i];
      maximum[i] = v > maximum[i] ? v : maximum[i];
    }
  }
  for (int64_t c = 0; c < size; ++c) {
#pragma omp simd
    for (int i = 0; i < count; ++i) sum[i] += vector_exp(A(x[c * inner + i]) - maximum[i]);
  }
}

}  // namespace braze::cpu
