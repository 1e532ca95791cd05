// Rung 3: a block's threads fetch a tile of A and one of B into shared memory together, and all use
// both.
//
// Every element from global memory now serves 32 multiply-adds, so that they cost 0.25 bytes each
// instead of 4 (B) and more: L2 and memory bandwidth are out of the way. What stays are two loads,
// now of shared memory, for a multiply-add: the load unit's eighth of the peak is the bound.
#pragma once

#include "rung.cuh"

namespace braze::cuda::ladder {

constexpr int kSharedTile = 32;  // of C, and the depth of a tile of A or B; a thread per element

template <typename T>
__global__ void __launch_bounds__(kSharedTile* kSharedTile)
    shared_tile_kernel(const __grid_constant__ Problem<T> p) {
  using Acc = acc_t<T>;
  constexpr int kTile = kSharedTile, kThreads = kTile * kTile;
  // Rows one element longer than the tile: a column then lies in 32 different banks, which a
  // transposed operand is written by.
  __shared__ Acc as[kTile][kTile + 1], bs[kTile][kTile + 1];
  const BlockTile block = block_tile<kTile, kTile>(p);
  const int row = threadIdx.x / kTile, column = threadIdx.x % kTile;
  using Share = TileShare<kThreads, kTile, kTile, 1, T>;
  const Share share_a(p.a, block.batch, block.m0), share_b(p.b, block.batch, block.n0);

  Acc sum = 0;
  for (int k0 = 0; k0 < p.k; k0 += kTile) {
    share_a.load(k0, [&](int m, int k, Vec<T, 1> v) { as[m][k] = convert<Acc>(v.v[0]); });
    share_b.load(k0, [&](int n, int k, Vec<T, 1> v) { bs[k][n] = convert<Acc>(v.v[0]); });
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTile; ++k) sum += as[row][k] * bs[k][column];
    __syncthreads();  // nobody overwrites a tile that another thread still reads
  }
  store_element(p, block.batch, block.m0 + row, block.n0 + column, sum);
}

void run_shared_tile(Stream stream, const MatmulArgs& args) {
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_tiles<kSharedTile, kSharedTile, T>("matmul 03_shared_tile", stream, args,
                                              kSharedTile * kSharedTile, shared_tile_kernel<T>);
  });
}

}  // namespace braze::cuda::ladder
