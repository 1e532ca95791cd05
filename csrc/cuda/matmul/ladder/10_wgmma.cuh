// Rung 10: TMA and wgmma. One thread has the copy engine bring a slice of A and of B to shared
// memory, swizzled as the tensor cores read it; two warpgroups multiply from there, straight into
// registers. No thread computes an address or moves an operand, but copies and products take turns:
// nothing overlaps within a block.
#pragma once

#include "cuda/matmul/hopper/pipeline.cuh"

namespace braze::cuda::hopper {

template <typename T>
struct WgmmaTile : Tile<T, 128, 128, 1, 1> {
  static constexpr int kThreads = 256;
  static constexpr int kSharedBytes = 1024 + 256 * kSwizzle;
};

template <typename Tile, int kRowMajor, int kColumnMajor>
__global__ void __launch_bounds__(Tile::kThreads, 2)
    wgmma_kernel(const __grid_constant__ CUtensorMap row_map,
                 const __grid_constant__ CUtensorMap column_map, const Args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // other architectures get a kernel that nobody launches
  using T = typename Tile::T;
  extern __shared__ unsigned char shared_bytes[];
  __shared__ uint64_t full;
  // Swizzled rows are found by absolute address, whose pattern repeats every 1024 bytes.
  const uint32_t slice = (shared_address(shared_bytes) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_earlier_kernels();

  const Place p = place_of(a, blockIdx.x);
  float acc[1][Tile::kColumns / 2];
  uint32_t unused[4][4];
  for (int d = 0; d < a.depth_tiles; ++d) {
    if (threadIdx.x == 0) {
      mbarrier_expect(&full, Tile::kStageBytes);
      load<T, kRowMajor, Tile::kRows, 1>(&row_map, &full, slice, p.row * Tile::kRows,
                                         d * Tile::kDepth, a.row_batch ? p.batch : 0);
      load<T, kColumnMajor, Tile::kColumns, 1>(&column_map, &full, slice + Tile::kRowBytes,
                                               p.column * Tile::kColumns, d * Tile::kDepth,
                                               a.column_batch ? p.batch : 0);
    }
    mbarrier_wait(&full, d & 1);
    multiply_stage<Tile, kRowMajor, kColumnMajor>(acc, unused, slice, d > 0);
    wgmma_wait<0>();
    wgmma_touch(acc[0]);
    __syncthreads();  // the slice may be overwritten
  }
  const int lane = threadIdx.x % 32;
  const int row = p.row * Tile::kRows + threadIdx.x / 32 * 16 + lane / 4;
  const int column = p.column * Tile::kColumns + lane % 4 * 2;
  finish<T, false>(a, acc[0], row, column);
  store_direct<T, false>(static_cast<T*>(a.c) + p.batch * a.c_batch, a.c_ld, a.rows, a.columns,
                         acc[0], row, column);
#endif
}

}  // namespace braze::cuda::hopper
