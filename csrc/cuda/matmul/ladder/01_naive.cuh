// Rung 1: one thread per element of C, as the formula reads, straight from global memory.
//
// Neighbouring threads take neighbouring rows, as index (row, column) = (x, y) suggests. A warp
// then touches 32 rows of a row-major A, and of C, at once: 32 sectors of 32 bytes, in as many
// passes of the load unit, of which each thread wants 4 bytes. Nothing is reused but what a cache
// happens to keep. Any sizes, strides and dtypes.
#pragma once

#include "cuda/common/gemm_operand.cuh"
#include "cuda/common/launch.cuh"
#include "rungs.h"

namespace braze::cuda::ladder {

// One element of C from its row of A and its column of B; also rung 2's.
template <typename T>
__device__ __forceinline__ void compute_element(const MatmulArgs& p, int64_t batch, int64_t row,
                                                int64_t column) {
  const T* const a = static_cast<const T*>(p.a.data) + batch * p.a.batch + row * p.a.row;
  const T* const b = static_cast<const T*>(p.b.data) + batch * p.b.batch + column * p.b.col;
  const T* const bias = static_cast<const T*>(p.bias);
  acc_t<T> sum = 0;
  for (int64_t k = 0; k < p.k; ++k) {
    sum += convert<acc_t<T>>(a[k * p.a.col]) * convert<acc_t<T>>(b[k * p.b.row]);
  }
  if (bias) sum += convert<acc_t<T>>(bias[column]);
  if (p.relu && sum < acc_t<T>(0)) sum = 0;  // NaN stays NaN
  static_cast<T*>(p.c)[(batch * p.m + row) * p.n + column] = convert<T>(sum);
}

template <typename T>
__global__ void naive_kernel(const __grid_constant__ MatmulArgs p) {
  const int64_t total = p.batch * p.m * p.n;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total; i += stride) {
    compute_element<T>(p, i / p.m / p.n, i % p.m, i / p.m % p.n);
  }
}

void run_naive(Stream stream, const MatmulArgs& args) {
  constexpr int kThreads = 256;
  const int blocks = grid_stride_blocks(args.batch * args.m * args.n, kThreads);
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    naive_kernel<T><<<blocks, kThreads, 0, as_cuda(stream)>>>(args);
  });
  check_launch("matmul 01_naive");
}

}  // namespace braze::cuda::ladder
