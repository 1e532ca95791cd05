// Rung 4, the shipped one: a thread asks for four vectors of each operand before it adds the first.
//
// By Little's law bandwidth is bytes in flight over latency: each multiprocessor has to have tens
// of kilobytes under way at any time. A thread of rung 3 asks for 32 bytes, and for nothing more
// until these have come; here it asks for 128. A block takes one piece of memory, 256 x 4 vectors,
// and is done: blocks beside it load while it stores, and a new one takes its place.
#pragma once

#include "rung.cuh"

namespace braze::cuda::vector_add_ladder {

constexpr int kVectors = 4;

template <int N, typename T>
__global__ void __launch_bounds__(kThreads)
    loads_in_flight_kernel(const T* a, const T* b, T* out, int64_t n) {
  const int64_t first = blockIdx.x * int64_t{kThreads * kVectors} + threadIdx.x;
  const int64_t vectors = n / N;
  Vec<T, N> from_a[kVectors], from_b[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int64_t i = first + k * kThreads;
    if (i < vectors) {
      from_a[k] = load_vec<N>(a + i * N);
      from_b[k] = load_vec<N>(b + i * N);
    }
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int64_t i = first + k * kThreads;
    if (i < vectors) store_vec<N>(out + i * N, sum(from_a[k], from_b[k]));
  }
  // Fewer than N elements are left.
  const int64_t last = vectors * N + threadIdx.x;
  if (blockIdx.x == 0 && last < n) out[last] = sum(a[last], b[last]);
}

template <typename T>
void run_loads_in_flight(Stream stream, const T* a, const T* b, T* out, int64_t n) {
  constexpr int N = kVecWidth<T>;
  const bool aligned = is_vec_aligned(a) && is_vec_aligned(b) && is_vec_aligned(out);
  const int64_t per_block = int64_t{kThreads * kVectors} * (aligned ? N : 1);
  const unsigned blocks = static_cast<unsigned>(ceil_div(n, per_block));
  if (aligned) {
    loads_in_flight_kernel<N><<<blocks, kThreads, 0, as_cuda(stream)>>>(a, b, out, n);
  } else {
    loads_in_flight_kernel<1><<<blocks, kThreads, 0, as_cuda(stream)>>>(a, b, out, n);
  }
}

}  // namespace braze::cuda::vector_add_ladder
