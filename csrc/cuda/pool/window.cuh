// What the pooling kernels share: the place of a result or an input element in its tensor, the
// choice of vector width.
//
// Both layouts are images x rows x columns x depth (pool.h): NCHW has depth 1 and n * c images. One
// thread takes one vector of up to 16 bytes along the depth.
#pragma once

#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "launchers/pool.h"

namespace braze::cuda {

constexpr int kPoolThreads = 256;

// FastDiv's counterpart for tensors of 2^31 vectors and more.
class WideDiv {
 public:
  explicit WideDiv(int64_t divisor) : divisor_(divisor) {}

  __device__ int64_t div(int64_t i, int64_t& remainder) const {
    const int64_t quotient = i / divisor_;
    remainder = i - quotient * divisor_;
    return quotient;
  }

 private:
  int64_t divisor_;
};

// Splits a vector's running number into image, row, column and place along the depth.
template <typename Div, typename Index>
struct Split {
  Div groups, columns, rows;

  Split(int64_t groups, int64_t columns, int64_t rows)
      : groups(groups), columns(columns), rows(rows) {}

  __device__ void operator()(int64_t i, int64_t* image, int* row, int* column, int* group) const {
    Index g, w, h;
    const Index pixel = groups.div(static_cast<Index>(i), g);
    const Index line = columns.div(pixel, w);
    *image = rows.div(line, h);
    *row = static_cast<int>(h);
    *column = static_cast<int>(w);
    *group = static_cast<int>(g);
  }
};

// Pool2dShape as the kernels want it: positions within a plane fit 30 bits. A stride between
// windows of which there is one, or a dilation of a single tap, may be any number; it has no
// effect, and a small one replaces it.
struct Window {
  static int narrow(int64_t v) {
    if (v >= int64_t{1} << 30) {
      throw std::runtime_error("pool: expected planes of fewer than 2^30 rows and columns");
    }
    return static_cast<int>(v);
  }

  int r, s;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int h, w, p, q;
  int64_t depth;
  FastDiv by_stride_h, by_stride_w, by_dilation_h, by_dilation_w;

  explicit Window(const Pool2dShape& shape)
      : r(narrow(shape.r)),
        s(narrow(shape.s)),
        stride_h(narrow(shape.p > 1 ? shape.stride_h : shape.h + shape.pad_h + 1)),
        stride_w(narrow(shape.q > 1 ? shape.stride_w : shape.w + shape.pad_w + 1)),
        pad_h(narrow(shape.pad_h)),
        pad_w(narrow(shape.pad_w)),
        dilation_h(narrow(shape.r > 1 ? shape.dilation_h : 1)),
        dilation_w(narrow(shape.s > 1 ? shape.dilation_w : 1)),
        h(narrow(shape.h)),
        w(narrow(shape.w)),
        p(narrow(shape.p)),
        q(narrow(shape.q)),
        depth(shape.depth()),
        by_stride_h(stride_h),
        by_stride_w(stride_w),
        by_dilation_h(dilation_h),
        by_dilation_w(dilation_w) {}

  __device__ int64_t input_offset(int64_t image, int row, int column) const {
    return ((image * h + row) * w + column) * depth;
  }
  __device__ int64_t output_offset(int64_t image, int row, int column) const {
    return ((image * p + row) * q + column) * depth;
  }
};

// The windows along one axis that may contain input position `at`: first <= window <= last.
__device__ __forceinline__ void covering_windows(int at, const FastDiv& stride, int pad,
                                                 int dilation, int taps, int windows, int* first,
                                                 int* last) {
  const int begin = at + pad - (taps - 1) * dilation;
  *first = begin <= 0 ? 0 : stride.div(begin + stride.divisor() - 1);
  *last = min(stride.div(at + pad), windows - 1);
}

// Calls f(width) with the number of elements per access, as a compile-time constant: as many as 16
// bytes hold if `extent` is a multiple and every pointer is aligned, else one.
template <typename T, typename F>
void with_depth_vectors(int64_t extent, bool aligned, const F& f) {
  if (aligned && extent % kVecWidth<T> == 0) {
    f(std::integral_constant<int, kVecWidth<T>>{});
  } else {
    f(std::integral_constant<int, 1>{});
  }
}

// Calls f(split) with the divisors that `count` vectors need.
template <typename F>
void with_split(int64_t count, int64_t groups, int64_t columns, int64_t rows, const F& f) {
  if (count < (int64_t{1} << 31)) {
    f(Split<FastDiv, int>(groups, columns, rows));
  } else {
    f(Split<WideDiv, int64_t>(groups, columns, rows));
  }
}

inline unsigned int pool_blocks(int64_t work) {
  return static_cast<unsigned int>(ceil_div(work, kPoolThreads));
}

__device__ __forceinline__ int64_t global_thread() {
  return blockIdx.x * int64_t{kPoolThreads} + threadIdx.x;
}

}  // namespace braze::cuda
