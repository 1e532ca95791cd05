// The matrix product's pipeline (matmul/ladder/13_persistent.cuh) with windows of images for rows:
// implicit GEMM whose gather is TMA's. The depth goes through a window's taps and, within a tap,
// its channels, a swizzled row of them at a stage. A run of result pixels may go on into the next
// line and the next image; of each, TMA finds the pixel that a tap meets, and gives zeros outside.
#pragma once

#include "cuda/matmul/hopper/pipeline.cuh"
#include "windows.h"

namespace braze::cuda::im2col {

static_assert(kRowBytes == hopper::kSwizzle);

struct WindowArgs : hopper::Args {
  Windows windows;
};

}  // namespace braze::cuda::im2col

namespace braze::cuda::hopper {

// Rows are pixels of the result, columns filters; of the weights, taps are the batch.
template <typename Tile, int kColumnMajor>
class Copies<im2col::WindowArgs, Tile, 0, kColumnMajor> {
 public:
  __device__ __forceinline__ Copies(const CUtensorMap* row_map, const CUtensorMap* column_map,
                                    const im2col::WindowArgs& a, const Place& p, int rank)
      : row_map_(row_map),
        column_map_(column_map),
        corner_(im2col::corner_of(a.windows, (p.row * Tile::kCluster + rank) * Tile::kRows)),
        taps_(a.windows),
        column_(p.column * Tile::kColumns),
        rank_(rank) {}

  __device__ __forceinline__ void copy(int, uint64_t* full, uint32_t to) {
    const int channel = taps_.block() * Tile::kDepth, weights = taps_.weights();
    tma_load_im2col(row_map_, full, to, channel, corner_.w, corner_.h, corner_.n, taps_.right(),
                    taps_.down());
    for_column_boxes<Tile>(rank_, to, [&](int i, uint32_t box) {
      load<typename Tile::T, kColumnMajor, Tile::kColumnBox, Tile::kCluster>(
          column_map_, full, box, column_ + i, channel, weights);
    });
    taps_.next();
  }

 private:
  const CUtensorMap *row_map_, *column_map_;
  im2col::Corner corner_;
  im2col::Taps taps_;
  int column_, rank_;
};

}  // namespace braze::cuda::hopper
