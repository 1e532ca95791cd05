// Thread block clusters (sm_90): blocks that run at the same time and read each other's shared
// memory, so that parts of a sum meet without a workspace and a second launch.
#pragma once

#include "launch.cuh"

namespace braze::cuda {

constexpr int kMaxCluster = 8;  // what every device with clusters takes

// Every thread of the cluster arrives; what they wrote before is visible to all after it.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#endif
}

// The same where nobody has written anything that others read: saves waiting for memory accesses.
__device__ __forceinline__ void cluster_meet() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#endif
}

// The address that block `rank` of the cluster has `shared` at.
template <typename T>
__device__ __forceinline__ const T* in_cluster(const T* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<uint64_t>(shared)), "r"(rank));
  return reinterpret_cast<const T*>(address);
#else
  return shared;
#endif
}

// Clusters of so many blocks that run at the same time where a multiprocessor has `of_sm` of their
// blocks, and at least one. A cluster is on neighbours, a graphics processing cluster's, of which
// there are not equally many: an H200 of 132 multiprocessors has room for 15 clusters of eight, and
// a sixteenth waited for all others.
int clusters_at_once(int cluster, int of_sm);

// launch_early() in clusters of `cluster` blocks with neighbouring numbers; `blocks` is a multiple
// of it.
template <typename... Params, typename... Args>
void launch_clusters(const char* name, Stream stream, void (*kernel)(Params...), unsigned blocks,
                     dim3 threads, int shared_bytes, int cluster, Args... args) {
  launch_early_in_clusters(kernel, blocks, threads, shared_bytes, stream, cluster, Params(args)...);
  check_launch(name);
}

}  // namespace braze::cuda
