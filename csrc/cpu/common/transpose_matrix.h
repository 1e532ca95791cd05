// Transposes matrices in registers: those of 16-bit elements here, whatever type they are of,
// others by copy_matrix().
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/common/copy_matrix.h"

namespace braze::cpu {

// dst[i * ld + j] = src[i + j * stride] for i, j < 8: three rounds of interleaving rows i and i
// + 4.
inline void transpose_halves_block(uint16_t* __restrict__ dst, int64_t ld,
                                   const uint16_t* __restrict__ src, int64_t stride) {
  using V = uint16_t __attribute__((vector_size(16)));
  const V low = {0, 8, 1, 9, 2, 10, 3, 11}, high = {4, 12, 5, 13, 6, 14, 7, 15};
  V v[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) std::memcpy(&v[j], src + j * stride, sizeof(V));
#pragma GCC unroll 3
  for (int round = 0; round < 3; ++round) {
    V w[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      w[2 * i] = __builtin_shuffle(v[i], v[i + 4], low);
      w[2 * i + 1] = __builtin_shuffle(v[i], v[i + 4], high);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) v[i] = w[i];
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) std::memcpy(dst + i * ld, &v[i], sizeof(V));
}

// dst[i * ld + j] = src[i + j * stride] for i < rows, j < cols.
inline void transpose_halves(uint16_t* __restrict__ dst, int64_t ld,
                             const uint16_t* __restrict__ src, int64_t stride, int64_t rows,
                             int64_t cols) {
  if (rows < 8 || cols < 8) {
    for (int64_t j = 0; j < cols; ++j) {
      for (int64_t i = 0; i < rows; ++i) dst[i * ld + j] = src[i + j * stride];
    }
    return;
  }
  for (int64_t i = 0; i < rows; i = next_block<8>(i, rows)) {
    for (int64_t j = 0; j < cols; j = next_block<8>(j, cols)) {
      transpose_halves_block(dst + i * ld + j, ld, src + i + j * stride, stride);
    }
  }
}

// The same of elements of any type.
template <typename T>
void transpose_matrix(T* to, int64_t ld, const T* from, int64_t stride, int64_t rows,
                      int64_t cols) {
  if constexpr (sizeof(T) == 2) {
    transpose_halves(reinterpret_cast<uint16_t*>(to), ld, reinterpret_cast<const uint16_t*>(from),
                     stride, rows, cols);
  } else {
    copy_matrix(to, ld, from, 1, stride, rows, cols);
  }
}

}  // namespace braze::cpu
