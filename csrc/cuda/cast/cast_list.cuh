// Casts of many tensors as part of a launch.
#pragma once

#include <type_traits>

#include "launchers/cast.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/tensor_list.cuh"

namespace braze::cuda {

constexpr int kCastThreads = 256;  // of a block, where nothing else decides

// A block takes 2048 elements.
using CastList = TensorList<CastTensor, 128, 2048>;
static_assert(sizeof(CastList) <= 3840, "kernel parameters, of which there are 4 KB");

template <int N, typename From, typename To>
__device__ void cast_range(const CastTensor& t, int64_t begin, int64_t end) {
  const From* const from = static_cast<const From*>(t.from);
  To* const to = static_cast<To*>(t.to);
  for (int64_t i = begin + int64_t{threadIdx.x} * N; i < end; i += int64_t{blockDim.x} * N) {
    const Vec<From, N> values = load_vec<N>(from + i);
    if constexpr (std::is_same_v<From, To>) {
      store_vec(to + i, values);
    } else {
      Vec<To, N> result;
#pragma unroll
      for (int k = 0; k < N; ++k) result.v[k] = convert<To>(convert<acc_t<From>>(values.v[k]));
      store_vec(to + i, result);
    }
  }
}

// The work of one of list.blocks() blocks.
template <typename From, typename To>
__device__ __forceinline__ void cast_block(const CastList& list, unsigned block) {
  int64_t begin, end;
  const CastTensor& t = list.of_block(block, &begin, &end);
  constexpr int N = kVecWidth<From> < kVecWidth<To> ? kVecWidth<To> : kVecWidth<From>;
  const auto address = reinterpret_cast<uintptr_t>(t.from) | reinterpret_cast<uintptr_t>(t.to);
  const int64_t vectors_end = address % 16 == 0 ? begin + (end - begin) / N * N : begin;
  cast_range<N, From, To>(t, begin, vectors_end);
  cast_range<1, From, To>(t, vectors_end, end);
}

}  // namespace braze::cuda
