// How results are stored: the epilogue of kernels that have filters across the lanes, and the sum
// of the parts of a weight gradient.
#pragma once

#include <algorithm>

#include "cpu/common/copy_matrix.h"
#include "cpu/common/numeric.h"
#include "cpu/matmul/dot_bf16.h"

namespace braze::cpu {

inline bool all_finite(const float* values, int64_t count) {
  float odd = 0;  // NaN where one is not
#pragma omp simd reduction(+ : odd)
  for (int64_t i = 0; i < count; ++i) odd += values[i] * 0.0f;
  return odd == 0;
}

// Calls f(std::bool_constant): whether a panel of so many filters fills its vectors.
template <typename F>
void with_full(int64_t filters, int64_t width, const F& f) {
  filters == width ? f(std::true_type{}) : f(std::false_type{});
}

// to[i * stride] = the sum over `parts` of from[part * pitch + i], in their order, for i < count.
template <typename T>
void add_parts(const acc_t<T>* from, int64_t pitch, int64_t parts, int64_t count, T* to,
               int64_t stride) {
  constexpr int64_t kAtOnce = 64;
  for (int64_t first = 0; first < count; first += kAtOnce, from += kAtOnce) {
    const int64_t number = std::min(kAtOnce, count - first);
    acc_t<T> sums[kAtOnce] = {};
    for (int64_t part = 0; part < parts; ++part) {
      const acc_t<T>* const of_part = from + part * pitch;
      for (int64_t i = 0; i < number; ++i) sums[i] += of_part[i];
    }
    T* const there = to + first * stride;
    if (stride == 1) {
      for (int64_t i = 0; i < number; ++i) there[i] = T(sums[i]);
    } else {
      for (int64_t i = 0; i < number; ++i) there[i * stride] = T(sums[i]);
    }
  }
}

// The bias of a panel's filters, or zeros.
template <typename Acc>
struct PanelBias {
  template <typename T>
  PanelBias(const T* bias, int64_t filter, int64_t filters) {
    for (int64_t f = 0; bias && f < filters; ++f) values[f] = Acc(bias[filter + f]);
  }
  Acc values[2 * kLanes<Acc>] = {};
};

// pixels x filters sums (64 filters at most), rows `width` apart, plus the bias from `filter` on
// (or nullptr), to a result of those strides.
template <typename T>
void store_pixels(const acc_t<T>* sums, int64_t width, int64_t pixels, int64_t filters,
                  const void* biases, int64_t filter, T* to, int64_t pixel_stride,
                  int64_t filter_stride) {
  using Acc = acc_t<T>;
  const T* const bias = biases ? static_cast<const T*>(biases) + filter : nullptr;
  constexpr int64_t kChunk = 64, kMostFilters = 64;
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (filter_stride == 1 && dot_bf16_available()) {
      Acc shift[kMostFilters];
      for (int64_t f = 0; f < filters; ++f) shift[f] = bias ? Acc(bias[f]) : Acc(0);
      return store_rounded(sums, width, pixels, filters, shift, to, pixel_stride);
    }
  }
  if (filter_stride == 1) {
    for (int64_t i = 0; i < pixels; ++i, sums += width, to += pixel_stride) {
      if (bias) {
        for (int64_t f = 0; f < filters; ++f) to[f] = T(sums[f] + Acc(bias[f]));
      } else {
        for (int64_t f = 0; f < filters; ++f) to[f] = T(sums[f]);
      }
    }
    return;
  }
  Acc rows[kMostFilters * kChunk];
  for (int64_t first = 0; first < pixels; first += kChunk) {
    const int64_t count = std::min(kChunk, pixels - first);
    copy_matrix(rows, kChunk, sums + first * width, 1, width, filters, count);
    for (int64_t f = 0; f < filters; ++f) {
      const Acc shift = bias ? Acc(bias[f]) : Acc(0);
      T* const row = to + f * filter_stride + first * pixel_stride;
      const Acc* const values = rows + f * kChunk;
      if (pixel_stride == 1) {
        for (int64_t i = 0; i < count; ++i) row[i] = T(values[i] + shift);
      } else {
        for (int64_t i = 0; i < count; ++i) row[i * pixel_stride] = T(values[i] + shift);
      }
    }
  }
}

}  // namespace braze::cpu
