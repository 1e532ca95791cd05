// Rung 3: rung 2 with 16 bytes a load and a store, the widest access of a thread.
//
// With a 16-bit type that is 8 elements for the instructions that one took: an eighth of the loads,
// stores and addresses, and 512 bytes a warp and access instead of 64. Bytes in flight grow by the
// same factor, up to 32 a thread, which is what a memory with hundreds of nanoseconds of latency
// wants. Vectors need operands that begin at multiples of 16 bytes; others are added one element at
// a time, as are the last ones of an n that is no multiple.
#pragma once

#include "rung.cuh"

namespace braze::cuda::vector_add_ladder {

template <int N, typename T>
__global__ void vectorized_kernel(const T* a, const T* b, T* out, int64_t n) {
  const int64_t thread = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  const int64_t vectors = n / N;
  for (int64_t i = thread; i < vectors; i += stride) {
    store_vec<N>(out + i * N, sum(load_vec<N>(a + i * N), load_vec<N>(b + i * N)));
  }
  for (int64_t i = vectors * N + thread; i < n; i += stride) out[i] = sum(a[i], b[i]);
}

template <typename T>
void run_vectorized(Stream stream, const T* a, const T* b, T* out, int64_t n) {
  constexpr int N = kVecWidth<T>;
  const bool aligned = is_vec_aligned(a) && is_vec_aligned(b) && is_vec_aligned(out);
  const int blocks = grid_stride_blocks(ceil_div(n, aligned ? N : 1), kThreads);
  if (aligned) {
    vectorized_kernel<N><<<blocks, kThreads, 0, as_cuda(stream)>>>(a, b, out, n);
  } else {
    vectorized_kernel<1><<<blocks, kThreads, 0, as_cuda(stream)>>>(a, b, out, n);
  }
}

}  // namespace braze::cuda::vector_add_ladder
