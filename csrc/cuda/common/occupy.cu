#include "launchers/occupy.h"

#include "cuda/common/launch.cuh"

namespace braze::cuda {
namespace {

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void wait_kernel(uint64_t duration) {
  const uint64_t end = nanoseconds() + duration;
  while (nanoseconds() < end) __nanosleep(500);
}

}  // namespace

void occupy(Stream stream, int microseconds) {
  wait_kernel<<<1, 1, 0, as_cuda(stream)>>>(uint64_t{1000} * microseconds);
  check_launch("occupy");
}

}  // namespace braze::cuda
