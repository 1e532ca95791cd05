// Launches inside a CUDA graph: which may be early, and what they may read before they wait.
// Branches concurrent with the main stream are in graph.cu (launchers/graph.h).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <utility>
#include <vector>

#include "launchers/common/multiprocessors.h"
#include "launchers/common/types.h"

namespace braze::cuda {

inline cudaStream_t as_cuda(Stream stream) { return static_cast<cudaStream_t>(stream); }

#ifdef __CUDACC__
// Asked for the architecture it was compiled for; never launched. Each file has its own.
static __global__ void architecture_probe() {}

// Whether the device runs code compiled for sm_90 or later: not that for sm_80, which the driver
// may have compiled for it, and which has neither clusters nor wait_for_earlier_kernels().
static inline bool runs_sm90_code() {
  static std::atomic<uint64_t> asked{0}, yes{0};
  int device = 0;
  cudaGetDevice(&device);
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (!(asked.load(std::memory_order_acquire) & bit)) {
    cudaFuncAttributes attributes{};
    const cudaError_t error = cudaFuncGetAttributes(&attributes, architecture_probe);
    if (error != cudaSuccess) cudaGetLastError();  // no code for the device: any launch reports it
    if (error == cudaSuccess && attributes.ptxVersion >= 90) yes.fetch_or(bit);
    asked.fetch_or(bit, std::memory_order_release);
  }
  return yes.load(std::memory_order_relaxed) & bit;
}

// What a stream's next launch waits for.
struct Capture {
  bool active = false;
  unsigned long long id = 0;       // of the capture, of all that there ever are
  size_t count = 0;                // of the graph's nodes that it waits for
  cudaGraphNode_t last = nullptr;  // the first of them
  cudaGraph_t graph = nullptr;     // as far as it has been recorded
};

inline Capture capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  Capture result;
#if CUDART_VERSION >= 13000
  const auto info = cudaStreamGetCaptureInfo;
#else
  const auto info = cudaStreamGetCaptureInfo_v3;
#endif
  if (info(stream, &status, &result.id, &result.graph, &nodes, &edges, &result.count) !=
      cudaSuccess) {
    cudaGetLastError();  // the launch will say what is wrong
    return {};
  }
  result.active = status == cudaStreamCaptureStatusActive;
  if (result.count > 0) result.last = nodes[0];
  return result;
}

// Whether the next launch on a stream may be early: inside a capture, unless it waits for several
// nodes, the one before it and those that end the branches it has joined; it would wait for one of
// them only. Nor where what runs beside it has use for the multiprocessors that it would wait on.
inline bool may_start_early(cudaStream_t stream) {
  if (are_multiprocessors_shared()) return false;
  const Capture capture = capture_of(stream);
  return capture.active && capture.count <= 1;
}

// Memory that a kernel reads or writes.
struct Span {
  const void* begin;
  int64_t bytes;
};

// The kernel that this thread launched last into a graph among those that call
// order_earlier_kernels(), and what it writes.
struct OrderingKernel {
  unsigned long long capture = 0;
  cudaGraphNode_t node = nullptr;
  std::vector<Span> written;
};
inline thread_local OrderingKernel ordering_kernel;

// To be called behind its launch.
inline void note_ordering_kernel(Stream stream, std::initializer_list<Span> written) {
  const Capture capture = capture_of(as_cuda(stream));
  ordering_kernel = {};
  if (capture.active && capture.count == 1) {
    ordering_kernel = {capture.id, capture.last, written};
  }
}

// Whether the next kernel on the stream may read that memory before it waits for earlier kernels:
// where it comes right behind an ordering one, which does not write it. All others are done.
inline bool may_read_early(Stream stream, const Span& span) {
  const Capture capture = capture_of(as_cuda(stream));
  if (!capture.active || capture.count != 1 || capture.id != ordering_kernel.capture ||
      capture.last != ordering_kernel.node) {
    return false;
  }
  const auto* const begin = static_cast<const char*>(span.begin);
  return std::none_of(ordering_kernel.written.begin(), ordering_kernel.written.end(),
                      [&](const Span& s) {
                        const auto* const other = static_cast<const char*>(s.begin);
                        return other < begin + span.bytes && begin < other + s.bytes;
                      });
}

// Launches a kernel that begins with wait_for_earlier_kernels(): in code for sm_90 and later it may
// start, inside a CUDA graph, while the kernel before it still runs (programmatic dependent
// launch), which hides most of a launch's latency. Call check_launch() after it. cluster: blocks
// with neighbouring numbers that form a cluster; 1: none.
template <typename... Params, typename... Args>
void launch_early_in_clusters(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                              Stream stream, int cluster, Args&&... args) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (runs_sm90_code() && may_start_early(as_cuda(stream))) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = cluster;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = as_cuda(stream);
  config.attrs = attributes;
  config.numAttrs = count;
  cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

template <typename... Params, typename... Args>
void launch_early(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                  Stream stream, Args&&... args) {
  launch_early_in_clusters(kernel, grid, block, shared_bytes, stream, 1,
                           std::forward<Args>(args)...);
}

// A kernel launched by launch_early() calls it before it touches global memory: waits until all
// earlier kernels are done and their writes visible. The next kernel may be scheduled from here on,
// as far as there is room; it waits in the same way. What such a kernel reads must not come through
// a const __restrict__ parameter: loads of what never changes may be moved before the wait.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same, but the next kernel is not scheduled before all earlier ones are done (see
// may_read_early).
__device__ __forceinline__ void order_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

}  // namespace braze::cuda
