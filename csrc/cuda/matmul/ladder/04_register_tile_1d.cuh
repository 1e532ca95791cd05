// Rung 4: a thread computes 8 elements of a column of C, with their sums in registers.
//
// An element of B read from shared memory serves 8 multiply-adds from a register: 9 loads for 8 of
// them instead of 16. With one load to four multiply-adds a cycle that allows 22 % of the peak. The
// tile of C grows to 64 x 64 for the same registers a block, which halves the traffic from L2 too.
#pragma once

#include "rung.cuh"

namespace braze::cuda::ladder {

struct Tile1d {
  static constexpr int kTile = 64, kDepth = 8, kRows = 8;  // kRows of C in a thread
  static constexpr int kThreads = kTile * kTile / kRows;
};

template <typename T>
__global__ void __launch_bounds__(Tile1d::kThreads)
    register_tile_1d_kernel(const __grid_constant__ Problem<T> p) {
  using Acc = acc_t<T>;
  constexpr int kTile = Tile1d::kTile, kDepth = Tile1d::kDepth, kRows = Tile1d::kRows;
  constexpr int kThreads = Tile1d::kThreads;
  // 4 more than a row of B has: 8 deep x 4 wide, as a warp writes a transposed B, is 32 banks.
  __shared__ Acc as[kTile][kDepth + 1], bs[kDepth][kTile + 4];
  const BlockTile block = block_tile<kTile, kTile>(p);
  // Every 8th row from here on.
  constexpr int kRowStep = kTile / kRows;
  const int row = threadIdx.x / kTile, column = threadIdx.x % kTile;
  using Share = TileShare<kThreads, kTile, kDepth, 1, T>;
  const Share share_a(p.a, block.batch, block.m0), share_b(p.b, block.batch, block.n0);

  Acc sum[kRows] = {};
  for (int k0 = 0; k0 < p.k; k0 += kDepth) {
    share_a.load(k0, [&](int m, int k, Vec<T, 1> v) { as[m][k] = convert<Acc>(v.v[0]); });
    share_b.load(k0, [&](int n, int k, Vec<T, 1> v) { bs[k][n] = convert<Acc>(v.v[0]); });
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      const Acc b = bs[k][column];
#pragma unroll
      for (int i = 0; i < kRows; ++i) sum[i] += as[row + i * kRowStep][k] * b;
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    store_element(p, block.batch, block.m0 + row + i * kRowStep, block.n0 + column, sum[i]);
  }
}

void run_register_tile_1d(Stream stream, const MatmulArgs& args) {
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_tiles<Tile1d::kTile, Tile1d::kTile, T>("matmul 04_register_tile_1d", stream, args,
                                                  Tile1d::kThreads, register_tile_1d_kernel<T>);
  });
}

}  // namespace braze::cuda::ladder
