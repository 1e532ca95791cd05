// What the rungs share: the sum of two elements, or of two vectors of them.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"

namespace braze::cuda::vector_add_ladder {

constexpr int kThreads = 256;

template <typename T>
__device__ __forceinline__ T sum(T a, T b) {
  return convert<T>(convert<acc_t<T>>(a) + convert<acc_t<T>>(b));
}

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> sum(const Vec<T, N>& a, const Vec<T, N>& b) {
  Vec<T, N> result;
#pragma unroll
  for (int k = 0; k < N; ++k) result.v[k] = sum(a.v[k], b.v[k]);
  return result;
}

}  // namespace braze::cuda::vector_add_ladder
