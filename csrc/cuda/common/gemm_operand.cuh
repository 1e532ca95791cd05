// What a matrix product reads and writes, seen by the tiled kernels: an operand is a function of an
// outer index (row of A or column of B) and a depth index (the one summed over). Matrices are plain
// strides; a convolution's operands are gathered: the index along either axis is split into digits
// (image, row, column or channel, filter row, filter column), each digit adds to an offset and to a
// position (h, w), and a position outside the image reads zero.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fast_div.cuh"
#include "launch.cuh"
#include "numeric.cuh"

namespace braze::cuda {

template <typename T_>
struct MatrixOperand {
  using T = T_;
  using Offset = int64_t;
  static constexpr bool kGathered = false, kMasked = false;
  struct Coord {};

  const T* data;
  int64_t batch, outer_stride, depth_stride;
  int outer_extent, depth_extent;
  bool vectors;  // 16-byte loads along the unit stride are aligned and never straddle an edge
};

// The memory that it lies in.
template <typename T>
Span span_of(const MatrixOperand<T>& op) {
  const int64_t last =
      (op.outer_extent - 1) * op.outer_stride + (op.depth_extent - 1) * op.depth_stride;
  return {op.data, (last + 1) * static_cast<int64_t>(sizeof(T))};
}

// A matrix whose elements count as 0 where those of another one with the same strides, the result
// of a ReLU, are not positive (NaN is, as in torch).
template <typename T>
struct MaskedOperand : MatrixOperand<T> {
  static constexpr bool kMasked = true;
  ptrdiff_t mask;  // bytes from an element to the other matrix's; 0 without one

  // Where the other matrix has what this one has at `p`.
  __device__ __forceinline__ const T* result_at(const T* p) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(p) + mask);
  }
  // N elements at `values`, behind the ReLU whose results are at `results`.
  template <int N>
  static __device__ __forceinline__ Vec<T, N> behind_relu(const T* values, const T* results) {
    Vec<T, N> v = load_vec<N>(values);
    const Vec<T, N> r = load_vec<N>(results);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (convert<acc_t<T>>(r.v[i]) <= acc_t<T>(0)) v.v[i] = convert<T>(acc_t<T>(0));
    }
    return v;
  }
};

template <typename Offset>
struct alignas(16) Position {
  Offset offset;
  int h, w;
};

// An index of three digits, the last one fastest; every digit moves the offset and the position.
template <typename Offset>
struct Axis {
  int extent = 1;
  FastDiv middle, inner;  // extents of the second and the third digit
  Offset offset_step[3] = {0, 0, 0}, offset_base = 0;
  int h_step[3] = {0, 0, 0}, w_step[3] = {0, 0, 0};
  int h_base = 0, w_base = 0;

  __device__ __forceinline__ Position<Offset> at(int i) const {
    int d2, d1;
    const int d0 = middle.div(inner.div(i, d2), d1);
    return {offset_base + d0 * offset_step[0] + d1 * offset_step[1] + d2 * offset_step[2],
            h_base + d0 * h_step[0] + d1 * h_step[1] + d2 * h_step[2],
            w_base + d0 * w_step[0] + d1 * w_step[1] + d2 * w_step[2]};
  }

  // Whether vectors of `width` elements along the axis are contiguous, at one position, and start
  // at multiples of `width` from the base.
  bool has_vectors(int width) const {
    return inner.divisor() % width == 0 && offset_step[2] == 1 && h_step[2] == 0 &&
           w_step[2] == 0 && steps_divide(width, 2);
  }
  // Whether the first `digits` digits keep the alignment to `width` elements.
  bool steps_divide(int width, int digits) const {
    bool ok = offset_base % width == 0;
    for (int d = 0; d < digits; ++d) ok &= offset_step[d] % width == 0;
    return ok;
  }
};

// kBounded: positions outside height x width read zero; else positions do not matter (filters, or
// the gradient by output pixel). Offset: int where the whole tensor is within its reach, which
// halves the address arithmetic.
template <typename T_, typename Offset_, bool kBounded>
struct GatheredOperand {
  using T = T_;
  using Offset = Offset_;
  static constexpr bool kGathered = true, kMasked = false;
  using Coord = Position<Offset>;
  static constexpr int kOutside = INT_MIN / 2;  // stays negative whatever position is added

