// fp32 at fp32's accuracy by the parts of matmul/ladder/17_scaled_fp16.cuh: windows of images in
// two planes, which are that many times as many images. What a tensor is scaled by is its own
// largest magnitude: pixels are in the sums of many results, with other channels each. An image
// with an infinity or NaN sends the tiles that it has windows in to CUDA cores; so do weights, by
// blocks of 128 of the result's channels. The weight gradient goes by blocks of 128 channels on
// either side.
#pragma once

#include "copies.cuh"
#include "cuda/matmul/ladder/17_scaled_fp16.cuh"
#include "wgrad.cuh"

namespace braze::cuda::im2col {

// Tensors before they were split, dense, channels last.
struct PlainTensors {
  const float *image, *other;  // the latter: weights, or the gradients of the result
  int images, height, width, channels;
  int64_t filter, channel, tap;  // strides of the weights; the first is of the result's channels
};

struct SplitWindowArgs : WithWindows<hopper::SplitArgs> {
  PlainTensors plain;
};
struct SplitPhaseArgs : WithPhases<hopper::SplitArgs> {
  PlainTensors plain;
};
struct SplitWgradArgs : WithWindows<hopper::SplitArgs> {
  PlainTensors plain;
};

// The pixel that a tap of a window meets, or nullptr outside.
__device__ __forceinline__ const float* plain_pixel(const PlainTensors& t, const Corner& corner,
                                                    int right, int down) {
  const int h = corner.h + down, w = corner.w + right;
  if (h < 0 || w < 0 || h >= t.height || w >= t.width) return nullptr;
  return t.image + ((int64_t{corner.n} * t.height + h) * t.width + w) * t.channels;
}

// One element of the result on CUDA cores, over stages [first, last).
template <typename A>
__device__ __noinline__ float plain_window_sum(const A& a, int batch, int row, int column,
                                               int first, int last) {
  if (row >= a.rows || column >= a.columns) return 0;
  const Corner corner = corner_of(a.windows, row);
  Taps taps = taps_of(a, batch);
  taps.skip_to(first);
  float sum = 0;
  for (int d = first; d < last; ++d, taps.next()) {
    const float* const x = plain_pixel(a.plain, corner, taps.right(), taps.down());
    if (!x) continue;
    const float* const w = a.plain.other + column * a.plain.filter + taps.weights() * a.plain.tap;
    const int begin = taps.block() * hopper::kSplitDepth;
    for (int c = begin; c < min(begin + hopper::kSplitDepth, a.plain.channels); ++c) {
      sum += x[c] * w[c * a.plain.channel];
    }
  }
  return sum;
}
__device__ __forceinline__ float plain_sum(const SplitWindowArgs& a, int batch, int row, int column,
                                           int first, int last) {
  return plain_window_sum(a, batch, row, column, first, last);
}
__device__ __forceinline__ float plain_sum(const SplitPhaseArgs& a, int batch, int row, int column,
                                           int first, int last) {
  return plain_window_sum(a, batch, row, column, first, last);
}
static __device__ __noinline__ float plain_sum(const SplitWgradArgs& a, int tap, int row,
                                               int column, int first, int last) {
  if (row >= a.rows || column >= a.columns) return 0;
  int right;
  const int down = a.windows.taps_w.div(tap, right) * a.windows.step_h;
  right *= a.windows.step_w;
  float sum = 0;
  for (int i = first * hopper::kSplitDepth; i < min(last * hopper::kSplitDepth, a.depth); ++i) {
    const float* const x = plain_pixel(a.plain, corner_of(a.windows, i), right, down);
    if (x) sum += a.plain.other[int64_t{i} * a.rows + row] * x[column];
  }
  return sum;
}

// Whether the tile's images, or its columns' weights, have infinities or NaN.
template <typename Tile, typename A>
__device__ __forceinline__ bool is_special_window(const A& a, const hopper::Place& p) {
  const int first = p.row * Tile::kCluster * Tile::kRows;
  const int last = min(first + Tile::kCluster * Tile::kRows, a.rows) - 1;
  bool special = a.column.special[p.column * Tile::kColumns / 128] != 0;
  for (int n = corner_of(a.windows, first).n; n <= corner_of(a.windows, last).n; ++n) {
    special |= a.row.special[n] != 0;
  }
  return special;
}
template <typename Tile>
__device__ __forceinline__ bool is_special(const SplitWindowArgs& a, const hopper::Place& p) {
  return is_special_window<Tile>(a, p);
}
template <typename Tile>
__device__ __forceinline__ bool is_special(const SplitPhaseArgs& a, const hopper::Place& p) {
  return is_special_window<Tile>(a, p);
}

// Rows are pixels of the result, columns its channels; taps are the batch of the weights.
template <typename A, typename Tile, int kColumnMajor>
class WindowPartCopies {
 public:
  __device__ __forceinline__ WindowPartCopies(const CUtensorMap* row_map,
                                              const CUtensorMap* column_map, const A& a,
                                              const hopper::Place& p, int rank)
      : row_map_(row_map),
        column_map_(column_map),
        corner_(corner_of(a.windows, (p.row * Tile::kCluster + rank) * Tile::kRows)),
        taps_(taps_of(a, p.batch)),
        column_(p.column * Tile::kColumns + rank * Tile::kShare),
        images_(a.plain.images) {
    if (p.first > 0) taps_.skip_to(p.first);
  }

