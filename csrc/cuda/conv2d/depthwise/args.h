// What the depthwise kernels are launched with. Filled in by depthwise.cu.
#pragma once

#include "cuda/common/fast_div.cuh"
#include "cuda/conv2d/tail.cuh"

namespace braze::cuda::depthwise {

// What a kernel computes.
enum class Task {
  kConvolve,  // fprop; with the filters turned, also the input gradient at stride 1
  kSpread,    // the input gradient at stride 2
  kWeights,   // the weight gradient
};

// A tensor; strides in elements. Of the four, the layout's fastest one is 1.
struct Image {
  void* data;
  int64_t n, c, h, w;
  int height, width;
};

struct Args {
  Image in;          // x; dy for the input gradient
  Image dy;          // kWeights only
  Image out;         // not for kWeights
  const void* w;     // [C][R][S], dense
  const void* bias;  // may be null
  Tail tail;         // in its place, by a kernel for that
  float* partial;    // kWeights: [workers][R * S][C]
  int channels, batch;
  int first_row, first_column;  // of `in`, which the first row and column of results begin with
  int shift_row, shift_column;  // kSpread: of the first pair of results, 0 or less
  bool turned;                  // the filters, by half a turn
  // The plan. Results are counted in rows and columns of the tensor that is walked: of pairs for
  // kSpread, of dy for kWeights.
  int rows, columns;         // of results
  int tile_rows, row_tiles;  // NCHW and tiles.cuh
  int column_tiles;
  int strips;              // of a tile, side by side
  int items;               // to share: NCHW tiles, NHWC pieces of rows of tiles
  int piece;               // NHWC: rows of each piece
  int workers;             // blocks that share them, for each slab of channels
  int slabs;               // of channels
  int slab;                // channels in each: NHWC a multiple of what a vector holds
  int vector;              // NHWC: bytes of each copy to shared memory
  int pitch, dy_pitch;     // NHWC: columns of a row in shared memory; tiles.cuh: bytes of a pixel
  int steps;               // NHWC: a stage holds the rows of so many
  int groups, group_rows;  // NCHW: threads one below the other, with so many rows each;
                           // tiles.cuh: strips of a tile
  int plane_pad;           // NCHW: bytes between planes in shared memory
  int dy_pad;              // NCHW: the same, of dy or of the results
  int threads;
  int shared_bytes, stage_bytes, dy_offset;  // dy's part of a stage; NCHW: that of the results
  FastDiv by_vectors;                        // NHWC: vectors of a pixel's slab; NCHW: of a plane
  FastDiv by_dy_vectors;  // NCHW: the same, of dy or of the results; tiles.cuh: columns read
  // Channels last: what blocks divide by to find their places, a thread's units of channels among
  // it; and their shares of the items, of which the first `longer` ones have one more.
  FastDiv by_rows, by_row_tiles, by_column_tiles, by_strips, by_units;
  int share, longer;

  // Of a finished plan; each thread has so many channels.
  void set_places(int thread_channels) {
    by_rows = FastDiv(rows), by_row_tiles = FastDiv(row_tiles);
    by_column_tiles = FastDiv(column_tiles), by_strips = FastDiv(strips);
    by_units = FastDiv(slab / thread_channels);
    share = items / workers, longer = items % workers;
  }
};

// Which kernel: everything that is a template parameter.
struct Kernel {
  Task task;
  DType dtype;
  int taps;  // R = S
  int stride;
  bool channels_last;
  bool tail = false;   // kConvolve, channels last
  bool tiles = false;  // the same, by tiles.cuh
};

using Function = void (*)(Args);
Function nhwc_bf16(const Kernel& kernel);
Function nhwc_fp16(const Kernel& kernel);
Function nhwc_fp32(const Kernel& kernel);
Function tiles_bf16(const Kernel& kernel);
Function tiles_fp16(const Kernel& kernel);
Function tiles_fp32(const Kernel& kernel);
Function nchw_bf16(const Kernel& kernel);
Function nchw_fp16(const Kernel& kernel);
Function nchw_fp32(const Kernel& kernel);

// Channels per thread, channels last: a pair of 16 bits, but for filters whose weights fill the
// registers.
constexpr int channels_per_thread(int bytes, int taps) { return bytes == 2 && taps < 7 ? 2 : 1; }
// Also what limits registers to the number that lets so many threads run.
constexpr int kMostThreads = 384;
// tiles.cuh: threads of a block, at most; channels of a thread, and its results side by side.
constexpr int kTileThreads = 256, kTileChannels = 4;
constexpr int tile_columns(int stride) { return stride == 1 ? 4 : 2; }
constexpr int kStages = 3;    // NHWC
constexpr int kGranule = 16;  // bytes; NHWC: a slab lies in shared memory as columns of granules

}  // namespace braze::cuda::depthwise
