// Sums whose order is fixed, so that they are bitwise repeatable: within a block, and over the
// partial sums that blocks have left in a workspace.
#pragma once

#include "launch.cuh"
#include "numeric.cuh"

namespace braze::cuda {

// The sum of `v` over the block, valid in thread 0. Synchronise between two calls.
template <int kThreads, typename Acc>
__device__ __forceinline__ Acc block_sum(Acc v) {
  __shared__ Acc warps[kThreads / 32];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) v += __shfl_xor_sync(0xffffffff, v, lanes);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kThreads / 32; ++i) v += warps[i];
  }
  return v;
}

constexpr int kSumColumns = 32, kSumRows = 8;

// out[i] = sum over s of partial[s * n + i], added up in fp64: there are few terms, and they are
// the last chance to lose accuracy. kSumRows threads share out the terms of a sum. The last sums,
// from number `first_last` on, go to `last`.
template <typename T>
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    ordered_sum_kernel(const acc_t<T>* partial, int splits, int64_t n, T* __restrict__ out,
                       int64_t first_last, T* __restrict__ last) {
  wait_for_earlier_kernels();
  __shared__ double parts[kSumRows][kSumColumns];
  const int64_t stride = int64_t{gridDim.x} * kSumColumns;
  for (int64_t first = blockIdx.x * int64_t{kSumColumns}; first < n; first += stride) {
    const int64_t i = first + threadIdx.x;
    double sum = 0;
    if (i < n) {
#pragma unroll 8
      for (int s = threadIdx.y; s < splits; s += kSumRows) sum += partial[s * n + i];
    }
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && i < n) {
      for (int row = 1; row < kSumRows; ++row) sum += parts[row][threadIdx.x];
      T* const to = i < first_last ? out + i : last + (i - first_last);
      *to = convert<T>(static_cast<acc_t<T>>(sum));
    }
    __syncthreads();  // the next columns write `parts` again
  }
}

// last: of as many sums behind the n of `out`.
template <typename T>
void launch_ordered_sum(Stream stream, const acc_t<T>* partial, int splits, int64_t n, T* out,
                        int64_t last_sums = 0, T* last = nullptr) {
  const int64_t sums = n + last_sums;
  const int blocks = grid_stride_blocks(sums, kSumColumns);
  launch_early(ordered_sum_kernel<T>, blocks, dim3(kSumColumns, kSumRows), 0, stream, partial,
               splits, sums, out, n, last);
  check_launch("ordered_sum");
}

}  // namespace braze::cuda