  const T* data;
  int64_t batch;
  Axis<Offset> outer_axis, depth_axis;
  int height = 1, width = 1;
  // With a stride (the input gradient of a strided convolution), positions count in input pixels:
  // only multiples of the stride exist in the gathered tensor, and offsets follow from the
  // quotient.
  bool strided = false;
  FastDiv stride_h, stride_w;
  Offset row_offset = 0, column_offset = 0;
  bool vectors =
      false;  // 16-byte loads along the unit stride are aligned and never straddle an edge

  __device__ __forceinline__ Coord outer(int i) const { return inside(outer_axis, i); }
  __device__ __forceinline__ Coord depth(int i) const { return inside(depth_axis, i); }

  __device__ __forceinline__ bool locate(const Coord& o, const Coord& d, Offset& offset) const {
    offset = o.offset + d.offset;
    if constexpr (!kBounded) {
      return (o.h | d.h) >= 0;  // the sign of kOutside
    } else {
      int h = o.h + d.h, w = o.w + d.w;
      if (strided) {
        if (h < 0 || w < 0) return false;
        int h_rest, w_rest;
        h = stride_h.div(h, h_rest);
        w = stride_w.div(w, w_rest);
        offset += h * row_offset + w * column_offset;
        if ((h_rest | w_rest) != 0) return false;
      }
      return static_cast<unsigned>(h) < static_cast<unsigned>(height) &&
             static_cast<unsigned>(w) < static_cast<unsigned>(width);
    }
  }

 private:
  static __device__ __forceinline__ Coord inside(const Axis<Offset>& axis, int i) {
    if (i < axis.extent) return axis.at(i);
    return {0, kOutside, 0};
  }
};

// Where C goes: element (m, n) of batch z at z * batch + rows(m) + columns(n), after the epilogue.
template <typename T>
struct Output {
  static constexpr bool kFull = false;
  T* data;
  int64_t batch;
  Axis<int64_t> rows, columns;
  int64_t row_stride = 0;  // if not 0: row-major with the bias by column, and axes are not asked
  bool vectors = false;    // 4 columns from a multiple of 4 are contiguous and aligned
  const T* bias = nullptr;
  bool bias_by_row = false;
  int64_t bias_batch = 0;
  bool relu = false;

  __device__ __forceinline__ T finish(acc_t<T> v, int64_t z, int m, int n) const {
    if (bias) v += convert<acc_t<T>>(bias[z * bias_batch + (bias_by_row ? m : n)]);
    if (relu && v < acc_t<T>(0)) v = 0;  // NaN stays NaN
    return convert<T>(v);
  }

  // Four columns from n on, a multiple of 4; those at n_end and beyond do not exist.
  __device__ __forceinline__ void store4(const acc_t<T> (&v)[4], int64_t z, int m, int n,
                                         int n_end) const {
    T* const row = data + z * batch + rows.at(m).offset;
    if (vectors && n + 4 <= n_end) {
      constexpr int kWidth = sizeof(T) == 8 ? 2 : 4;
      T* const p = row + columns.at(n).offset;
#pragma unroll
      for (int i = 0; i < 4; i += kWidth) {
        Vec<T, kWidth> out;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) out.v[j] = finish(v[i + j], z, m, n + i + j);
        *reinterpret_cast<Vec<T, kWidth>*>(p + i) = out;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (n + i < n_end) row[columns.at(n + i).offset] = finish(v[i], z, m, n + i);
      }
    }
  }
};

// The output of a matrix product, not batched, with the full epilogue (MatmulArgs): a type of its
// own, so that kernels without it are not slowed down.
template <typename T>
struct FullOutput : Output<T> {
  static constexpr bool kFull = true;
  const T *residual = nullptr, *relu_result = nullptr;  // `vectors` holds for them too
  // What every tile adds to the sums: [row of tiles][column], [column of tiles][row]; or nullptr.
  acc_t<T>*column_parts = nullptr, *row_parts = nullptr;
};

