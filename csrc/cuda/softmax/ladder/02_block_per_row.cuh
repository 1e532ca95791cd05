// Rung 2: one block per row. Neighbouring threads take neighbouring elements, and what each of them
// has found meets in shared memory, as a tree: half of the threads take the other half's value,
// then half of those, eight steps for 256 threads.
//
// Loads are coalesced now, and the rows of all blocks are in flight together. What is new is the
// price of a reduction: ten barriers, at each of which all eight warps wait for the slowest, twice
// a row. For a row of a few thousand elements that is much of the time, and for one of ten nearly
// all of it, with 246 threads that have nothing to do.
#pragma once

#include "rung.cuh"

namespace braze::cuda::softmax_ladder {

// Every thread of the block calls with a value and gets the reduction of all.
template <typename A, typename Combine>
__device__ A tree_reduce(A v, A* shared, Combine combine) {
  shared[threadIdx.x] = v;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      shared[threadIdx.x] = combine(shared[threadIdx.x], shared[threadIdx.x + half]);
    }
  }
  __syncthreads();
  const A result = shared[0];
  __syncthreads();  // the next reduction writes `shared` again
  return result;
}

template <typename T>
__global__ void block_per_row_kernel(Rows<T> m) {
  using A = acc_t<T>;
  __shared__ A shared[kThreads];
  const T* const x = m.x + blockIdx.x * m.size;
  T* const y = m.y + blockIdx.x * m.size;
  A maximum = -INFINITY;
  for (int64_t c = threadIdx.x; c < m.size; c += kThreads) {
    maximum = max(maximum, convert<A>(x[c]));
  }
  maximum = tree_reduce(maximum, shared, [](A a, A b) { return max(a, b); });
  A sum = 0;
  for (int64_t c = threadIdx.x; c < m.size; c += kThreads) sum += exp(convert<A>(x[c]) - maximum);
  const A scale = 1 / tree_reduce(sum, shared, [](A a, A b) { return a + b; });
  for (int64_t c = threadIdx.x; c < m.size; c += kThreads) {
    y[c] = convert<T>(exp(convert<A>(x[c]) - maximum) * scale);
  }
}

template <typename T>
void run_block_per_row(Stream stream, const Rows<T>& m) {
  block_per_row_kernel<<<blocks_of(m, 1), kThreads, 0, as_cuda(stream)>>>(m);
}

}  // namespace braze::cuda::softmax_ladder
