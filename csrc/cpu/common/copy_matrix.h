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

// Transposes the 4x4 blocks of v[0..3]'s lower and upper halves in place: two rounds of
// interleaving rows i and i + 2. Within a register of 256 bits nothing crosses its middle, which
// takes a processor several instructions' time.
template <typename Acc>
inline void transpose4(vec8_t<Acc>* v) {
  using Index = index8_t<Acc>;
  const Index low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
  for (int round = 0; round < 2; ++round) {
    vec8_t<Acc> w[4];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      w[2 * i] = __builtin_shuffle(v[i], v[i + 2], low);
      w[2 * i + 1] = __builtin_shuffle(v[i], v[i + 2], high);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) v[i] = w[i];
  }
}

// Transposes the 8x8 block in `v` in place: exchanges two of its four 4x4 blocks, and transposes
// each.
template <typename Acc>
inline void transpose8(vec8_t<Acc> (&v)[8]) {
  using Index = index8_t<Acc>;
  const Index lower = {0, 1, 2, 3, 8, 9, 10, 11}, upper = {4, 5, 6, 7, 12, 13, 14, 15};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const vec8_t<Acc> first = v[i], second = v[i + 4];
    v[i] = __builtin_shuffle(first, second, lower);
    v[i + 4] = __builtin_shuffle(first, second, upper);
  }
  transpose4<Acc>(v), transpose4<Acc>(v + 4);
}

// dst[i * ld + j] = src[i + j * stride] for i < 8, j < kCols, 4 or 8.
template <int kCols, typename T>
inline void transpose_block(acc_t<T>* __restrict__ dst, int64_t ld, const T* __restrict__ src,
                            int64_t stride) {
  using Acc = acc_t<T>;
  vec8_t<Acc> v[kCols];
#pragma GCC unroll 8
  for (int j = 0; j < kCols; ++j) v[j] = load8(src + j * stride);
  if constexpr (kCols == 8) {
    transpose8<Acc>(v);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) store8(dst + i * ld, v[i]);
  } else {
    transpose4<Acc>(v);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const auto* const half = reinterpret_cast<const char*>(&v[i % 4]) + i / 4 * sizeof(v[0]) / 2;
      std::memcpy(dst + i * ld, half, sizeof(v[0]) / 2);
    }
  }
}

// The same for `rows` of 2 to 4, and blocks of eight columns: four elements are loaded of each, the
// last of which may be the next columns'. Returns how many columns are done: the last one is not,
// behind which there may be nothing.
inline int64_t transpose_narrow(float* __restrict__ dst, int64_t ld, const float* __restrict__ src,
                                int64_t stride, int64_t rows, int64_t cols) {
  int64_t j = 0;
  for (; j + 8 < cols; j += 8) {
    vec8_t<float> v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      std::memcpy(&v[i], src + (j + i) * stride, sizeof(v[i]) / 2);
      std::memcpy(reinterpret_cast<char*>(&v[i]) + sizeof(v[i]) / 2, src + (j + i + 4) * stride,
                  sizeof(v[i]) / 2);
    }
    transpose4<float>(v);
    for (int64_t i = 0; i < rows; ++i) store8(dst + i * ld + j, v[i]);
  }
  return j;
}

// The block of kSize after the one at i, of n in all; the last one overlaps the one before.
template <int kSize>
inline int64_t next_block(int64_t i, int64_t n) {
  return i + kSize < n ? std::min(i + kSize, n - kSize) : n;
}

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
  const auto transpose = [&](auto cols_tag) {
    for (int64_t i = 0; i < rows; i = next_block<8>(i, rows)) {
      for (int64_t j = 0; j < cols; j = next_block<cols_tag>(j, cols)) {
        transpose_block<cols_tag>(dst + i * ld + j, ld, src + i + j * col_stride, col_stride);
      }
    }
  };
  if (col_stride != 1 && row_stride == 1 && rows >= 8) {
    if (cols >= 8) return transpose(std::integral_constant<int, 8>{});
    if constexpr (std::is_same_v<Acc, float>) {
      if (cols >= 4) return transpose(std::integral_constant<int, 4>{});
    }
  }
  int64_t done = 0;
  if constexpr (std::is_same_v<T, float>) {
    if (row_stride == 1 && rows > 1 && rows <= 4 && col_stride >= rows) {
      done = transpose_narrow(dst, ld, src, col_stride, rows, cols);
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    copy_row(dst + i * ld + done, src + i * row_stride + done * col_stride, col_stride,
             cols - done);
  }
}

}  // namespace braze::cpu
