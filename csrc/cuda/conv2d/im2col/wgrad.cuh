// The weight gradient by stream-K (matmul/ladder/16_stream_k.cuh): a product of filters by
// channels, summed over the result's pixels, of which there are so many that every tile's sum is
// shared out to several blocks. The taps of the filter lie side by side in it if each has whole
// rows of shared memory, so that several fill a tile; else each tap is a product, and they are the
// batch. A stage is a run of pixels: their gradients, and the pixels of the image that the tap
// meets there, which TMA gathers. Both operands lie across the depth. In 16 bits the tensor cores
// take them so. Of TF32 they take one, through registers: the image, as rows; the gradients come
// transposed.
#pragma once

#include "cuda/common/multicast.cuh"
#include "copies.cuh"
#include "cuda/matmul/ladder/16_stream_k.cuh"

namespace braze::cuda::im2col {

struct WgradArgs : WithWindows<hopper::StreamArgs> {
  static constexpr bool kWindows = false;  // its columns are, and all of a stage is multiplied
  int boxes;  // of taps side by side, a swizzled row of channels each; 0: taps are the batch
};

// Some channels of the image, a swizzled row, as a tap meets them.
struct ChannelBox {
  int channel;
  uint16_t right, down;  // from a window's first pixel
};
// first: the product's row or column where it begins, the `tap`th product's if taps are the batch.
template <typename T>
__device__ __forceinline__ ChannelBox channel_box(const WgradArgs& a, int tap, int first) {
  constexpr int kWidth = hopper::kSwizzle / int{sizeof(T)};
  const Windows& windows = a.windows;
  if (a.boxes > 0) {
    const int box = first / kWidth;
    tap = windows.by_blocks.div(box);
    first -= tap * windows.blocks * kWidth;
    if (box >= a.boxes) tap = 0;  // outside: not loaded
  }
  int tap_w;
  const int tap_h = windows.taps_w.div(tap, tap_w);
  return {first, static_cast<uint16_t>(tap_w * windows.step_w),
          static_cast<uint16_t>(tap_h * windows.step_h)};
}

// A box of a run of pixels, by swizzled rows, to shared memory. Copied to all blocks of the cluster
// if kCopies.
template <int kCopies>
__device__ __forceinline__ void load_pixels(const CUtensorMap* map, uint64_t* full, uint32_t to,
                                            const ChannelBox& box, const Corner& from) {
  constexpr uint16_t kMask = (1 << kCopies) - 1;
  if constexpr (kCopies > 1) {
    tma_multicast_im2col(map, full, to, kMask, box.channel, from.w, from.h, from.n, box.right,
                         box.down);
  } else {
    tma_load_im2col(map, full, to, box.channel, from.w, from.h, from.n, box.right, box.down);
  }
}

}  // namespace braze::cuda::im2col

namespace braze::cuda::hopper {

// Rows are filters, columns channels.
template <typename Tile>
class Copies<im2col::WgradArgs, Tile, 1, 1> {
 public:
  __device__ __forceinline__ Copies(const CUtensorMap* row_map, const CUtensorMap* column_map,
                                    const im2col::WgradArgs& a, const Place& p, int rank)
      : row_map_(row_map),
        column_map_(column_map),
        windows_(a.windows),
        row_((p.row * Tile::kCluster + rank) * Tile::kRows),
        rank_(rank),
        inside_(a, row_, p.column * Tile::kColumns) {
    const int first = p.column * Tile::kColumns + rank * Tile::kColumnBox;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      boxes_[i] =
          im2col::channel_box<T>(a, p.batch, first + i / kAtOnce * kApart + i % kAtOnce * kWidth);
    }
  }

  __device__ __forceinline__ uint32_t bytes() const { return inside_.bytes(); }
  __device__ __forceinline__ void copy(int d, uint64_t* full, uint32_t to) {
    const int pixel = d * Tile::kDepth;
    const im2col::Corner from = im2col::corner_of(windows_, pixel);
    inside_.load_rows(row_map_, full, to, row_, pixel, 0);
    for_column_boxes<Tile>(rank_, to, [&](int first, uint32_t box) {
      const int place = (first - rank_ * Tile::kColumnBox) / kApart * kAtOnce;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first / kWidth + i >= inside_.columns) break;
        im2col::load_pixels<Tile::kCluster>(column_map_, full, box + i * BoxesInside<Tile>::kBytes,
                                            boxes_[place + i], from);
      }
    });
  }

 private:
  using T = typename Tile::T;
  static constexpr int kWidth = BoxesInside<Tile>::kWidth;
  // Of the image a block loads so many boxes at a time, and the next ones so much further on.
  static constexpr int kAtOnce = int{Tile::kColumnBox} / kWidth;
  static constexpr int kApart = Tile::kCluster * Tile::kColumnBox;
  static constexpr int kBoxes = (Tile::kLoadedColumns + kApart - 1) / kApart * kAtOnce;

  const CUtensorMap *row_map_, *column_map_;
  const im2col::Windows& windows_;
  int row_, rank_;
  BoxesInside<Tile> inside_;
  im2col::ChannelBox boxes_[kBoxes];
};

}  // namespace braze::cuda::hopper
