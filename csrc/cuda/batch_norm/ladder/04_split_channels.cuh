// Rung 4: as many blocks as fill the device, several to a channel.
//
// Blocks cannot wait for each other within a launch, so there are three. The first leaves the
// moments of each part in memory, 24 bytes a block. The second, which is the shipped kernel's, has
// a warp for each channel: it merges the channel's parts, always in the same order, and needs no
// atomics. The third normalises. What it reads the first launch has read: of a tensor that fits L2
// most of it is still there.
#pragma once

#include "03_welford.cuh"

namespace braze::cuda::batch_norm_ladder {

template <typename T>
__global__ void __launch_bounds__(kPlaneThreads) part_moments_kernel(Images<T> m) {
  const Welford<double> part = moments_of_part(m);
  if (threadIdx.x == 0) {
    m.partials[int64_t{blockIdx.x} * m.splits + blockIdx.y] = {part.mean, part.squares, part.count};
  }
}

template <typename T>
__global__ void __launch_bounds__(kPlaneThreads) normalize_kernel(Images<T> m) {
  normalize_part(m);
}

// Rungs 4 and 5: `moments` is the first launch's kernel.
template <typename T>
void run_in_parts(Stream stream, Images<T> m, void (*moments)(Images<T>)) {
  m.splits = plane_splits(m.count(), m.shape.c);
  const dim3 grid(static_cast<unsigned>(m.shape.c), static_cast<unsigned>(m.splits));
  moments<<<grid, kPlaneThreads, 0, as_cuda(stream)>>>(m);
  check_launch("batch_norm");
  merge_moments(as_cuda(stream), m.shape, m.partials, m.splits, m.args);
  normalize_kernel<<<grid, kPlaneThreads, 0, as_cuda(stream)>>>(m);
}

template <typename T>
void run_split_channels(Stream stream, const Images<T>& m) {
  run_in_parts(stream, m, part_moments_kernel<T>);
}

}  // namespace braze::cuda::batch_norm_ladder
