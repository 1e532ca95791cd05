// Rung 1: one thread per element, as the formula reads.
//
// Neighbouring threads take neighbouring elements, so that a warp's loads and its store are
// coalesced already: 64 to 256 consecutive bytes each. What is left to gain is how much a thread
// asks for. It has two loads in flight, of 2 to 8 bytes, then adds and stores; for each of them
// come the instructions that find its address, and every 256 elements cost a block's start.
#pragma once

#include "rung.cuh"

namespace braze::cuda::vector_add_ladder {

template <typename T>
__global__ void naive_kernel(const T* a, const T* b, T* out, int64_t n) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < n) out[i] = sum(a[i], b[i]);
}

template <typename T>
void run_naive(Stream stream, const T* a, const T* b, T* out, int64_t n) {
  const unsigned blocks = static_cast<unsigned>(ceil_div(n, kThreads));
  naive_kernel<<<blocks, kThreads, 0, as_cuda(stream)>>>(a, b, out, n);
}

}  // namespace braze::cuda::vector_add_ladder
