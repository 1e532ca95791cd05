#pragma once

#include "launchers/common/types.h"

namespace braze {

// Windows of r x s taps over planes of h x w, giving p x q results. Tap (i, j) of window (a, b) is
// the input element at (a * stride_h - pad_h + i * dilation_h, b * stride_w - pad_w + j *
// dilation_w); taps outside the plane are skipped.
struct Pool2dShape {
  DType dtype;
  int64_t n, c, h, w;
  int64_t p, q;
  int64_t r, s;
  int64_t stride_h, stride_w;
  int64_t pad_h, pad_w;
  int64_t dilation_h, dilation_w;
  bool channels_last;  // all tensors in NHWC order in memory, else NCHW

  int64_t output_count() const { return n * c * p * q; }
  int64_t input_count() const { return n * c * h * w; }
  // Both layouts as one: `images` x height x width x `depth` adjacent elements.
  int64_t images() const { return channels_last ? n : n * c; }
  int64_t depth() const { return channels_last ? c : 1; }
  // Non-overlapping 2 x 2 windows that cover the plane exactly.
  bool is_exact_2x2() const {
    return r == 2 && s == 2 && stride_h == 2 && stride_w == 2 && pad_h == 0 && pad_w == 0 &&
           dilation_h == 1 && dilation_w == 1 && h == 2 * p && w == 2 * q;
  }
};

// Max pooling remembers the tap i * s + j that won: in a byte where that suffices.
inline bool has_byte_taps(const Pool2dShape& shape) { return shape.r * shape.s <= 256; }

// The tap of a window whose gradient goes nowhere, since ReLU stops it.
constexpr uint8_t kNoTap = 255;

// max_pool2d(relu(x + bias)) and its gradients, which are one pass each: windows of up to 3 x 3
// that begin in every second row and column, channels_last.
struct ReluPoolShape {
  Pool2dShape pool;
  DType
      bias;  // of the bias and its gradient: the tensors' dtype, or float32 where that has 16 bits
  bool turned;  // y and dy in NCHW order, all else channels_last

  // Rows and columns of pairs of inputs, of which the first pair begins with the first window.
  int64_t pair_rows() const { return ceil_div(pool.h + pool.pad_h, 2); }
  int64_t pair_columns() const { return ceil_div(pool.w + pool.pad_w, 2); }
  int64_t pairs() const { return pool.n * pair_rows() * pair_columns(); }
  bool is_supported() const {
    constexpr int64_t kMost = int64_t{1} << 31;
    return pool.channels_last && pool.r <= 3 && pool.s <= 3 && pool.stride_h == 2 &&
           pool.stride_w == 2 && pool.dilation_h == 1 && pool.dilation_w == 1 && pairs() < kMost &&
           pool.output_count() < kMost;
  }
};

struct AvgPoolDivisor {
  bool count_include_pad;
  int64_t divisor_override;  // 0: none
};

// Extent of window `out` along one axis as avg_pool counts it: with padding, but no further.
constexpr int64_t padded_extent(int64_t out, int64_t stride, int64_t pad, int64_t taps,
                                int64_t in) {
  const int64_t start = out * stride - pad;
  return (start + taps < in + pad ? start + taps : in + pad) - start;
}

// The same, counting elements of the plane only.
constexpr int64_t inner_extent(int64_t out, int64_t stride, int64_t pad, int64_t taps, int64_t in) {
  const int64_t start = out * stride - pad;
  const int64_t first = start > 0 ? start : 0;
  const int64_t last = start + taps < in ? start + taps : in;
  return last > first ? last - first : 0;
}

namespace BRAZE_DEVICE {

// y = the largest element of each window and taps = which tap it was (uint8 where has_byte_taps(),
// else int32): NaN counts as largest, of equals the first wins. A window without an element inside
// the plane gives -inf.
void max_pool2d(Stream stream, const Pool2dShape& shape, const void* x, void* y, void* taps);

// dx = sum of dy over the windows that chose the element.
void max_pool2d_backward(Stream stream, const Pool2dShape& shape, const void* dy, const void* taps,
                         void* dx);

// y = max_pool2d(relu(x + bias)), with the sum rounded to x's dtype; bias may be nullptr. taps: as
// above, or kNoTap where y is not above zero and no NaN. A supported shape, as below.
void relu_max_pool2d(Stream stream, const ReluPoolShape& shape, const void* x, const void* bias,
                     void* y, uint8_t* taps);

// dx = sum of dy over the windows that chose the element, dbias (or nullptr) that of dx over all
// but the channels.
void relu_max_pool2d_backward(Stream stream, const ReluPoolShape& shape, const void* dy,
                              const uint8_t* taps, void* dx, void* dbias, void* workspace);
int64_t relu_max_pool2d_workspace_bytes(const ReluPoolShape& shape);

// indices = row * w + column, in the plane, of each window's chosen tap.
void max_pool2d_indices(Stream stream, const Pool2dShape& shape, const void* taps,
                        int64_t* indices);

// y = sum of each window / divisor. shape.dilation is 1.
void avg_pool2d(Stream stream, const Pool2dShape& shape, const AvgPoolDivisor& divisor,
                const void* x, void* y);

// dx = sum of dy / divisor over the windows that contain the element.
void avg_pool2d_backward(Stream stream, const Pool2dShape& shape, const AvgPoolDivisor& divisor,
                         const void* dy, void* dx);

}  // namespace BRAZE_DEVICE
}  // namespace braze
