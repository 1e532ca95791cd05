// Rung 2: as many threads as the device holds, each of which goes on to the element a whole grid
// further.
//
// A block's start and the setup of addresses are paid once for many elements. But the loop waits
// for an element's loads before it asks for the next one's (the store between them may be to the
// same memory, as far as the compiler knows): no more bytes are in flight than on rung 1, and no
// fresh block steps in where a warp waits. Memory is what decides, so expect little.
#pragma once

#include "rung.cuh"

namespace braze::cuda::vector_add_ladder {

template <typename T>
__global__ void grid_stride_kernel(const T* a, const T* b, T* out, int64_t n) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < n; i += stride) {
    out[i] = sum(a[i], b[i]);
  }
}

template <typename T>
void run_grid_stride(Stream stream, const T* a, const T* b, T* out, int64_t n) {
  const int blocks = grid_stride_blocks(n, kThreads);
  grid_stride_kernel<<<blocks, kThreads, 0, as_cuda(stream)>>>(a, b, out, n);
}

}  // namespace braze::cuda::vector_add_ladder
