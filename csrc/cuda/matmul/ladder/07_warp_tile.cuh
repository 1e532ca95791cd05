// Rung 7: a warp's threads compute a compact 32 x 64 piece of the tile instead of 2 x 16 pieces
// that lie across all of it; fp32.
//
// For a step of the depth a warp reads 32 elements of A and 64 of B from shared memory, not 16 and
// 128: a third less. Its 16-byte reads of B, by 8 different lanes, are one pass over all 32 banks
// instead of two.
#pragma once

#include "06_vectorized.cuh"

namespace braze::cuda::ladder {

// Where a thread's pieces of the tile begin, and how far apart they are. Warps are 4 x 2, lanes in
// a warp 4 x 8.
struct WarpTile {
  static constexpr int kRowStep = 16, kColumnStep = 32;
  int row, column;

  __device__ WarpTile() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    row = warp / 2 * (2 * kRowStep) + lane / 8 * 4;
    column = warp % 2 * (2 * kColumnStep) + lane % 8 * 4;
  }
};

static __global__ void __launch_bounds__(kThreads, 2)
    warp_tile_kernel(const __grid_constant__ Problem<float> p) {
  __shared__ __align__(16) SharedTile as, bs;
  const BlockTile block = block_tile<kTile, kTile>(p);
  constexpr int kRowStep = WarpTile::kRowStep, kColumnStep = WarpTile::kColumnStep;
  const WarpTile mine;
  const VectorShare share_a(p.a, block.batch, block.m0), share_b(p.b, block.batch, block.n0);

  float sum[8][8] = {};
  for (int k0 = 0; k0 < p.k; k0 += kDepth) {
    load_tile(as, share_a, k0);
    load_tile(bs, share_b, k0);
    __syncthreads();
    multiply_tile<kRowStep, kColumnStep>(as, bs, mine.row, mine.column, sum);
    __syncthreads();
  }
  store_pieces<kRowStep, kColumnStep>(p, block, mine.row, mine.column, sum);
}

void run_warp_tile(Stream stream, const MatmulArgs& args) {
  launch_tiles<kTile, kTile, float>("matmul 07_warp_tile", stream, args, kThreads,
                                    warp_tile_kernel);
}

}  // namespace braze::cuda::ladder
