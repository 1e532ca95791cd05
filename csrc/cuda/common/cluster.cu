// How many clusters a device has room for.
#include "cluster.cuh"

#include <map>
#include <mutex>

namespace braze::cuda {
namespace {

// A block of it has all of a multiprocessor's shared memory.
__global__ void filling_kernel() {}

int clusters_of_whole_multiprocessors(int cluster) {
  const int bytes = most_shared_memory();
  cudaFuncSetAttribute(filling_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, filling_kernel, &config) != cudaSuccess) {
    cudaGetLastError();  // of a device without clusters: forgotten
    return 0;
  }
  return count;
}

}  // namespace

int clusters_at_once(int cluster, int of_sm) {
  static std::mutex mutex;
  static std::map<std::pair<int, int>, int> known;  // by device and cluster
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [at, is_new] = known.try_emplace({device, cluster}, 0);
  if (is_new) at->second = clusters_of_whole_multiprocessors(cluster);
  return std::max(1, at->second * of_sm * sm_count() / std::max(multiprocessors, 1));
}

}  // namespace braze::cuda
