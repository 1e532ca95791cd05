// Fragments of both passes' products, and the products: as they are, or of fp32 split in two.
#pragma once

#include <type_traits>

#include "cuda/common/split_fragment.cuh"

namespace braze::cuda::narrow {

template <int kCount>
struct PlainFragment {
  uint32_t first[kCount];
  __device__ __forceinline__ void set(int i, uint32_t word) { first[i] = word; }
};

template <bool kSplit, int kCount>
using Fragment = std::conditional_t<kSplit, SplitFragment<kCount>, PlainFragment<kCount>>;

__device__ __forceinline__ void set_rows(uint32_t (&to)[4], const uint32_t (&upper)[2],
                                         const uint32_t (&lower)[2]) {
  to[0] = upper[0], to[1] = lower[0], to[2] = upper[1], to[3] = lower[1];
}

// Sixteen rows from twice eight, which lanes hold as they hold eight columns.
__device__ __forceinline__ PlainFragment<4> rows_of(const PlainFragment<2>& upper,
                                                    const PlainFragment<2>& lower) {
  PlainFragment<4> rows;
  set_rows(rows.first, upper.first, lower.first);
  return rows;
}
__device__ __forceinline__ SplitFragment<4> rows_of(const SplitFragment<2>& upper,
                                                    const SplitFragment<2>& lower) {
  SplitFragment<4> rows;
  set_rows(rows.first, upper.first, lower.first);
  set_rows(rows.rest, upper.rest, lower.rest);
  set_rows(rows.finite, upper.finite, lower.finite);
  return rows;
}

template <typename T>
__device__ __forceinline__ void multiply(float (&sums)[4], const PlainFragment<4>& rows,
                                         const PlainFragment<2>& columns) {
  mma_m16n8<T>(sums, rows.first, columns.first);
}
template <typename T>
__device__ __forceinline__ void multiply(float (&sums)[4], const SplitFragment<4>& rows,
                                         const SplitFragment<2>& columns) {
  mma_split(sums, rows, columns);
}

// fp32 words as products take them: rounded to TF32, unless they are split.
template <typename T, bool kSplit>
__device__ __forceinline__ uint32_t product_word(uint32_t word) {
  if constexpr (sizeof(T) == 4 && !kSplit) return round_tf32(word);
  return word;
}

}  // namespace braze::cuda::narrow
