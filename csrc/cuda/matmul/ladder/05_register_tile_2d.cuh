// Rung 5: a thread computes 8 x 8 elements of C: an outer product of 8 elements of A and 8 of B for
// every step of the depth.
//
// 16 loads from shared memory for 64 multiply-adds: a multiprocessor starts either in 16 cycles a
// warp, so that for the first time loads could keep up, and other instructions begin to show. The
// tile of C is 128 x 128. The price is occupancy: 64 sums and their operands leave room for two
// blocks of 256 threads, a quarter of what a multiprocessor holds otherwise (one block in fp64); a
// thread's 64 independent multiply-adds hide latency instead.
#pragma once

#include "rung.cuh"

namespace braze::cuda::ladder {

struct Tile2d {
  static constexpr int kTile = 128, kDepth = 8, kEach = 8;  // kEach x kEach of C in a thread
  static constexpr int kSide = kTile / kEach, kThreads = kSide * kSide;
};

template <typename T>
__global__ void __launch_bounds__(Tile2d::kThreads, sizeof(T) == 8 ? 1 : 2)
    register_tile_2d_kernel(const __grid_constant__ Problem<T> p) {
  using Acc = acc_t<T>;
  constexpr int kTile = Tile2d::kTile, kDepth = Tile2d::kDepth, kEach = Tile2d::kEach;
  constexpr int kSide = Tile2d::kSide, kThreads = Tile2d::kThreads;
  __shared__ Acc as[kTile][kDepth + 1], bs[kDepth][kTile + 4];
  const BlockTile block = block_tile<kTile, kTile>(p);
  // Every 16th row and column from here on: neighbouring threads then read neighbouring banks.
  const int row = threadIdx.x / kSide, column = threadIdx.x % kSide;
  using Share = TileShare<kThreads, kTile, kDepth, 1, T>;
  const Share share_a(p.a, block.batch, block.m0), share_b(p.b, block.batch, block.n0);

  Acc sum[kEach][kEach] = {};
  for (int k0 = 0; k0 < p.k; k0 += kDepth) {
    share_a.load(k0, [&](int m, int k, Vec<T, 1> v) { as[m][k] = convert<Acc>(v.v[0]); });
    share_b.load(k0, [&](int n, int k, Vec<T, 1> v) { bs[k][n] = convert<Acc>(v.v[0]); });
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      Acc a[kEach], b[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) a[i] = as[row + i * kSide][k];
#pragma unroll
      for (int j = 0; j < kEach; ++j) b[j] = bs[k][column + j * kSide];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sum[i][j] += a[i] * b[j];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      store_element(p, block.batch, block.m0 + row + i * kSide, block.n0 + column + j * kSide,
                    sum[i][j]);
    }
  }
}

void run_register_tile_2d(Stream stream, const MatmulArgs& args) {
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_tiles<Tile2d::kTile, Tile2d::kTile, T>("matmul 05_register_tile_2d", stream, args,
                                                  Tile2d::kThreads, register_tile_2d_kernel<T>);
  });
}

}  // namespace braze::cuda::ladder
