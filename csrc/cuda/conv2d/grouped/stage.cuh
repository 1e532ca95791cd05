// Tiles on their way to shared memory.
#pragma once

#include "args.cuh"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/predicated.cuh"

namespace braze::cuda::grouped {

// A tile's first image and cell.
struct Place {
  int image, row, column;
};

__device__ __forceinline__ Place place_of(const Cells& c, int tile) {
  int rest, right;
  const int images = c.tiles_of_images.div(tile, rest);
  const int down = c.tiles_across.div(rest, right);
  return {images * c.images, down * c.tile_rows, right * c.tile_columns};
}

// A tile's pixel by its number: image and cell, counted from the tile's first.
__device__ __forceinline__ Place place_in_tile(const Cells& c, int pixel) {
  Place at;
  at.image = c.by_tile_rows.div(c.by_tile_columns.div(pixel, at.column), at.row);
  return at;
}

// Where a cell's first tap lies in a tile of the source, in bytes.
__device__ __forceinline__ int offset_in_tile(const Source& s, const Place& at, int step_h) {
  return ((at.image * s.rows + at.row * step_h) * s.step * s.phase_columns + at.column) * s.pitch;
}

// What a tap `rows` further down and `columns` further right adds to it.
__device__ __forceinline__ int offset_of_tap(const Source& s, int rows, int columns) {
  int phase;
  const int across = s.by_step.div(columns, phase);
  return ((rows * s.step + phase) * s.phase_columns + across) * s.pitch;
}

// Calls f(part, pixel) for all copies of all pixels, shared out among the block's threads: lanes of
// a warp have neighbouring parts, and a thread the same part of many pixels.
template <int kUnroll, typename F>
__device__ __forceinline__ void for_each_copy(const FastDiv& by_copies, int lanes, int pixels,
                                              const F& f) {
  int part;
  const int first = by_copies.div(threadIdx.x, part);
  if (first >= lanes) return;
  for (; part < by_copies.divisor(); part += blockDim.x) {
#pragma unroll kUnroll
    for (int pixel = first; pixel < pixels; pixel += lanes) f(part, pixel);
  }
}

// The channels from c0 on of the rectangle from (first.row, first.column) on. Asynchronously: the
// caller commits. Zeros outside of the images and beyond the channels.
template <int kBytes, int kUnroll, typename T>
__device__ __forceinline__ void stage_copies(const Source& s, int batch, const Place& first, int c0,
                                             char* to) {
  constexpr int kCount = kBytes / sizeof(T);
  const T* const data = static_cast<const T*>(s.data);
  const int all = s.images * s.rows * s.columns;
  for_each_copy<kUnroll>(s.by_copies, s.lanes, all, [&](int part, int pixel) {
    int column, row, within;
    const int run = s.by_run_copies.div(part, within);
    const int line = s.by_columns.div(pixel, column);
    const int image = first.image + s.by_rows.div(line, row);
    const int h = first.row + row, w = first.column + column;
    const int c = c0 + run * s.run + within * kCount;
    const bool inside =
        image < batch && h >= 0 && h < s.height && w >= 0 && w < s.width && c < s.channels;
    const T* const from = data + (inside ? image * s.n + h * s.h + w * s.w + c : 0);
    if (s.step > 1) {
      int phase;
      const int across = s.by_step.div(column, phase);
      pixel = (line * s.step + phase) * s.phase_columns + across;
    }
    char* const at = to + pixel * s.pitch + run * s.run_pitch + within * kBytes;
    if constexpr (kBytes >= 4) {
      cp_async<kBytes>(at, from, inside);
    } else {
      *reinterpret_cast<uint16_t*>(at) =
          load_inside<1>(reinterpret_cast<const uint16_t*>(from), inside).v[0];
    }
  });
}

// kUnroll: copies whose addresses are worked out together, as far as there are registers.
template <typename T, int kUnroll>
__device__ __forceinline__ void stage(const Source& s, int batch, const Place& first, int c0,
                                      char* to) {
  if (s.copy == 16) {
    stage_copies<16, kUnroll, T>(s, batch, first, c0, to);
  } else if (s.copy == 8) {
    stage_copies<8, kUnroll, T>(s, batch, first, c0, to);
  } else {
    stage_copies<sizeof(T), kUnroll, T>(s, batch, first, c0, to);
  }
}

// Zeros from a to b, both aligned to 16 bytes.
__device__ __forceinline__ void clear(char* a, const char* b) {
  for (char* at = a + 16 * threadIdx.x; at < b; at += 16 * blockDim.x) {
    *reinterpret_cast<uint4*>(at) = {};
  }
}

}  // namespace braze::cuda::grouped
