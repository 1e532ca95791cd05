// Rung 3: one warp per row, whose lanes meet by shuffles.
//
// A shuffle hands a register to another lane: five of them reduce a warp, without shared memory and
// without a barrier, since lanes of a warp go in step. The eight warps of a block have a row each
// and never wait for each other. A row of ten elements leaves 22 threads idle instead of 246. The
// longest rows have fewer threads than on rung 2, but in a matrix of many rows the multiprocessors
// are as full.
#pragma once

#include "rung.cuh"

namespace braze::cuda::softmax_ladder {

// Every lane calls with a value and gets the reduction of all.
template <typename A, typename Combine>
__device__ A warp_reduce(A v, Combine combine) {
  for (int offset = 16; offset > 0; offset /= 2) {
    v = combine(v, __shfl_xor_sync(~0u, v, offset));
  }
  return v;
}

template <typename T>
__global__ void warp_per_row_kernel(Rows<T> m) {
  using A = acc_t<T>;
  const int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (row >= m.rows) return;
  const int lane = threadIdx.x % 32;
  const T* const x = m.x + row * m.size;
  T* const y = m.y + row * m.size;
  A maximum = -INFINITY;
  for (int64_t c = lane; c < m.size; c += 32) maximum = max(maximum, convert<A>(x[c]));
  maximum = warp_reduce(maximum, [](A a, A b) { return max(a, b); });
  A sum = 0;
  for (int64_t c = lane; c < m.size; c += 32) sum += exp(convert<A>(x[c]) - maximum);
  const A scale = 1 / warp_reduce(sum, [](A a, A b) { return a + b; });
  for (int64_t c = lane; c < m.size; c += 32) {
    y[c] = convert<T>(exp(convert<A>(x[c]) - maximum) * scale);
  }
}

template <typename T>
void run_warp_per_row(Stream stream, const Rows<T>& m) {
  const unsigned blocks = blocks_of(m, kWarps);
  warp_per_row_kernel<<<blocks, kThreads, 0, as_cuda(stream)>>>(m);
}

}  // namespace braze::cuda::softmax_ladder
