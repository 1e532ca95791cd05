// The weight gradient by stream-K (matmul/ladder/16_stream_k.cuh): for each tap of the filter a
// product of filters by channels, summed over the result's pixels, of which there are so many that
// every tile's sum is shared out to several blocks. Taps are the product's batch. A stage is a run
// of pixels: their gradients, and the pixels of the image that the tap meets there, which TMA
// gathers. Both operands lie across the depth. In 16 bits the tensor cores take them so. Of TF32
// they take one, through registers: the image, as rows; the gradients come transposed.
#pragma once

#include "cuda/common/multicast.cuh"
#include "copies.cuh"
#include "cuda/matmul/ladder/16_stream_k.cuh"

namespace braze::cuda::im2col {

using WgradArgs = WithWindows<hopper::StreamArgs>;

// Channels [first, first + kCount) of a run of pixels, by swizzled rows, to shared memory. Copied
// to all blocks of the cluster if kCopies.
template <typename Tile, int kCount, int kCopies>
__device__ __forceinline__ void load_pixels(const CUtensorMap* map, uint64_t* full, uint32_t to,
                                            int first, const Corner& from, uint16_t right,
                                            uint16_t down) {
  constexpr int kWidth = hopper::kSwizzle / int{sizeof(typename Tile::T)};
  constexpr uint16_t kMask = (1 << kCopies) - 1;
#pragma unroll
  for (int i = 0; i < kCount; i += kWidth) {
    const uint32_t address = to + i / kWidth * Tile::kDepth * hopper::kSwizzle;
    if constexpr (kCopies > 1) {
      tma_multicast_im2col(map, full, address, kMask, first + i, from.w, from.h, from.n, right,
                           down);
    } else {
      tma_load_im2col(map, full, address, first + i, from.w, from.h, from.n, right, down);
    }
  }
}

}  // namespace braze::cuda::im2col

namespace braze::cuda::hopper {

// With kColumnMajor 1 rows are filters, columns channels; with 0 (TF32) the other way round.
template <typename Tile, int kColumnMajor>
class Copies<im2col::WgradArgs, Tile, 1, kColumnMajor> {
 public:
  __device__ __forceinline__ Copies(const CUtensorMap* row_map, const CUtensorMap* column_map,
                                    const im2col::WgradArgs& a, const Place& p, int rank)
      : row_map_(row_map),
        column_map_(column_map),
        windows_(a.windows),
        row_((p.row * Tile::kCluster + rank) * Tile::kRows),
        column_(p.column * Tile::kColumns),
        rank_(rank) {
    int tap_w;
    const int tap_h = a.windows.taps_w.div(p.batch, tap_w);
    right_ = static_cast<uint16_t>(tap_w * a.windows.step_w);
    down_ = static_cast<uint16_t>(tap_h * a.windows.step_h);
  }

  __device__ __forceinline__ void copy(int d, uint64_t* full, uint32_t to) {
    const int pixel = d * Tile::kDepth;
    const im2col::Corner from = im2col::corner_of(windows_, pixel);
    if constexpr (kColumnMajor == 1) {
      load<T, 1, Tile::kRows, 1>(row_map_, full, to, row_, pixel, 0);
    } else {
      im2col::load_pixels<Tile, Tile::kRows, 1>(row_map_, full, to, row_, from, right_, down_);
    }
    for_column_boxes<Tile>(rank_, to, [&](int i, uint32_t box) {
      if constexpr (kColumnMajor == 1) {
        im2col::load_pixels<Tile, Tile::kColumnBox, Tile::kCluster>(
            column_map_, full, box, column_ + i, from, right_, down_);
      } else {
        load<T, 0, Tile::kColumnBox, Tile::kCluster>(column_map_, full, box, column_ + i, pixel, 0);
      }
    });
  }

 private:
  using T = typename Tile::T;
  const CUtensorMap *row_map_, *column_map_;
  const im2col::Windows& windows_;
  int row_, column_, rank_;
  uint16_t right_, down_;
};

}  // namespace braze::cuda::hopper
