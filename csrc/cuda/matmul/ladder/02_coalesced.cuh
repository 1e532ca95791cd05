// Rung 2: rung 1 with rows and columns swapped: neighbouring threads take neighbouring columns.
//
// A warp reads 128 consecutive bytes of a row-major B and writes 128 of C, four sectors in one pass
// each, and its element of A is the same for all lanes: 33 sectors a step of the sum become 5, in 2
// passes of the load unit instead of 33. It is still two loads for one multiply-add, while a
// multiprocessor issues four multiply-adds for every load: an eighth of the peak at most, if all of
// it came from L1. Of B nothing does: 4 bytes for each multiply-add come from L2.
#pragma once

#include "01_naive.cuh"

namespace braze::cuda::ladder {

template <typename T>
__global__ void coalesced_kernel(const __grid_constant__ MatmulArgs p) {
  const int64_t total = p.batch * p.m * p.n;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total; i += stride) {
    compute_element<T>(p, i / p.n / p.m, i / p.n % p.m, i % p.n);
  }
}

void run_coalesced(Stream stream, const MatmulArgs& args) {
  constexpr int kThreads = 256;
  const int blocks = grid_stride_blocks(args.batch * args.m * args.n, kThreads);
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    coalesced_kernel<T><<<blocks, kThreads, 0, as_cuda(stream)>>>(args);
  });
  check_launch("matmul 02_coalesced");
}

}  // namespace braze::cuda::ladder
