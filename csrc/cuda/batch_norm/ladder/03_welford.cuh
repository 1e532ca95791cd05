// Rung 3: mean and squares in one pass: Welford, Note on a method for calculating corrected sums of
// squares and products (1962).
//
// A thread keeps a count, the mean so far and the sum of squares about it. A new value moves the
// mean by its part of the difference, and both differences, to the mean before and after, make the
// square: no sum of plain squares, which would cancel where the mean dwarfs the deviation. Such
// triples merge by the formula of Chan, Golub and LeVeque (Updating formulae and a pairwise
// algorithm for computing sample variances, 1979): lanes by shuffles, warps through shared memory.
// Three reads of the channel become two. An element costs a division for it, and waits for the
// mean of the one before.
#pragma once

#include "rung.cuh"

namespace braze::cuda::batch_norm_ladder {

template <typename A>
struct Welford {
  A count = 0, mean = 0, squares = 0;

  __device__ void add(A v) {
    count += 1;
    const A delta = v - mean;
    mean += delta / count;
    squares += delta * (v - mean);
  }
  __device__ void merge(A other_count, A other_mean, A other_squares) {
    if (other_count == 0) return;
    const A total = count + other_count, delta = other_mean - mean;
    mean += delta * (other_count / total);
    squares += other_squares + delta * delta * (count * other_count / total);
    count = total;
  }
};

// Of the block's part of channel blockIdx.x, in every thread. Merged in float64, in a fixed order.
template <typename T>
__device__ Welford<double> moments_of_part(const Images<T>& m) {
  constexpr int kWarps = kPlaneThreads / 32;
  __shared__ Welford<double> shared[kWarps];
  Welford<acc_t<T>> own;
  for (auto at = m.part(); at.valid(); at.advance()) {
    own.add(convert<acc_t<T>>(m.x[at.offset()]));
  }
  Welford<double> merged{own.count, own.mean, own.squares};
  for (int offset = 16; offset > 0; offset /= 2) {
    merged.merge(__shfl_down_sync(~0u, merged.count, offset),
                 __shfl_down_sync(~0u, merged.mean, offset),
                 __shfl_down_sync(~0u, merged.squares, offset));
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = merged;
  __syncthreads();
  merged = shared[0];
  for (int w = 1; w < kWarps; ++w) {
    merged.merge(shared[w].count, shared[w].mean, shared[w].squares);
  }
  return merged;
}

template <typename T>
__global__ void __launch_bounds__(kPlaneThreads) welford_kernel(Images<T> m) {
  const Welford<double> of_channel = moments_of_part(m);
  if (threadIdx.x == 0) {
    batch_coefficients<acc_t<T>>(m.args, of_channel.count, of_channel.mean, of_channel.squares,
                                 blockIdx.x);
  }
  __syncthreads();
  normalize_part(m);
}

template <typename T>
void run_welford(Stream stream, const Images<T>& m) {
  const unsigned blocks = static_cast<unsigned>(m.shape.c);
  welford_kernel<<<blocks, kPlaneThreads, 0, as_cuda(stream)>>>(m);
}

}  // namespace braze::cuda::batch_norm_ladder