// Four columns of C from a multiple of 4 on, for a thread that stores them in many rows: what does
// not change from row to row is worked out once. kRowMajor: known to be (Output::row_stride).
template <typename T, bool kRowMajor = false>
class OutputQuad {
  using Acc = acc_t<T>;

 public:
  __device__ OutputQuad(const Output<T>& out, int64_t z, int column, int n_end)
      : OutputQuad(out, z, column, n_end, kRowMajor || out.row_stride != 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool has_bias = row_major_ && out.bias && column + i < n_end;
      bias_[i] = has_bias ? convert<Acc>(out.bias[z * out.bias_batch + column + i]) : Acc(0);
    }
  }
  // With the columns' bias, or zeros, of a row-major output.
  __device__ OutputQuad(const Output<T>& out, int64_t z, int column, int n_end, const T (&bias)[4])
      : OutputQuad(out, z, column, n_end, true) {
#pragma unroll
    for (int i = 0; i < 4; ++i) bias_[i] = convert<Acc>(bias[i]);
  }

  __device__ __forceinline__ void store(const Acc (&v)[4], int row) const {
    if (!kRowMajor && !row_major_) {
      out_.store4(v, z_, row, column_, n_end_);
      return;
    }
    T* const to = to_ + row * out_.row_stride;
    constexpr int kWidth = sizeof(T) == 8 ? 2 : 4;
    Vec<T, kWidth> values[4 / kWidth];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Acc x = v[i] + bias_[i];
      if (out_.relu && x < Acc(0)) x = 0;  // NaN stays NaN
      values[i / kWidth].v[i % kWidth] = convert<T>(x);
    }
    if (out_.vectors && column_ + 4 <= n_end_) {
#pragma unroll
      for (int i = 0; i < 4; i += kWidth) {
        *reinterpret_cast<Vec<T, kWidth>*>(to + i) = values[i / kWidth];
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column_ + i < n_end_) to[i] = values[i / kWidth].v[i % kWidth];
      }
    }
  }

 private:
  __device__ OutputQuad(const Output<T>& out, int64_t z, int column, int n_end, bool row_major)
      : out_(out), z_(z), column_(column), n_end_(n_end), row_major_(row_major) {
    to_ = out.data + z * out.batch + column;
  }

  const Output<T>& out_;
  T* to_;
  int64_t z_;
  int column_, n_end_;
  bool row_major_;
  Acc bias_[4];
};

// The same with the full epilogue.
template <typename T>
class FullOutputQuad {
  using Acc = acc_t<T>;

 public:
  __device__ FullOutputQuad(const FullOutput<T>& out, int column, int n_end)
      : out_(out), column_(column), n_end_(n_end), vectors_(out.vectors && column + 4 <= n_end) {
    if (out.bias) load(out.bias + column, bias_);
  }

  // v becomes what was stored.
  __device__ __forceinline__ void store(Acc (&v)[4], int row) const {
    const int64_t offset = row * out_.row_stride + column_;
    Acc added[4] = {}, result[4] = {1, 1, 1, 1};
    if (out_.residual) load(out_.residual + offset, added);
    if (out_.relu_result) load(out_.relu_result + offset, result);
    Vec<T, 4> values;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Acc x = v[i] + bias_[i] + added[i];
      if (out_.relu && x < Acc(0)) x = 0;  // NaN stays NaN
      if (result[i] <= Acc(0)) x = 0;      // NaN passes
      values.v[i] = convert<T>(x);
      v[i] = convert<Acc>(values.v[i]);
    }
    T* const to = out_.data + offset;
    if (vectors_) {
      store_vec(to, values);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column_ + i < n_end_) to[i] = values.v[i];
      }
    }
  }

 private:
  // Those of the four that exist.
  __device__ __forceinline__ void load(const T* from, Acc (&to)[4]) const {
    if (vectors_) {
      const Vec<T, 4> v = load_vec<4>(from);
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = convert<Acc>(v.v[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column_ + i < n_end_) to[i] = convert<Acc>(from[i]);
      }
    }
  }

  const FullOutput<T>& out_;
  int column_, n_end_;
  bool vectors_;
  Acc bias_[4] = {};
};

}  // namespace braze::cuda
