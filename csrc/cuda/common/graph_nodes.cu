// What the nodes of a graph are given.
#include <cuda.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "launch.cuh"
#include "launchers/graph.h"
#include "tma.cuh"

namespace braze::cuda {
namespace {

// Kernels are given addresses somewhat before a tensor's, too, for example of an image with its
// padding.
constexpr uintptr_t kBefore = uintptr_t{32} << 10;

struct Range {
  uintptr_t begin, end;

  bool has(const void* address) const {
    const auto number = reinterpret_cast<uintptr_t>(address);
    return begin <= number && number < end;
  }
  // Whether an address in the range stands in these bytes. A kernel's parameter may be a packed
  // structure, or a tensor map, which begins with its tensor's address.
  bool is_in(const void* bytes, size_t size) const {
    for (size_t i = 0; i + sizeof(void*) <= size; i += 4) {
      const void* word;
      std::memcpy(&word, static_cast<const char*>(bytes) + i, sizeof word);
      if (has(word)) return true;
    }
    return false;
  }
};

struct Driver {
  decltype(&cuGraphKernelNodeGetParams) node_params =
      driver_function<decltype(&cuGraphKernelNodeGetParams)>("cuGraphKernelNodeGetParams");
  decltype(&cuFuncGetParamInfo) function_info =
      driver_function<decltype(&cuFuncGetParamInfo)>("cuFuncGetParamInfo", 12040);
  decltype(&cuKernelGetParamInfo) kernel_info =
      driver_function<decltype(&cuKernelGetParamInfo)>("cuKernelGetParamInfo", 12040);
};

bool kernel_mentions(const Driver& driver, CUgraphNode node, const Range& range) {
  CUDA_KERNEL_NODE_PARAMS params{};
  if (driver.node_params(node, &params) != CUDA_SUCCESS) return true;
  if (params.extra) {
    const void* bytes = nullptr;
    size_t size = 0;
    for (void** at = params.extra; *at != CU_LAUNCH_PARAM_END; at += 2) {
      if (*at == CU_LAUNCH_PARAM_BUFFER_POINTER) bytes = at[1];
      if (*at == CU_LAUNCH_PARAM_BUFFER_SIZE) size = *static_cast<size_t*>(at[1]);
    }
    return range.is_in(bytes, bytes ? size : 0);
  }
  if (!params.kernelParams) return false;
  for (size_t i = 0;; ++i) {
    size_t offset = 0, size = 0;
    const CUresult found = params.func ? driver.function_info(params.func, i, &offset, &size)
                                       : driver.kernel_info(params.kern, i, &offset, &size);
    if (found == CUDA_ERROR_INVALID_VALUE) return false;  // there are no more
    if (found != CUDA_SUCCESS || range.is_in(params.kernelParams[i], size)) return true;
  }
}

bool graph_mentions(const Driver& driver, cudaGraph_t graph, const Range& range);

// True where it cannot be told.
bool node_mentions(const Driver& driver, cudaGraphNode_t node, const Range& range) {
  cudaGraphNodeType type;
  if (cudaGraphNodeGetType(node, &type) != cudaSuccess) return true;
  switch (type) {
    case cudaGraphNodeTypeKernel: return kernel_mentions(driver, node, range);
    case cudaGraphNodeTypeMemcpy: {
      cudaMemcpy3DParms copy{};
      return cudaGraphMemcpyNodeGetParams(node, &copy) != cudaSuccess || copy.srcArray ||
             copy.dstArray || range.has(copy.srcPtr.ptr) || range.has(copy.dstPtr.ptr);
    }
    case cudaGraphNodeTypeMemset: {
      cudaMemsetParams set{};
      return cudaGraphMemsetNodeGetParams(node, &set) != cudaSuccess || range.has(set.dst);
    }
    case cudaGraphNodeTypeGraph: {
      cudaGraph_t child = nullptr;
      return cudaGraphChildGraphNodeGetGraph(node, &child) != cudaSuccess ||
             graph_mentions(driver, child, range);
    }
    case cudaGraphNodeTypeHost:  // the host cannot read the device's memory
    case cudaGraphNodeTypeEmpty:
    case cudaGraphNodeTypeWaitEvent:
    case cudaGraphNodeTypeEventRecord: return false;
    default: return true;
  }
}

bool graph_mentions(const Driver& driver, cudaGraph_t graph, const Range& range) {
  size_t count = 0;
  if (cudaGraphGetNodes(graph, nullptr, &count) != cudaSuccess) return true;
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0 && cudaGraphGetNodes(graph, nodes.data(), &count) != cudaSuccess) return true;
  for (const cudaGraphNode_t node : nodes) {
    if (node_mentions(driver, node, range)) return true;
  }
  return false;
}

}  // namespace

bool capture_mentions(Stream main, const void* memory, int64_t bytes) {
  const Capture capture = capture_of(as_cuda(main));
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  bool mentions = true;
  try {
    mentions = !capture.active ||
               graph_mentions(Driver(), capture.graph, {begin - kBefore, begin + bytes});
  } catch (const std::runtime_error&) {
    mentions = true;  // a driver from before CUDA 12.4 cannot look into parameters
  }
  cudaGetLastError();
  return mentions;
}

}  // namespace braze::cuda
