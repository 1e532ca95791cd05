// Host-side helpers for launching: dtype dispatch, launch check, grid size.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "graph.cuh"
#include "launchers/common/multiprocessors.h"
#include "launchers/common/types.h"

namespace braze::cuda {

template <typename F>
void dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64: return f(TypeTag<double>{});
    case DType::kFloat32: return f(TypeTag<float>{});
    case DType::kBFloat16: return f(TypeTag<__nv_bfloat16>{});
    case DType::kFloat16: return f(TypeTag<__half>{});
  }
}

// Call after every launch. Reports configuration errors; execution errors surface at the next sync.
inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(kernel) + ": launch failed: " + cudaGetErrorString(error));
  }
}

// Multiprocessors of the current device that a launch may count on.
inline int sm_count() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return std::min(count, multiprocessor_limit.load(std::memory_order_relaxed));
}

// Bytes of shared memory that a block of the current device can have.
inline int most_shared_memory() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes;
}

// Of the current device: 90 for 9.0.
inline int compute_capability() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return 10 * major + minor;
}

// Whether kernels that use wgmma run here: only code made for sm_90a has them, which the binary
// does not tell from sm_90.
inline bool has_wgmma() {
#ifdef BRAZE_SM90A
  return compute_capability() == 90;
#else
  return false;
#endif
}

// Blocks for a grid-stride loop over `work` items: enough to fill the device eight times over, no
// more, so that the loop amortises the block's start.
inline int grid_stride_blocks(int64_t work, int threads) {
  return static_cast<int>(std::min<int64_t>(ceil_div(work, threads), int64_t{sm_count()} * 8));
}

}  // namespace braze::cuda
