// Both moments of what a thread reads, at one reading: sums of the deviations from a pivot of its
// own, and of their squares. The pivot is a median of three elements: neither a mean that is much
// larger than the deviations nor a far-off element, which would spoil a mean, costs accuracy.
#pragma once

#include "numeric.cuh"

namespace braze::cuda {

template <typename A>
__device__ __forceinline__ A median(A a, A b, A c) {
  return max(min(a, b), min(max(a, b), c));
}

// A pivot for what begins with three vectors of N elements, of which the second and the third may
// not be there: load(u, v) loads one of those for which valid(u). Of the first alone, where it has
// three elements.
template <typename A, int N, typename Load, typename Valid>
__device__ __forceinline__ A pivot_of(const Load& load, const Valid& valid) {
  A v[N];
  load(0, v);
  if constexpr (N >= 4) {
    return median(v[0], v[N / 2], v[N - 1]);
  } else {
    const A first = v[0];
    A others[2] = {first, first};
#pragma unroll
    for (int u = 1; u < 3; ++u) {
      if (!valid(u)) continue;
      load(u, v);
      others[u - 1] = v[0];
    }
    return median(first, others[0], others[1]);
  }
}

template <typename A, int N>
__device__ __forceinline__ void add_deviations(A& sum, A& squares, const A (&v)[N], A pivot) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const A d = v[k] - pivot;
    sum += d;
    squares += d * d;
  }
}

template <typename A>
struct OwnMoments {
  A pivot = 0, count = 0, sum = 0, squares = 0;

  template <int N>
  __device__ __forceinline__ void add(const A (&v)[N]) {
    count += A(N);
    add_deviations(sum, squares, v, pivot);
  }
  __device__ __forceinline__ A total() const { return pivot * count + sum; }
  // The sums about another pivot. (Chan, Golub and LeVeque, Updating formulae and a pairwise
  // algorithm for computing sample variances, 1979)
  __device__ __forceinline__ void about(A other, A (&sums)[2]) const {
    const A d = pivot - other;
    sums[0] = sum + count * d;
    sums[1] = squares + d * (A(2) * sum + count * d);
  }
};

}  // namespace braze::cuda
