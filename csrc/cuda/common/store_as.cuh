// Vectors of accumulation values, stored as elements of another type, whole: a Vec that is assigned
// may be taken apart into stores of 16 bits.
#pragma once

#include "numeric.cuh"

namespace braze::cuda {

template <typename T, typename A, int N>
__device__ __forceinline__ void store_as(T* to, const A (&v)[N]) {
  Vec<T, N> elements;
#pragma unroll
  for (int k = 0; k < N; ++k) elements.v[k] = convert<T>(v[k]);
  store_vec(to, elements);
}

}  // namespace braze::cuda
