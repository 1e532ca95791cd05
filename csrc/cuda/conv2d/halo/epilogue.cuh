// What the halo kernels do with results on the way out: 16-bit pairs and batch statistics.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "launchers/common/moments.h"

namespace braze::cuda::halo {

// Two values as 16-bit floats in one word, the first in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}
template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return float2{__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
}

// Running moments of one row of the accumulator: sums of deviations from `shift`, the row's first
// value, so that squares do not cancel.
struct Accumulator {
  float shift = 0, sum = 0, square_sum = 0;
  __device__ void add(float value) {
    const float d = value - shift;
    sum += d;
    square_sum += d * d;
  }
};

// Of sums of deviations from `shift`.
__device__ __forceinline__ Moments moments_of(float shift, float sum, float square_sum, int count) {
  if (count == 0) return {0, 0, 0};
  const float mean = __fdividef(sum, count), m2 = fmaf(-mean, sum, square_sum);
  return {static_cast<float>(count), shift + mean, m2 < 0 ? 0 : m2};
}

// Of the four threads that share a row, and one shift.
__device__ __forceinline__ Moments merge_quad(Accumulator a, int count) {
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    a.sum += __shfl_xor_sync(~0u, a.sum, offset);
    a.square_sum += __shfl_xor_sync(~0u, a.square_sum, offset);
    count += __shfl_xor_sync(~0u, count, offset);
  }
  return moments_of(a.shift, a.sum, a.square_sum, count);
}

}  // namespace braze::cuda::halo
