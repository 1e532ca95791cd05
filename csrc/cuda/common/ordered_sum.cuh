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

constexpr int kSumThreads = 256;
constexpr int kSumsAtOnce = 8;  // terms that a thread asks for together

// out[i] = sum over s of partial[s * n + i], added up in fp64: there are few terms, and they are
// the last chance to lose accuracy. A block's threads have kColumns sums at a time and share out
// the terms of each. The last sums, from number `first_last` on, go to `last`.
template <typename T, int kColumns>
__global__ void __launch_bounds__(kSumThreads)
    ordered_sum_kernel(const acc_t<T>* partial, int splits, int64_t n, T* __restrict__ out,
                       int64_t first_last, T* __restrict__ last) {
  constexpr int kRows = kSumThreads / kColumns;
  __shared__ double parts[kRows][kColumns];
  const int column = static_cast<int>(threadIdx.x) % kColumns;
  const int row = static_cast<int>(threadIdx.x) / kColumns;
  wait_for_earlier_kernels();
  const int64_t stride = int64_t{gridDim.x} * kColumns;
  for (int64_t first = blockIdx.x * int64_t{kColumns}; first < n; first += stride) {
    const int64_t i = first + column;
    double sum = 0;
    for (int s = row; s < splits && i < n; s += kRows * kSumsAtOnce) {
      acc_t<T> terms[kSumsAtOnce];
#pragma unroll
      for (int k = 0; k < kSumsAtOnce; ++k) {
        const int at = s + k * kRows;
        terms[k] = at < splits ? partial[at * n + i] : acc_t<T>(0);
      }
#pragma unroll
      for (int k = 0; k < kSumsAtOnce; ++k) sum += terms[k];
    }
    parts[row][column] = sum;
    __syncthreads();
    if (row == 0 && i < n) {
      for (int r = 1; r < kRows; ++r) sum += parts[r][column];
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
  const auto launch = [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    launch_early(ordered_sum_kernel<T, kColumns>, grid_stride_blocks(sums, kColumns), kSumThreads,
                 0, stream, partial, splits, sums, out, n, last);
    check_launch("ordered_sum");
  };
  // Of few sums more threads share out the terms, so that all of them are asked for at once.
  if (sums <= int64_t{sm_count()} * 128) return launch(std::integral_constant<int, 16>{});
  launch(std::integral_constant<int, 32>{});
}

}  // namespace braze::cuda
