// What the kernels are given.
#pragma once

#include "cuda/common/fast_div.cuh"
#include "cuda/conv2d/args.h"

namespace braze::cuda::grouped {

constexpr int kMaxClasses = 4;
constexpr int kZeroBytes = 32;  // of zeros, at the beginning of shared memory

// A tensor, channels last, of which a block has a tile in shared memory: of some images, the same
// rectangle; of each of its pixels, the slab of channels of the block's groups. Columns that a
// stride keeps apart lie apart there too: those that a filter's tap meets are neighbours.
struct Source {
  const void* data;
  int64_t n, h, w;  // strides
  int height, width, channels;
  int images, rows, columns;  // of a tile
  int step, phase_columns;    // the stride, and the columns of each of its remainders
  // A pixel's slab: runs of channels, each padded to run_pitch bytes.
  int slab, run, run_pitch, runs, pitch;  // pitch: bytes from a pixel to the next
  int copy, lanes;  // bytes of each copy; pixels that a block copies side by side
  FastDiv by_copies, by_run_copies, by_columns, by_rows, by_step;

  __host__ __device__ int pixels() const { return images * rows * step * phase_columns; }
  __host__ __device__ int bytes() const { return pixels() * pitch; }
};

// How the batch's cells are cut into tiles. A cell is a pixel of the result, or of an input
// gradient the pixels that the same pixel of y begins with.
struct Cells {
  int batch, rows, columns;                     // cells there are
  int images, tile_rows, tile_columns, pixels;  // of a tile: pixels = images * rows * columns
  int tiles;
  int step_h, step_w, first_h, first_w;  // where a cell's taps begin in the source
  FastDiv tiles_of_images, tiles_across, by_tile_columns, by_tile_rows;
};

// Pixels of the result that have the same taps: all, but for the input gradient of a strided
// convolution, where those taps of a filter count that the stride brings there.
struct Class {
  int first_step, steps;    // of all classes' sums
  int row, column;          // the filter's first tap
  int rows, columns;        // how many there are
  int out_row, out_column;  // of the result, for the first cell
};

// A tap and a few channels of a group: an entry of the table of the sums' terms.
struct Granule {
  int patch;    // bytes from a cell's first tap; -1: there is none, it is padding
  int weight;   // elements from a filter's first tap
  int channel;  // of its group
  int unused;
};

// fprop, and dgrad, which is called a product of dy with the filters. "Results": the channels of
// the tensor that is computed.
struct ProductArgs {
  Source source;
  Cells cells;
  const void *weights, *bias;
  void* out;
  int groups, slab_groups, parts;  // a block has slab_groups groups, or one of a group's parts
  int channels, results;           // of a group
  int part_results;                // of a group, that a block has
  int passes;                      // for these, of kColumns * 8 each
  int granules, steps;             // of a tap; of all classes' sums
  int group_pitch;                 // bytes from a group to the next, in a pixel of the source
  int tap_row, tap_column, tap_row_step, tap_column_step;  // where taps lie in the source's tile
  int w_row_step, w_column_step;                           // and in the filter
  int w_group, w_result, w_channel, w_row, w_column;       // strides of the filters
  Class classes[kMaxClasses];
  int class_count, chunks, items;
  FastDiv by_chunks, by_products, by_passes, by_steps, by_column_tiles;

  int64_t out_n, out_h, out_w;
  int out_height, out_width, out_channels, out_step_h, out_step_w;
  int out_slab, out_copy, out_lanes, out_pitch;  // as those of a Source
  FastDiv by_out_copies, by_pixels;
  bool pairs;         // results are written in twos
  bool weight_pairs;  // weights are read in twos
  bool padded;        // runs have padding, which has to be zeros
  bool relu;          // of results, NaN stays NaN

  int buffers;  // of the source's tile: 2, or 1 that is filled while results are stored
  int granules_at, pixels_at, weights_at, out_at, tiles_at;  // in shared memory, bytes
};

// wgrad. A unit is a group, or several narrow ones: its filters are the rows of the product, its
// channels at each tap the columns, of which those count that meet filters of their group.
struct WgradArgs {
  Source x, dy;
  Cells cells;
  float* out;              // a part of the filters' gradient for each block
  int64_t out_size;        // elements of the gradient
  int units, unit_groups;  // in all; groups of a unit
  int slab_units, parts;   // a block has slab_units units, or one of a unit's parts
  int channels, filters;   // of a group
  int all_channels, all_filters;
  int column_tiles;  // eights of columns of a unit: taps and eights of channels
  int taps_w, taps;
  int tap_row_step, tap_column_step;
  int w_filter, w_channel, w_row, w_column;
  int warps_across, pixel_parts;  // warps that share out the sums, and those that share out pixels
  int tiles_down, tiles_of_unit;  // warps' tiles of a unit
  FastDiv by_taps, by_taps_w, by_tiles_of_unit, by_tiles_down, by_channels, by_filters;
  int x_unit_pitch, dy_unit_pitch;  // bytes from a unit to the next, in a pixel
  int dy_bytes;                     // of a tile of dy, with pixels that fill up a step
  int pixels_at, x_at, dy_at;       // in shared memory, bytes
};

}  // namespace braze::cuda::grouped
