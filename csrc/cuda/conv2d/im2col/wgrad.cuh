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
    tap = box / windows.blocks;
    first -= tap * windows.blocks * kWidth;
    // Behind the last tap zeros are to be read: from behind the last channel.
    if (box >= a.boxes) tap = 0, first = windows.blocks * kWidth;
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
    const int first = kImageRows ? row_ : column_ + rank * Tile::kColumnBox;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      boxes_[i] =
          im2col::channel_box<T>(a, p.batch, first + i / kAtOnce * kApart + i % kAtOnce * kWidth);
    }
  }

  __device__ __forceinline__ void copy(int d, uint64_t* full, uint32_t to) {
    const int pixel = d * Tile::kDepth;
    const im2col::Corner from = im2col::corner_of(windows_, pixel);
    if constexpr (kImageRows) {
      load_boxes<1>(row_map_, full, to, 0, from);
    } else {
      load<T, 1, Tile::kRows, 1>(row_map_, full, to, row_, pixel, 0);
    }
    for_column_boxes<Tile>(rank_, to, [&](int i, uint32_t box) {
      if constexpr (kImageRows) {
        load<T, 0, Tile::kColumnBox, Tile::kCluster>(column_map_, full, box, column_ + i, pixel, 0);
      } else {
        const int place = (i - rank_ * Tile::kColumnBox) / kApart;
        load_boxes<Tile::kCluster>(column_map_, full, box, place * kAtOnce, from);
      }
    });
  }

 private:
  using T = typename Tile::T;
  static constexpr bool kImageRows = kColumnMajor == 0;
  static constexpr int kWidth = kSwizzle / int{sizeof(T)};
  // Of the image a block loads so many boxes at a time, and the next ones so much further on.
  static constexpr int kAtOnce = (kImageRows ? Tile::kRows : int{Tile::kColumnBox}) / kWidth;
  static constexpr int kApart = kImageRows ? Tile::kRows : Tile::kCluster * Tile::kColumnBox;
  static constexpr int kBoxes =
      kImageRows ? kAtOnce : (Tile::kLoadedColumns + kApart - 1) / kApart * kAtOnce;

  template <int kCopies>
  __device__ __forceinline__ void load_boxes(const CUtensorMap* map, uint64_t* full, uint32_t to,
                                             int first, const im2col::Corner& from) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t address = to + i * Tile::kDepth * kSwizzle;
      im2col::load_pixels<kCopies>(map, full, address, boxes_[first + i], from);
    }
  }

  const CUtensorMap *row_map_, *column_map_;
  const im2col::Windows& windows_;
  int row_, column_, rank_;
  im2col::ChannelBox boxes_[kBoxes];
};

}  // namespace braze::cuda::hopper
