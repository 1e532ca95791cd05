// Copies a strided matrix into rows of the accumulation type: the one routine that packing and
// padding are made of.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/common/numeric.h"
#include "cpu/common/simd.h"

namespace braze::cpu {

// dst[j] = src[j * stride] for j < n.
template <typename T>
inline void copy_row(acc_t<T>* __restrict__ dst, const T* __restrict__ src, int64_t stride,
                     int64_t n) {
  if (stride == 1) {
    constexpr int64_t kBlock = 8;
    int64_t j = 0;
    for (; j + kBlock <= n; j += kBlock) store8(dst + j, load8(src + j));
    if (j < n && n >= kBlock) {  // the last block overlaps the one before
      store8(dst + n - kBlock, load8(src + n - kBlock));
    } else {
      for (; j < n; ++j) dst[j] = static_cast<acc_t<T>>(src[j]);
    }
  } else {
    for (int64_t j = 0; j < n; ++j) dst[j] = static_cast<acc_t<T>>(src[j * stride]);
  }
}

// Transposes the 8x8 block in `v` in place: three rounds of interleaving rows i and i + 4.
template <typename Acc>
inline void transpose8(vec8_t<Acc> (&v)[8]) {
  using Index = index8_t<Acc>;
  const Index low = {0, 8, 1, 9, 2, 10, 3, 11}, high = {4, 12, 5, 13, 6, 14, 7, 15};
  for (int round = 0; round < 3; ++round) {
    vec8_t<Acc> w[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      w[2 * i] = __builtin_shuffle(v[i], v[i + 4], low);
      w[2 * i + 1] = __builtin_shuffle(v[i], v[i + 4], high);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) v[i] = w[i];
  }
}

// The block of 8 after the one at i, of n in all; the last one overlaps the one before.
inline int64_t next_block(int64_t i, int64_t n) { return i + 8 < n ? std::min(i + 8, n - 8) : n; }

// dst[i * ld + j] = src[i * row_stride + j * col_stride] for i < rows, j < cols. Rows that are
// contiguous in src are copied; columns that are contiguous are transposed in registers.
template <typename T>
void copy_matrix(acc_t<T>* __restrict__ dst, int64_t ld, const T* __restrict__ src,
                 int64_t row_stride, int64_t col_stride, int64_t rows, int64_t cols) {
  using Acc = acc_t<T>;
  if (col_stride == 1 && row_stride == cols && ld == cols) {
    copy_row(dst, src, 1, rows * cols);
    return;
  }
  if (col_stride != 1 && row_stride == 1 && rows >= 8 && cols >= 8) {
    for (int64_t i = 0; i < rows; i = next_block(i, rows)) {
      for (int64_t j = 0; j < cols; j = next_block(j, cols)) {
        vec8_t<Acc> v[8];
#pragma GCC unroll 8
        for (int l = 0; l < 8; ++l) v[l] = load8(src + i + (j + l) * col_stride);
        transpose8<Acc>(v);
#pragma GCC unroll 8
        for (int l = 0; l < 8; ++l) store8(dst + (i + l) * ld + j, v[l]);
      }
    }
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    copy_row(dst + i * ld, src + i * row_stride, col_stride, cols);
  }
}

}  // namespace braze::cpu
