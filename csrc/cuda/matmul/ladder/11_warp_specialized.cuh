// Rung 11: a producer warp and two consumer warpgroups. Copies no longer wait for products: one
// thread keeps a ring of four stages full, 128 x 256 results belong to a block, and barriers in
// shared memory are all that the two sides share. The kernel is that of rung 13 with less asked of
// it: every tile has a block of its own, which ends with it.
#pragma once

#include "cuda/matmul/hopper/launch.cuh"

namespace braze::cuda::hopper {

template <typename T, int kRowMajor, int kColumnMajor>
void launch_warp_specialized(Stream stream, const MatmulArgs& p) {
  launch<Tile<T, 128, 256, 4, 1>, kRowMajor, kColumnMajor, false>(stream, p, false);
}

}  // namespace braze::cuda::hopper
