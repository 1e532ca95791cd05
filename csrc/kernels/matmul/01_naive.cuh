// Rung 1: one thread per element of C, straight from global memory. Neighbouring threads take
// neighbouring columns, so that reads of a row-major B and writes of C are coalesced; A is
// broadcast within a warp. Every multiply-add costs two loads: bound by the load units.
#pragma once

#include "kernels/common/gemm_operand.cuh"
#include "kernels/common/launch.cuh"
#include "matmul.h"

namespace braze::cuda {

template <typename T>
__global__ void naive_matmul_kernel(MatmulArgs p) {
  const int64_t total = p.batch * p.m * p.n;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const T* const bias = static_cast<const T*>(p.bias);
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total; i += stride) {
    const int64_t column = i % p.n, row = i / p.n % p.m, batch = i / p.n / p.m;
    const T* const a = static_cast<const T*>(p.a.data) + batch * p.a.batch + row * p.a.row;
    const T* const b = static_cast<const T*>(p.b.data) + batch * p.b.batch + column * p.b.col;
    acc_t<T> sum = 0;
    for (int64_t k = 0; k < p.k; ++k) {
      sum += convert<acc_t<T>>(a[k * p.a.col]) * convert<acc_t<T>>(b[k * p.b.row]);
    }
    if (bias) sum += convert<acc_t<T>>(bias[column]);
    if (p.relu && sum < acc_t<T>(0)) sum = 0;
    static_cast<T*>(p.c)[i] = convert<T>(sum);
  }
}

inline void launch_naive_matmul(Stream stream, const MatmulArgs& args) {
  constexpr int kThreads = 256;
  const int blocks = grid_stride_blocks(args.batch * args.m * args.n, kThreads);
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    naive_matmul_kernel<T><<<blocks, kThreads, 0, as_cuda(stream)>>>(args);
  });
  check_launch("matmul 01_naive");
}

}  // namespace braze::cuda
