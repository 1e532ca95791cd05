// Rung 8: two tiles of A and two of B: one is multiplied while the next is on its way; fp32.
//
// So far a block loads, waits, multiplies, waits; only the other block of its multiprocessor fills
// the gaps. cp.async copies from global to shared memory without a register in between, and nobody
// waits before the data is needed: 512 multiply-adds a thread later, about 2000 cycles with two
// blocks, where memory answers in less than 1000. One barrier a tile remains of two. cp.async
// copies but does not transpose: an operand that is contiguous along the depth goes 4 bytes at a
// time.
//
// `simt` (common/gemm_simt.cuh) is this rung grown up: deeper tiles in three stages, tile shapes
// for small and narrow results, the depth split over blocks.
#pragma once

#include "07_warp_tile.cuh"
#include "cuda/common/cp_async.cuh"

namespace braze::cuda::ladder {

template <int kWidth>
__device__ __forceinline__ void copy_tile(
    SharedTile& tile, const TileShare<kThreads, kTile, kDepth, kWidth, float>& share, int k0) {
  share.for_each(k0, [&](int o, int k, const float* from, int count) {
    cp_async<4 * kWidth>(&tile[k][o], from, count > 0);
  });
}

// kWidthA, kWidthB: elements that are copied at once.
template <int kWidthA, int kWidthB>
__global__ void __launch_bounds__(kThreads, 2)
    double_buffered_kernel(const __grid_constant__ Problem<float> p) {
  __shared__ __align__(16) SharedTile as[2], bs[2];
  const BlockTile block = block_tile<kTile, kTile>(p);
  constexpr int kRowStep = WarpTile::kRowStep, kColumnStep = WarpTile::kColumnStep;
  const WarpTile mine;
  const TileShare<kThreads, kTile, kDepth, kWidthA, float> share_a(p.a, block.batch, block.m0);
  const TileShare<kThreads, kTile, kDepth, kWidthB, float> share_b(p.b, block.batch, block.n0);

  float sum[8][8] = {};
  pipeline<2>((p.k + kDepth - 1) / kDepth,
              [&](int buffer, int tile) {
                copy_tile(as[buffer], share_a, tile * kDepth);
                copy_tile(bs[buffer], share_b, tile * kDepth);
              },
              [&](int buffer) {
                multiply_tile<kRowStep, kColumnStep>(as[buffer], bs[buffer], mine.row, mine.column,
                                                     sum);
              },
              [](int) { __syncthreads(); });
  store_pieces<kRowStep, kColumnStep>(p, block, mine.row, mine.column, sum);
}

void run_double_buffered(Stream stream, const MatmulArgs& args) {
  const Problem<float> p = matmul_problem<float>(args);
  const bool a = p.a.vectors && !depth_major_a(args), b = p.b.vectors && !depth_major_b(args);
  const auto kernel = a ? (b ? double_buffered_kernel<4, 4> : double_buffered_kernel<4, 1>)
                        : (b ? double_buffered_kernel<1, 4> : double_buffered_kernel<1, 1>);
  launch_tiles<kTile, kTile, float>("matmul 08_double_buffered", stream, args, kThreads, kernel);
}

}  // namespace braze::cuda::ladder
