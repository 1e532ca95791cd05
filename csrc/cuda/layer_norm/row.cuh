// What the layer norm kernels share: elements and parameters of rows.
//
// Bytes of an op on rows of 16-bit elements, for each element, parameters aside:
//   forward    4: x, y                (6 where y is float32, under autocast)
//   backward   6: dy, x, dx           (8 where dy is float32), and for the parameters' gradients
//              partial sums, 8 bytes for each column and block, at most one block a multiprocessor
// Who has a row, by its length in elements of 16 bits (of 32 or 64 bits half of that; in single
// elements, where 16 bytes do not divide the row or its address, a quarter):
//   up to 1024             up to 32 lanes of a warp, 24 or 32 elements each       (ahead.cuh);
//                          backward up to 768 with 24 each, up to 512 with 16
//   up to 16384            up to 16 warps, likewise; backward up to 8192 with 16 or 24 each, of
//                          rows of 16 bits up to 16384 with 32
//   up to 32768, forward   16 warps with 64 each, where rows and parameters have 16 bits
//   beyond, forward        a block or a cluster of up to 8, in shared memory      (stream.cuh)
//   backward, up to 32768  a cluster of two blocks, up to 65536 of four           (backward.cu)
//   beyond                 a block, and memory is read twice
#pragma once

#include "cuda/softmax/row_team.cuh"
#include "launchers/layer_norm.h"

namespace braze::cuda {

// N parameters from element c on, of the elements' own type T or, where `wide`, of acc_t<T>;
// `absent` where there are none.
template <int N, typename T>
__device__ __forceinline__ void load_parameters(const void* values, bool wide, int64_t c,
                                                acc_t<T> absent, acc_t<T> (&out)[N]) {
  if (!values) {
#pragma unroll
    for (int k = 0; k < N; ++k) out[k] = absent;
  } else if (sizeof(T) == 2 && wide) {
    load_acc<N>(static_cast<const acc_t<T>*>(values) + c, out);
  } else {
    load_acc<N>(static_cast<const T*>(values) + c, out);
  }
}

// A channel's parameter, of T or, where `wide`, of acc_t<T>; `absent` where there is none.
template <typename T>
__device__ __forceinline__ acc_t<T> parameter_of(const void* values, bool wide, int64_t channel,
                                                 acc_t<T> absent) {
  acc_t<T> p[1];
  load_parameters<1, T>(values, wide, channel, absent, p);
  return p[0];
}

// (x - about) * slope + offset of elements T, as xhat is of a row's: one operation less of 16-bit
// elements. A mean is at most some 2^11 times their deviation, or all would be equal, so that what
// the offset's rounding costs stays below theirs.
template <typename T>
struct Line {
  using A = acc_t<T>;
  A about, slope, offset;

  __device__ __forceinline__ Line(A about, A slope, A offset)
      : about(about), slope(slope), offset(offset) {
    if constexpr (sizeof(T) == 2) {
      const A product = about * slope;
      this->offset = offset - product;
      // Equal elements, so large that the product overflows.
      if (::fabsf(product) == INFINITY) this->slope = this->offset = 0;
    }
  }
  __device__ __forceinline__ A operator()(A x) const {
    return (sizeof(T) == 2 ? x : x - about) * slope + offset;
  }
  // The line that is `factor` times this one, and `more` added.
  __device__ __forceinline__ Line scaled(A factor, A more) const {
    Line line = *this;
    line.slope *= factor;
    line.offset = line.offset * factor + more;
    return line;
  }
};

// The widest vectors that the row's length and the addresses allow: f(integral constant N).
template <typename T, typename F>
void with_row_vectors(int64_t size, bool aligned, const F& f) {
  constexpr int kWidth = kVecWidth<T>;
  if (aligned && size % kWidth == 0) return f(std::integral_constant<int, kWidth>{});
  f(std::integral_constant<int, 1>{});
}

}  // namespace braze::cuda
