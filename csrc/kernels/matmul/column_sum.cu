// Sums of a matrix's columns, memory-bound: the bias gradient of a linear layer. Blocks of 32
// columns share out the rows; their partial sums are added in a fixed order.
#include <climits>

#include "kernels/common/ordered_sum.cuh"
#include "matmul.h"

namespace braze::cuda {
namespace {

constexpr int kColumns = 32, kRows = 8;

template <typename T>
__global__ void __launch_bounds__(kColumns* kRows)
    column_sum_kernel(const T* __restrict__ x, int64_t m, int64_t n, int splits,
                      acc_t<T>* __restrict__ partial) {
  using Acc = acc_t<T>;
  __shared__ Acc sums[kRows][kColumns];
  const int split = static_cast<int>(blockIdx.x % splits);
  const int64_t column = int64_t{blockIdx.x / splits} * kColumns + threadIdx.x;
  const int64_t begin = m * split / splits, end = m * (split + 1) / splits;
  Acc sum = 0;
  if (column < n) {
#pragma unroll 8
    for (int64_t i = begin + threadIdx.y; i < end; i += kRows)
      sum += convert<Acc>(x[i * n + column]);
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= n) return;
  for (int row = 1; row < kRows; ++row) sum += sums[row][threadIdx.x];
  partial[split * n + column] = sum;
}

int plan(int64_t m, int64_t n) {
  const int64_t wanted = ceil_div(int64_t{sm_count()} * 8, ceil_div(n, kColumns));
  return static_cast<int>(std::max<int64_t>(1, std::min(wanted, m / (8 * kRows))));
}

}  // namespace

int64_t column_sum_workspace_bytes(DType dtype, int64_t m, int64_t n) {
  if (n == 0) return 0;
  return plan(m, n) * n * (dtype == DType::kFloat64 ? 8 : 4);
}

void column_sum(Stream stream, DType dtype, int64_t m, int64_t n, const void* x, void* out,
                void* workspace) {
  if (n == 0) return;
  const int splits = plan(m, n);
  const int64_t blocks = ceil_div(n, kColumns) * splits;
  if (blocks > INT_MAX) throw std::runtime_error("column_sum: more than 2^36 columns");
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    acc_t<T>* const partial = static_cast<acc_t<T>*>(workspace);
    column_sum_kernel<T>
        <<<static_cast<unsigned>(blocks), dim3(kColumns, kRows), 0, as_cuda(stream)>>>(
            static_cast<const T*>(x), m, n, splits, partial);
    check_launch("column_sum");
    launch_ordered_sum(stream, partial, splits, n, static_cast<T*>(out));
  });
}

}  // namespace braze::cuda
