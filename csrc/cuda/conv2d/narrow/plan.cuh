// What the plans and launches of both kernels have in common.
#pragma once

#include <cuda_runtime.h>

#include "cuda/conv2d/args.h"

namespace braze::cuda::narrow {

// Whether it is fp32 at its own accuracy.
inline bool is_split(const Conv2dArgs& args) {
  return args.shape.dtype == DType::kFloat32 && !args.shape.allow_tf32;
}

inline int bytes_of(const Conv2dArgs& args) { return static_cast<int>(size_of(args.shape.dtype)); }

inline bool is_aligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// Before a launch with that much dynamic shared memory. Never less than what every kernel may have:
// another plan of the same kernel, which has only that, would not be launched.
template <typename Kernel>
void allow_shared_memory(Kernel kernel, int bytes) {
  if (bytes > 48 << 10) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  }
}

}  // namespace braze::cuda::narrow
