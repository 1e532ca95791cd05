// Rung 2: one block per channel. Neighbouring threads take neighbouring elements, and their sums
// meet in shared memory, as a tree: half of the threads add the other half's, then half of those.
//
// Loads are coalesced, and 256 threads wait at the same time instead of one. The passes are the
// same three: what the second and the third read has left the caches where a channel is more than
// its share of L2. And a network's 32 or 64 channels are as many blocks: on 132 multiprocessors
// most of the device idles still.
#pragma once

#include "rung.cuh"

namespace braze::cuda::batch_norm_ladder {

// The sum over the block, in every thread.
__device__ inline double tree_sum(double v, double* shared) {
  shared[threadIdx.x] = v;
  for (int half = kPlaneThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  __syncthreads();
  const double sum = shared[0];
  __syncthreads();  // the next sum writes `shared` again
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(kPlaneThreads) block_per_channel_kernel(Images<T> m) {
  using A = acc_t<T>;
  __shared__ double shared[kPlaneThreads];
  const double count = static_cast<double>(m.count());
  A sum = 0, squares = 0;
  for (auto at = m.part(); at.valid(); at.advance()) sum += convert<A>(m.x[at.offset()]);
  const double mean = tree_sum(sum, shared) / count;
  const A center = static_cast<A>(mean);
  for (auto at = m.part(); at.valid(); at.advance()) {
    const A d = convert<A>(m.x[at.offset()]) - center;
    squares += d * d;
  }
  const double all_squares = tree_sum(squares, shared);
  if (threadIdx.x == 0) {
    batch_coefficients<A>(m.args, count, mean, all_squares, blockIdx.x);
  }
  __syncthreads();
  normalize_part(m);
}

template <typename T>
void run_block_per_channel(Stream stream, const Images<T>& m) {
  const unsigned blocks = static_cast<unsigned>(m.shape.c);
  block_per_channel_kernel<<<blocks, kPlaneThreads, 0, as_cuda(stream)>>>(m);
}

}  // namespace braze::cuda::batch_norm_ladder
