// A barrier for all blocks of a kernel (sm_60), which have to run at the same time: launched in one
// piece, by launch_cooperative().
#pragma once

#include <cooperative_groups.h>

#include "launch.cuh"

namespace braze::cuda {

// Every thread of the grid calls it; what they wrote before is visible to all after it.
__device__ __forceinline__ void grid_sync() { cooperative_groups::this_grid().sync(); }

template <typename... Params, typename... Args>
void launch_cooperative(void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes,
                        cudaStream_t stream, Args&&... args) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

}  // namespace braze::cuda
