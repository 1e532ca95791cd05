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
  FastDiv by_blocks;
  int last_bytes;  // of the last one's rows that channels fill
  // Which of the filter's taps, counted as they lie in memory, belongs to the window's first one,
  // and how it goes on.
  int tap, tap_h, tap_w;

  void set_blocks(int64_t count) { blocks = static_cast<int>(count), by_blocks = FastDiv(count); }
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
  __device__ __forceinline__ explicit Taps(const Windows& windows)
      : Taps(windows, windows.taps_w.divisor(), 0, 0, windows.tap) {}
  // Of a part of the filter: taps in a row, how far the first one is from the window's first pixel,
  // its place in the filter.
  __device__ __forceinline__ Taps(const Windows& windows, int taps_w, int right, int down, int tap)
      : windows_(windows), taps_w_(taps_w), right_(right), down_(down), tap_(tap) {}

  // From the beginning of a window of the whole filter to a depth in the midst of it.
  __device__ __forceinline__ void skip_to(int depth) {
    h_ = windows_.taps_w.div(windows_.by_blocks.div(depth, block_), w_);
  }
  __device__ __forceinline__ void next() {
    if (++block_ < windows_.blocks) return;
    block_ = 0;
    if (++w_ < taps_w_) return;
    w_ = 0, ++h_;
  }
  __device__ __forceinline__ int block() const { return block_; }
  // From the window's first pixel.
  __device__ __forceinline__ uint16_t right() const {
    return static_cast<uint16_t>(right_ + w_ * windows_.step_w);
  }
  __device__ __forceinline__ uint16_t down() const {
    return static_cast<uint16_t>(down_ + h_ * windows_.step_h);
  }
  // The place of its weights in the filter.
  __device__ __forceinline__ int weights() const {
    return tap_ + h_ * windows_.tap_h + w_ * windows_.tap_w;
  }

 private:
  const Windows& windows_;
  int taps_w_, right_, down_, tap_;
  int h_ = 0, w_ = 0, block_ = 0;
};

constexpr int kMaxStride = 8;

// The input gradient of a stride s: pixels that are s apart meet the same taps, each s-th one or
// fewer, in gradients that lie side by side. So every phase, a first pixel out of s in either
// direction, is a convolution of stride 1 by a part of the filter. All have windows on one grid,
// that of the first phase.
struct Phase {
  int first;      // pixel
  int tap, taps;  // the filter's last one that belongs to it, how many do
  int shift;      // of that tap, from the window's first pixel
};
struct Phases {
  Phase h[kMaxStride], w[kMaxStride];  // those with the most taps first
  FastDiv of_row;                      // phases that share their rows, one for each column's
  int stride_h, stride_w;
  int filter_w;       // taps in a row of the filter
  int height, width;  // of the input

  struct Both {
    const Phase &h, &w;
  };
  __device__ __forceinline__ Both both(int phase) const {
    int column;
    const int row = of_row.div(phase, column);
    return {h[row], w[column]};
  }
};

// The same, with what the host needs.
struct Pass {
  Windows windows;
  int64_t taps;                   // of a window; of phases the most
  int64_t pixels, height, width;  // of the result, of one of its images; of phases the grid's
  int64_t channels, filters;      // summed over, computed
};

// fprop, whose windows are wgrad's too, and dgrad of stride 1, which is fprop of the gradient by
// the filter turned round.
Pass pass_of(const Conv2dArgs& args);

// dgrad of any stride, 1 too: windows on the phases' grid, and the phases.
Pass pass_of(const Conv2dArgs& args, Phases* phases);

// Of the image that is read, or of others in its place; pixels: that one copy brings.
CUtensorMap window_map(const Conv2dArgs& args, int pixels);
CUtensorMap window_map(const Conv2dArgs& args, int pixels, DType dtype, const Tensor4dRef& image,
                       int64_t images);

// Whether dgrad has to go by phases.
inline bool has_phases(const Conv2dArgs& args) {
  return args.pass == Conv2dPass::kDgrad && (args.shape.stride_h > 1 || args.shape.stride_w > 1);
}

// Why TMA cannot take its geometry, or nullptr.
const char* window_obstacle(const Conv2dArgs& args);

}  // namespace braze::cuda::im2col
