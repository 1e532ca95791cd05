// The three products of a convolution as matrix products over gathered operands (implicit GEMM):
//   fprop: patches of x (outer: output pixels, depth: taps) times filters
//   dgrad: patches of dy (outer: input pixels, depth: taps) times filters, channels exchanged
//   wgrad: dy (outer: filters, depth: output pixels) times patches of x (outer: taps)
// where a tap is a channel and a filter position. Groups are the product's batch.
#pragma once

#include "args.h"
#include "cuda/common/gemm_problem.cuh"

namespace braze::cuda {

// Patches of an image, and what they are multiplied by.
template <typename T, typename Offset>
using PatchOperand = GatheredOperand<T, Offset, true>;
template <typename T, typename Offset>
using PlainOperand = GatheredOperand<T, Offset, false>;
template <typename T, typename Offset>
using PatchesFirst = GemmProblem<PatchOperand<T, Offset>, PlainOperand<T, Offset>>;
template <typename T, typename Offset>
using PatchesSecond = GemmProblem<PlainOperand<T, Offset>, PatchOperand<T, Offset>>;

template <typename Offset>
Axis<Offset> make_axis(int64_t e0, int64_t e1, int64_t e2) {
  Axis<Offset> axis;
  axis.extent = static_cast<int>(e0 * e1 * e2);
  axis.middle = FastDiv(e1);
  axis.inner = FastDiv(e2);
  return axis;
}

template <typename Offset>
Axis<Offset> single_axis(int64_t extent, int64_t stride) {
  Axis<Offset> axis = make_axis<Offset>(1, 1, extent);
  axis.offset_step[2] = stride;
  return axis;
}

// (n, h, w) of a tensor; rows that follow each other in memory become one digit.
template <typename Offset>
Axis<Offset> pixel_axis(int64_t n, int64_t h, int64_t w, const Tensor4dRef& t) {
  const bool merge = t.h == w * t.w;
  Axis<Offset> axis = merge ? make_axis<Offset>(n, 1, h * w) : make_axis<Offset>(n, h, w);
  axis.offset_step[0] = t.n;
  axis.offset_step[1] = merge ? 0 : t.h;
  axis.offset_step[2] = t.w;
  return axis;
}

// (channel, r, s), or (r, s, channel) where channels are fastest; steps in elements and in pixels.
struct TapSteps {
  int64_t channel, r, s;
  int h, w;
};

template <typename Offset>
Axis<Offset> tap_axis(int64_t channels, const Conv2dShape& p, const TapSteps& steps,
                      bool channels_last) {
  Axis<Offset> axis =
      channels_last ? make_axis<Offset>(p.r, p.s, channels) : make_axis<Offset>(channels, p.r, p.s);
  const int digit_c = channels_last ? 2 : 0, digit_r = channels_last ? 0 : 1, digit_s = digit_r + 1;
  axis.offset_step[digit_c] = steps.channel;
  axis.offset_step[digit_r] = steps.r;
  axis.offset_step[digit_s] = steps.s;
  axis.h_step[digit_r] = steps.h;
  axis.w_step[digit_s] = steps.w;
  return axis;
}

// x under a filter at output pixels (fprop, wgrad).
template <typename Offset>
Axis<Offset> patch_pixels(const Conv2dShape& p, const Tensor4dRef& x) {
  Axis<Offset> axis = make_axis<Offset>(p.n, p.p, p.q);
  axis.offset_step[0] = x.n;
  axis.offset_step[1] = p.stride_h * x.h;
  axis.offset_step[2] = p.stride_w * x.w;
  axis.offset_base = -p.pad_h * x.h - p.pad_w * x.w;
  axis.h_step[1] = static_cast<int>(p.stride_h);
  axis.w_step[2] = static_cast<int>(p.stride_w);
  axis.h_base = static_cast<int>(-p.pad_h);
  axis.w_base = static_cast<int>(-p.pad_w);
  return axis;
}

template <typename Offset>
Axis<Offset> patch_taps(const Conv2dShape& p, const Tensor4dRef& x, bool channels_last) {
  return tap_axis<Offset>(p.c / p.groups, p,
                          {x.c, p.dilation_h * x.h, p.dilation_w * x.w,
                           static_cast<int>(p.dilation_h), static_cast<int>(p.dilation_w)},
                          channels_last);
}

template <typename Op>
void set_vectors(Op& op, int64_t groups, bool along_depth) {
  constexpr int kVec = kVecWidth<typename Op::T>;
  const auto& along = along_depth ? op.depth_axis : op.outer_axis;
  const auto& across = along_depth ? op.outer_axis : op.depth_axis;
  op.vectors = along.has_vectors(kVec) && across.steps_divide(kVec, 3) &&
               (groups == 1 || op.batch % kVec == 0) && op.row_offset % kVec == 0 &&
               op.column_offset % kVec == 0 && is_vec_aligned(op.data);
}

template <typename T, typename Offset>
PatchOperand<T, Offset> gather_input(const Conv2dArgs& a) {
  const Conv2dShape& p = a.shape;
  const Tensor4dRef& t = a.gathered;
  const bool last = is_channels_last(a);
  PatchOperand<T, Offset> op{};
  op.data = static_cast<const T*>(t.data);
  if (a.pass == Conv2dPass::kDgrad) {
    // dy at ((h + pad - r * dilation) / stride, ...): where that is a whole number
    op.batch = p.k / p.groups * t.c;
    op.strided = p.stride_h > 1 || p.stride_w > 1;
    op.outer_axis = make_axis<Offset>(p.n, p.h, p.w);
    op.outer_axis.offset_step[0] = t.n;
    op.outer_axis.h_step[1] = 1;
    op.outer_axis.w_step[2] = 1;
    op.outer_axis.h_base = static_cast<int>(p.pad_h);
    op.outer_axis.w_base = static_cast<int>(p.pad_w);
    TapSteps steps{t.c, 0, 0, static_cast<int>(-p.dilation_h), static_cast<int>(-p.dilation_w)};
    if (op.strided) {
      op.stride_h = FastDiv(p.stride_h);
      op.stride_w = FastDiv(p.stride_w);
      op.row_offset = t.h;
      op.column_offset = t.w;
    } else {
      op.outer_axis.offset_step[1] = t.h;
      op.outer_axis.offset_step[2] = t.w;
      op.outer_axis.offset_base = p.pad_h * t.h + p.pad_w * t.w;
      steps.r = -p.dilation_h * t.h;
      steps.s = -p.dilation_w * t.w;
    }
    op.depth_axis = tap_axis<Offset>(p.k / p.groups, p, steps, last);
    op.height = static_cast<int>(p.p);
    op.width = static_cast<int>(p.q);
    set_vectors(op, p.groups, true);
  } else {
    const bool fprop = a.pass == Conv2dPass::kFprop;
    op.batch = p.c / p.groups * t.c;
    op.outer_axis = fprop ? patch_pixels<Offset>(p, t) : patch_taps<Offset>(p, t, last);
    op.depth_axis = fprop ? patch_taps<Offset>(p, t, last) : patch_pixels<Offset>(p, t);
    op.height = static_cast<int>(p.h);
    op.width = static_cast<int>(p.w);
    set_vectors(op, p.groups, fprop);
  }
  return op;
}

// The filters (fprop, dgrad) or dy (wgrad).
template <typename T, typename Offset>
PlainOperand<T, Offset> gather_other(const Conv2dArgs& a) {
  const Conv2dShape& p = a.shape;
  const Tensor4dRef& t = a.other;
  const bool last = is_channels_last(a);
  const int64_t c = p.c / p.groups, k = p.k / p.groups;
  PlainOperand<T, Offset> op{};
  op.data = static_cast<const T*>(t.data);
  switch (a.pass) {
    case Conv2dPass::kFprop:
      op.batch = k * t.n;
      op.outer_axis = single_axis<Offset>(k, t.n);
      op.depth_axis = tap_axis<Offset>(c, p, {t.c, t.h, t.w, 0, 0}, last);
      set_vectors(op, p.groups, true);
      break;
    case Conv2dPass::kDgrad:
      op.batch = k * t.n;
      op.outer_axis = single_axis<Offset>(c, t.c);
      op.depth_axis = tap_axis<Offset>(k, p, {t.n, t.h, t.w, 0, 0}, last);
      set_vectors(op, p.groups, false);
      break;
    case Conv2dPass::kWgrad:
      op.batch = k * t.c;
      op.outer_axis = single_axis<Offset>(k, t.c);
      op.depth_axis = pixel_axis<Offset>(p.n, p.p, p.q, t);
      set_vectors(op, p.groups, !last);
      break;
  }
  return op;
}

// Rows and columns of the result as if A were the pixels (wgrad: the filters); `exchange` swaps
// them.
template <typename T>
Output<T> conv_output(const Conv2dArgs& a, bool exchange) {
  const Conv2dShape& p = a.shape;
  const Tensor4dRef& t = a.out;
  Output<T> out{};
  out.data = static_cast<T*>(const_cast<void*>(t.data));
  switch (a.pass) {
    case Conv2dPass::kFprop:
      out.batch = p.k / p.groups * t.c;
      out.rows = pixel_axis<int64_t>(p.n, p.p, p.q, t);
      out.columns = single_axis<int64_t>(p.k / p.groups, t.c);
      break;
    case Conv2dPass::kDgrad:
      out.batch = p.c / p.groups * t.c;
      out.rows = pixel_axis<int64_t>(p.n, p.h, p.w, t);
      out.columns = single_axis<int64_t>(p.c / p.groups, t.c);
      break;
    case Conv2dPass::kWgrad:
      out.batch = p.k / p.groups * t.n;
      out.rows = single_axis<int64_t>(p.k / p.groups, t.n);
      out.columns =
          tap_axis<int64_t>(p.c / p.groups, p, {t.c, t.h, t.w, 0, 0}, is_channels_last(a));
      break;
  }
  if (exchange) std::swap(out.rows, out.columns);
  out.vectors = out.columns.has_vectors(4) && out.rows.steps_divide(4, 3) &&
                (p.groups == 1 || out.batch % 4 == 0) && is_vec_aligned(out.data);
  out.bias = static_cast<const T*>(a.bias), out.relu = a.relu;
  out.bias_by_row = exchange;
  out.bias_batch = p.k / p.groups;
  return out;
}

// Extents of the product before any exchange: pixels x channels x taps, or filters x taps x pixels.
struct ConvExtents {
  int64_t m, n, k;
};

inline ConvExtents conv_extents(const Conv2dArgs& a) {
  const Conv2dShape& p = a.shape;
  const int64_t c = p.c / p.groups, k = p.k / p.groups, taps = p.r * p.s;
  switch (a.pass) {
    case Conv2dPass::kFprop: return {p.n * p.p * p.q, k, c * taps};
    case Conv2dPass::kDgrad: return {p.n * p.h * p.w, c, k * taps};
    case Conv2dPass::kWgrad: break;
  }
  return {k, c * taps, p.n * p.p * p.q};
}

template <typename Problem>
void set_result(Problem& problem, const Conv2dArgs& args, bool exchange) {
  problem.out = conv_output<typename Problem::T>(args, exchange);
  const ConvExtents e = conv_extents(args);
  problem.batch = args.shape.groups;
  problem.m = static_cast<int>(exchange ? e.n : e.m);
  problem.n = static_cast<int>(exchange ? e.m : e.n);
  problem.k = static_cast<int>(e.k);
}

// A is the patches (fprop and dgrad), or `exchange`d the filters, so that the result's columns are
// what lies closest in memory. wgrad: A is dy; there is nothing to exchange.
template <typename T, typename Offset>
PatchesFirst<T, Offset> patches_first(const Conv2dArgs& args) {
  PatchesFirst<T, Offset> problem{};
  problem.a = gather_input<T, Offset>(args);
  problem.b = gather_other<T, Offset>(args);
  set_result(problem, args, false);
  return problem;
}

template <typename T, typename Offset>
PatchesSecond<T, Offset> patches_second(const Conv2dArgs& args) {
  PatchesSecond<T, Offset> problem{};
  problem.a = gather_other<T, Offset>(args);
  problem.b = gather_input<T, Offset>(args);
  set_result(problem, args, args.pass != Conv2dPass::kWgrad);
  return problem;
}

}  // namespace braze::cuda
