// The tiles of the kernels that make both gradients of a convolution at once (conv_gradients.cu,
// conv_gradients_tf32.cu): how images are cut, and where what lies.
#pragma once

#include "bn_pool.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/conv2d/halo/epilogue.cuh"
#include "cuda/conv2d/halo/wgrad.cuh"
#include "launchers/conv_bn_pool_backward.h"

namespace braze::cuda::halo::pooled {
namespace {

// Warpgroups: one for the weight's gradient, then those for the input's, then those that make dz.
constexpr int kInputs = 2, kMakers = 2;
constexpr int kThreads = (1 + kInputs + kMakers) * 128;
constexpr int kFilterRows = 3;
constexpr int kChannels = 32;  // of x, at most
constexpr int kDzRowBytes = kFilters * 2, kXRowBytes = kChannels * 2;
static_assert(kDzRowBytes == kDyRowBytes);

// The product of the input's gradient: 64 rows, for eight channels of x at a time those of one
// column of taps, then those of the next one; a chunk of positions as columns, of which the last
// lacks its neighbour.
constexpr int kPositions = 112, kResults = kPositions - 1;
constexpr int kWeightRowBytes = 2 * kChannels * 2;
constexpr int kWeightTile = kFilters * kWeightRowBytes;
constexpr int kWeightTiles = 2 * kFilterRows;  // columns 1 and 2 of a filter row, then column 0

// A tile: an image, or rows of one, and a halo of one row above and below. z and x lie alike, rows
// `pitch` positions apart, the first behind one position of zeros, which is also what ends the row
// before.
struct Plan {
  int channels, h, w;  // of x
  FastDiv pitch;
  FastDiv windows;  // in a row, cut-off ones included
  int tile_rows, tiles;
  FastDiv row_tiles;  // of an image
  int chunks;         // of positions: products of the input's gradient
  int steps;          // of kDepth positions: products of the weight's
  int x_offset, stage_bytes, shared_bytes;
  int64_t count;  // of a channel's elements
  bool early;     // all but the sums may be read before earlier kernels are done

  __host__ __device__ int loaded() const { return (tile_rows + 2) * pitch.divisor(); }
};

inline bool is_dense(const Tensor4dRef& t, int64_t c, int64_t h, int64_t w) {
  return t.c == 1 && t.w == c && t.h == w * c && t.n == h * w * c &&
         reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

// What the kernels ask of a problem, but for its dtype.
inline bool takes_backward(const ConvBnPoolBackward& problem) {
  const Conv2dShape& s = problem.conv;
  const auto aligned_to_16 = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return takes(s) && s.r == 3 && s.s == 3 && s.pad_h == 1 && s.pad_w == 1 && s.k == kFilters &&
         s.c <= kChannels && s.c % 8 == 0 && s.n <= INT_MAX && problem.pool.channels_last &&
         is_dense(problem.x, s.c, s.h, s.w) && is_dense(problem.w, s.c, s.r, s.s) &&
         aligned_to_16(problem.dy) && aligned_to_16(problem.z) && aligned_to_16(problem.codes);
}

inline BackwardArgs backward_args(const ConvBnPoolBackward& problem) {
  return {problem.affine,
          problem.statistics,
          problem.dweight,
          problem.dbias,
          problem.dconstant,
          problem.conv.dtype,
          true,
          true};
}

// Sets the sizes that follow from rows of a tile, x_offset among them, and returns where x ends; 0
// where such tiles cannot be.
inline int set_rows(Plan& p, int images, int rows) {
  const int pitch = p.pitch.divisor();
  p.tile_rows = rows;
  const int row_tiles = static_cast<int>(ceil_div(p.h, rows));
  if (int64_t{images} * row_tiles > 1 << 30 || rows + 2 > 256) return 0;
  p.row_tiles = FastDiv(row_tiles);
  p.tiles = images * row_tiles;
  p.chunks = static_cast<int>(ceil_div((rows - 1) * pitch + p.w, kResults));
  p.steps = static_cast<int>(ceil_div(rows * pitch, kDepth));
  // Products of the weight's gradient go on to whole steps: there dz has to be zero, which the halo
  // of rows of an image is not, and x finite.
  const int summed = p.steps * kDepth;
  if (row_tiles > 1 && (summed != rows * pitch || rows % 2 > 0)) return 0;
  p.x_offset = aligned(std::max(p.loaded(), summed + pitch + 1) * kDzRowBytes);
  const int x_rows = std::max(p.loaded(), summed + 2 * pitch + kTapColumns - 1);
  return p.x_offset + (x_rows * kXRowBytes + 127) / 128 * 128;
}

// Tiles of whole images, or of as many rows as fits(images, rows) finds room for.
template <typename Fits>
bool find_rows(const Conv2dShape& s, Plan& p, const Fits& fits) {
  constexpr int kMostPixels = 1 << 20;
  constexpr int kFewestRows = 4;  // else half of what is read is halo, which was not measured
  if (s.h > kMostPixels || s.w + 2 > 256) return false;
  p.channels = static_cast<int>(s.c), p.h = static_cast<int>(s.h), p.w = static_cast<int>(s.w);
  p.pitch = FastDiv((s.w + 8) / 8 * 8);  // of which any even number of rows makes whole steps
  p.windows = FastDiv((s.w + 1) / 2);
  const int images = static_cast<int>(s.n);
  if (fits(images, p.h)) return true;
  for (int rows = (p.h - 1) / 2 * 2; rows >= kFewestRows; rows -= 2) {
    if (fits(images, rows)) return true;
  }
  return false;
}

struct Tile {
  int image, first_row, rows;   // less the halo
  int window_row, window_rows;  // of windows that cover the halo too, cut-off ones included
  int pooled_rows;              // of those, that have a gradient
};

__device__ __forceinline__ Tile tile_at(const Plan& p, int number) {
  Tile t;
  int row_tile;
  t.image = p.row_tiles.div(number, row_tile);
  t.first_row = row_tile * p.tile_rows;
  t.rows = min(p.tile_rows, p.h - t.first_row);
  t.window_row = max(t.first_row - 1, 0) / 2;
  t.window_rows = min(t.first_row + t.rows, p.h - 1) / 2 - t.window_row + 1;
  t.pooled_rows = max(min(t.window_rows, p.h / 2 - t.window_row), 0);
  return t;
}

// The place of a tile, or of a part of one, among `places` that are taken in turn, and the parity
// of its barriers' phase. Counted: every warp would divide by the number of places for every tile.
struct Turn {
  int places, place = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void next() {
    if (++place < places) return;
    place = 0;
    phase ^= 1;
  }
};

}  // namespace
}  // namespace braze::cuda::halo::pooled
