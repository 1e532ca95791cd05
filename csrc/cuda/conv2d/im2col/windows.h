// A pass as a product over windows: the pixels of its result, each with the window of pixels that
// it is summed over in the image that TMA reads.
#pragma once

#include "cuda/common/fast_div.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/conv2d/args.h"

namespace braze::cuda::im2col {

constexpr int kRowBytes = 128;  // of a stage in shared memory, swizzled

// What a kernel needs to know of them. Window (h, w) of image n begins `stride` times as far on, at
// a pixel that may lie outside; its taps are `step` pixels apart.
struct Windows {
  FastDiv columns, rows;  // of the result: by its width, then by its height
  int stride_h, stride_w, first_h, first_w;
  FastDiv taps_w;  // in a row of the window
  int step_h, step_w;
  int blocks;  // of channels, a swizzled row each: a stage's depth
  // Which of the filter's taps, counted as they lie in memory, belongs to the window's first one,
  // and how it goes on.
  int tap, tap_h, tap_w;
};

// The first pixel of a window.
struct Corner {
  int h, w, n;
};
__device__ __forceinline__ Corner corner_of(const Windows& windows, int pixel) {
  int column, row;
  const int n = windows.rows.div(windows.columns.div(pixel, column), row);
  return {row * windows.stride_h + windows.first_h, column * windows.stride_w + windows.first_w, n};
}

// Goes through a window's depth: which tap, and which of its blocks of channels.
class Taps {
 public:
  __device__ __forceinline__ explicit Taps(const Windows& windows) : windows_(windows) {}

  __device__ __forceinline__ void next() {
    if (++block_ < windows_.blocks) return;
    block_ = 0;
    if (++w_ < windows_.taps_w.divisor()) return;
    w_ = 0, ++h_;
  }
  __device__ __forceinline__ int block() const { return block_; }
  // From the window's first pixel.
  __device__ __forceinline__ uint16_t right() const {
    return static_cast<uint16_t>(w_ * windows_.step_w);
  }
  __device__ __forceinline__ uint16_t down() const {
    return static_cast<uint16_t>(h_ * windows_.step_h);
  }
  // The place of its weights in the filter.
  __device__ __forceinline__ int weights() const {
    return windows_.tap + h_ * windows_.tap_h + w_ * windows_.tap_w;
  }

 private:
  const Windows& windows_;
  int h_ = 0, w_ = 0, block_ = 0;
};

// The same, with what the host needs for the tensor map.
struct Pass {
  Windows windows;
  int64_t taps;                      // of a window
  int64_t pixels, height, width;     // of the result, of one of its images
  int64_t channels, filters;         // summed over, computed
  Tensor4dRef image;                 // that is read
  int64_t images, image_h, image_w;  // its extents
};

// fprop, whose windows are wgrad's too, and dgrad of stride 1, which is fprop of the gradient by
// the filter turned round.
Pass pass_of(const Conv2dArgs& args);

// Of the image; pixels: that one copy brings.
CUtensorMap window_map(DType dtype, const Pass& pass, int pixels);

// Why TMA cannot take the pass, or nullptr.
const char* window_obstacle(const Conv2dArgs& args);

}  // namespace braze::cuda::im2col
