// What both passes' kernels are given, and how a batch is cut into tiles of output pixels.
#pragma once

#include <climits>

#include "cuda/common/fast_div.cuh"
#include "cuda/conv2d/args.h"
#include "cuda/conv2d/tail.cuh"

namespace braze::cuda::narrow {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kWarpPixels = 64;  // of a tile of fprop, for each warp
constexpr int kTilePixels = kWarps * kWarpPixels;
constexpr int kPlanePart = 4;  // words of a plane that a thread of wgrad makes

// Elements of `size` bytes in a word of shared memory.
__host__ __device__ constexpr int per_word(int size) { return 4 / size; }

struct Args {
  const void *x, *other, *bias;  // other: the filters (fprop), y's gradient (wgrad)
  void* out;                     // y, or a part of the filters' gradient for each block
  Moments* moments;              // fprop: a set of each filter for each block, or nullptr
  int channels, height, width, filters, taps_h, taps_w, rows, columns;  // C H W K R S P Q
  int stride_h, stride_w, pad_h, pad_w;
  int64_t x_n, x_c, x_h, x_w, y_n, y_c, y_h, y_w, w_k, w_c, w_r, w_s;  // strides

  // A tile is tile_rows x tile_columns of an image's output pixels.
  int tile_rows, tile_columns, tiles;
  FastDiv tiles_of_image, tiles_across, by_tile_columns, by_channels;

  // The tile's patch of the input, as it is staged in shared memory: a row is an image's row of
  // (column, channel), `lead` elements early, so that words are those of global memory.
  int lead, pitch, patch_rows, patch_words;
  bool is_linear;  // a row's (column, channel) lie side by side in global memory
  bool has_words;  // and in aligned words, or elements are words
  int copies;      // 2: another one that begins an element later, for what begins at odd ones
  bool vectors;    // fprop: results are stored in vectors
  Tail tail;       // fprop: of results; its clamp is a ReLU's too

  // fprop: a filter row's terms, padded to whole words, and steps of the sum over all of them.
  int row_terms, steps;
  FastDiv by_row_terms;

  // wgrad: planes of the patch, of a row, a column's remainder by the stride and a channel, in
  // which neighbouring output pixels meet neighbouring elements.
  int plane_pitch, plane_used, plane_words;  // elements; words of a plane that are, and of all
  int warps_across, gradient_width, gradient_words;
  FastDiv by_parts, by_step, by_stride, by_steps, by_taps_w;
};

// What is decided when a pass is planned.
struct Tile {
  int rows, columns;
  int filters;       // of a block
  int taps;          // wgrad: tiles of 8 taps for each warp
  int warps_across;  // wgrad: that share out the taps; the others share out the pixels
  int shared_bytes;
  int blocks, filter_blocks, tap_blocks;  // the grid
};

}  // namespace braze::cuda::narrow
