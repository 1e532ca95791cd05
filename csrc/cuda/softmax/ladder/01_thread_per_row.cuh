// Rung 1: one thread per row, as the formula reads: the maximum, the sum of exp(x - maximum), the
// quotients. A pass over the row for each.
//
// Neighbouring threads read neighbouring rows, so that a warp's load goes to 32 different sectors
// and uses an element of each; the rest of a sector is used only if L1 still holds it when the loop
// comes to it. There are as few threads as rows: a thousand of them fill four of the 132
// multiprocessors. And a thread waits for each element before it asks for the next.
//
// The sum is a chain of as many additions as the row is long: kept in float64, or rows of 10^4
// elements would lose a digit that the other rungs keep, whose chains are shorter.
#pragma once

#include "rung.cuh"

namespace braze::cuda::softmax_ladder {

template <typename T>
__global__ void thread_per_row_kernel(Rows<T> m) {
  using A = acc_t<T>;
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row >= m.rows) return;
  const T* const x = m.x + row * m.size;
  T* const y = m.y + row * m.size;
  A maximum = -INFINITY;
  for (int64_t c = 0; c < m.size; ++c) maximum = max(maximum, convert<A>(x[c]));
  double sum = 0;
  for (int64_t c = 0; c < m.size; ++c) sum += exp(convert<A>(x[c]) - maximum);
  const A scale = static_cast<A>(1 / sum);
  for (int64_t c = 0; c < m.size; ++c) {
    y[c] = convert<T>(exp(convert<A>(x[c]) - maximum) * scale);
  }
}

template <typename T>
void run_thread_per_row(Stream stream, const Rows<T>& m) {
  const unsigned blocks = blocks_of(m, kThreads);
  thread_per_row_kernel<<<blocks, kThreads, 0, as_cuda(stream)>>>(m);
}

}  // namespace braze::cuda::softmax_ladder
