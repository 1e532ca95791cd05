// Rung 12: pairs of blocks. Two tiles one above the other need the same columns of B: as a cluster
// each of their blocks brings half of these and the copy engine writes it into both (multicast), so
// that a stage costs L2 a third less.
#pragma once

#include "cuda/matmul/hopper/launch.cuh"

namespace braze::cuda::hopper {

template <typename T, int kRowMajor, int kColumnMajor>
void launch_cluster(Stream stream, const MatmulArgs& p) {
  launch<Tile<T, 128, 256, 4, 2>, kRowMajor, kColumnMajor, false>(stream, p, false);
}

}  // namespace braze::cuda::hopper