  __device__ __forceinline__ void copy(int, uint64_t* full, uint32_t rows, uint32_t columns) {
    const int channel = taps_.block() * Tile::kDepth, weights = taps_.weights();
#pragma unroll
    for (int plane = 0; plane < Tile::kPlanes; ++plane) {
      tma_load_im2col(row_map_, full, rows + plane * Tile::kRowPlane, channel, corner_.w, corner_.h,
                      corner_.n + plane * images_, taps_.right(), taps_.down());
      hopper::load<typename Tile::T, kColumnMajor, Tile::kShare, Tile::kCluster>(
          column_map_, full, columns + plane * Tile::kColumnPlane, column_, channel, weights,
          plane);
    }
    taps_.next();
  }

 private:
  const CUtensorMap *row_map_, *column_map_;
  Corner corner_;
  Taps taps_;
  int column_, images_;
};

}  // namespace braze::cuda::im2col

namespace braze::cuda::hopper {

template <typename Tile, int kColumnMajor>
class PartCopies<im2col::SplitWindowArgs, Tile, 0, kColumnMajor>
    : public im2col::WindowPartCopies<im2col::SplitWindowArgs, Tile, kColumnMajor> {
  using im2col::WindowPartCopies<im2col::SplitWindowArgs, Tile, kColumnMajor>::WindowPartCopies;
};
template <typename Tile, int kColumnMajor>
class PartCopies<im2col::SplitPhaseArgs, Tile, 0, kColumnMajor>
    : public im2col::WindowPartCopies<im2col::SplitPhaseArgs, Tile, kColumnMajor> {
  using im2col::WindowPartCopies<im2col::SplitPhaseArgs, Tile, kColumnMajor>::WindowPartCopies;
};

// Of the weight gradient: rows are filters, columns channels, taps the batch, pixels the depth.
template <typename Tile>
class PartCopies<im2col::SplitWgradArgs, Tile, 1, 1> {
 public:
  __device__ __forceinline__ PartCopies(const CUtensorMap* row_map, const CUtensorMap* column_map,
                                        const im2col::SplitWgradArgs& a, const Place& p, int rank)
      : row_map_(row_map),
        column_map_(column_map),
        windows_(a.windows),
        row_((p.row * Tile::kCluster + rank) * Tile::kRows),
        column_(p.column * Tile::kColumns + rank * Tile::kShare),
        images_(a.plain.images) {
    int tap_w;
    const int tap_h = a.windows.taps_w.div(p.batch, tap_w);
    right_ = static_cast<uint16_t>(tap_w * a.windows.step_w);
    down_ = static_cast<uint16_t>(tap_h * a.windows.step_h);
  }

  __device__ __forceinline__ void copy(int d, uint64_t* full, uint32_t rows, uint32_t columns) {
    const int pixel = d * Tile::kDepth;
    im2col::Corner from = im2col::corner_of(windows_, pixel);
#pragma unroll
    for (int plane = 0; plane < Tile::kPlanes; ++plane, from.n += images_) {
      load<typename Tile::T, 1, Tile::kRows, 1>(row_map_, full, rows + plane * Tile::kRowPlane,
                                                row_, pixel, 0, plane);
      constexpr int kWidth = kSwizzle / int{sizeof(typename Tile::T)};
#pragma unroll
      for (int i = 0; i < Tile::kShare; i += kWidth) {
        const uint32_t to = columns + plane * Tile::kColumnPlane + i * kSwizzle;
        im2col::load_pixels<Tile::kCluster>(column_map_, full, to, {column_ + i, right_, down_},
                                            from);
      }
    }
  }

 private:
  const CUtensorMap *row_map_, *column_map_;
  const im2col::Windows& windows_;
  int row_, column_, images_;
  uint16_t right_, down_;
};

}  // namespace braze::cuda::hopper
