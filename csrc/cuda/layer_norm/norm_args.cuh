// What the forward passes over rows share: what a row is normalised with, and how it is stored.
#pragma once

#include "cuda/common/own_moments.cuh"
#include "row.cuh"

namespace braze::cuda {

// What a row is normalised with: (x - pivot) * rstd + shift, where pivot is its mean as rounded to
// the type, from which the deviations are exact, and the shift what rounding took away: beside a
// deviation much smaller than the mean it counts.
template <typename A>
struct NormRow {
  A pivot, rstd, shift;
};

template <typename T>
struct NormArgs {
  using A = acc_t<T>;

  const T* x;
  void* y;
  DType result;  // of y: T's; float32 beside a 16-bit T; of 16 bits beside float32
  A eps;
  A* mean;
  A* rstd;

  // sums: of the deviations from the pivot, and of their squares. `first`: the thread that keeps
  // the statistics.
  __device__ __forceinline__ NormRow<A> finish(bool first, int64_t row, A pivot, Pair<A> sums,
                                               A by_size) const {
    const A rest = sums.first * by_size;
    A variance = sums.second * by_size - rest * rest;
    variance = variance < A(0) ? A(0) : variance;  // NaN stays
    const A scale = rsqrt(variance + eps);
    if (first) {
      mean[row] = pivot + rest;
      rstd[row] = scale;
    }
    return {pivot, scale, -rest * scale};
  }

  // y of N elements v, those at `at`, with their weights and biases.
  template <int N>
  __device__ __forceinline__ void store(const NormRow<A>& norm, const A (&w)[N], const A (&b)[N],
                                        int64_t at, A (&v)[N]) const {
    const Line<T> xhat(norm.pivot, norm.rstd, norm.shift);
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = xhat(v[k]) * w[k] + b[k];
    if constexpr (sizeof(T) == 2) {
      if (result == DType::kFloat32) return store_as(static_cast<A*>(y) + at, v);
    } else if constexpr (sizeof(T) == 4) {
      if (result == DType::kBFloat16) return store_as(static_cast<__nv_bfloat16*>(y) + at, v);
      if (result == DType::kFloat16) return store_as(static_cast<__half*>(y) + at, v);
    }
    store_as(static_cast<T*>(y) + at, v);
  }
};

}  // namespace braze::cuda
