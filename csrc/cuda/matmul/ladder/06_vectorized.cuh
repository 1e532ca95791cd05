// Rung 6: 16 bytes per load, from global memory and from shared memory; fp32.
//
// A thread fetches one vector of A and one of B for a tile, in one instruction each instead of
// four, where alignment allows it. The tile of A is stored transposed, so that a thread's rows of a
// step lie side by side as its columns of B do: 4 loads from shared memory for 64 multiply-adds
// instead of 16, which frees issue slots, as loads and multiply-adds share them (16 of 80 become 4
// of 68).
#pragma once

#include "rung.cuh"

namespace braze::cuda::ladder {

constexpr int kTile = 128, kDepth = 8, kThreads = 256;

// A tile of an operand in shared memory, [depth][row of A or column of B]. Rows are 4 elements
// longer than needed: the eight vectors that a warp takes apart to transpose them then go to
// different banks.
using SharedTile = float[kDepth][kTile + 4];

using VectorShare = TileShare<kThreads, kTile, kDepth, 4, float>;

__device__ __forceinline__ void load_tile(SharedTile& tile, const VectorShare& share, int k0) {
  share.load(k0, [&](int o, int k, const Vec<float, 4>& v) {
    if (share.along_depth()) {
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[k + i][o] = v.v[i];
    } else {
      store_vec(&tile[k][o], v);
    }
  });
}

// The thread's 8 x 8 elements of C are 2 x 2 pieces of 4 x 4: from `row` and `column` of the tile
// on, and kRowStep rows or kColumnStep columns further.
template <int kRowStep, int kColumnStep>
__device__ __forceinline__ void multiply_tile(const SharedTile& as, const SharedTile& bs, int row,
                                              int column, float (&sum)[8][8]) {
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    Vec<float, 4> a[2], b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[i] = load_vec<4>(&as[k][row + i * kRowStep]);
      b[i] = load_vec<4>(&bs[k][column + i * kColumnStep]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[i][j] += a[i / 4].v[i % 4] * b[j / 4].v[j % 4];
    }
  }
}

template <int kRowStep, int kColumnStep>
__device__ __forceinline__ void store_pieces(const Problem<float>& p, const BlockTile& block,
                                             int row, int column, const float (&sum)[8][8]) {
#pragma unroll
  for (int j = 0; j < 8; j += 4) {
    const int n = block.n0 + column + j / 4 * kColumnStep;
    const OutputQuad<float> out(p.out, block.batch, n, p.n);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int m = block.m0 + row + i / 4 * kRowStep + i % 4;
      const float v[4] = {sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]};
      if (m < p.m) out.store(v, m);
    }
  }
}

static __global__ void __launch_bounds__(kThreads, 2)
    vectorized_kernel(const __grid_constant__ Problem<float> p) {
  __shared__ __align__(16) SharedTile as, bs;
  const BlockTile block = block_tile<kTile, kTile>(p);
  // 16 x 16 threads, side by side in each quarter of the tile.
  constexpr int kStep = kTile / 2;
  const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
  const VectorShare share_a(p.a, block.batch, block.m0), share_b(p.b, block.batch, block.n0);

  float sum[8][8] = {};
  for (int k0 = 0; k0 < p.k; k0 += kDepth) {
    load_tile(as, share_a, k0);
    load_tile(bs, share_b, k0);
    __syncthreads();
    multiply_tile<kStep, kStep>(as, bs, row, column, sum);
    __syncthreads();
  }
  store_pieces<kStep, kStep>(p, block, row, column, sum);
}

void run_vectorized(Stream stream, const MatmulArgs& args) {
  launch_tiles<kTile, kTile, float>("matmul 06_vectorized", stream, args, kThreads,
                                    vectorized_kernel);
}

}  // namespace braze::cuda::ladder
