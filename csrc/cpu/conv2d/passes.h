// The passes of a convolution as the kernels see them: fprop and dgrad are convolutions, a strided
// dgrad a set of them, one for each residue of the input position, with the taps that reach it.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/conv2d/window.h"
#include "launchers/conv2d.h"

namespace braze::cpu {

// dst[image, group * filters + f, i, j] = bias + sum over channels c and taps (th, tw) of
//     src[image, group * channels + c, window(h, i, th), window(w, j, tw)] * weight.
struct Convolution {
  int64_t images, groups, channels, filters;  // channels and filters of one group
  Axis h, w;
  Tensor4dRef src;
  // Element (filter, channel, tap): its four strides, and the filter coordinate of each tap.
  const void* weight;
  int64_t weight_group, weight_filter, weight_channel, weight_h, weight_w;
  std::vector<int64_t> tap_h, tap_w;
  void* dst;
  Tensor4dRef dst_strides;
  const void* bias;

  int64_t taps() const { return h.taps() * w.taps(); }
};

// One image of a convolution, for what is done again.
inline Convolution image_of(const Convolution& conv, int64_t image, DType dtype) {
  Convolution one = conv;
  one.images = 1;
  one.src.data = static_cast<const char*>(conv.src.data) + image * conv.src.n * size_of(dtype);
  one.dst = static_cast<char*>(conv.dst) + image * conv.dst_strides.n * size_of(dtype);
  return one;
}

struct WeightGradient {
  int64_t images, groups, channels, filters;  // channels and filters of one group
  Axis h, w;
  Tensor4dRef x, dy, dw;  // dw: the result
};

inline std::vector<int64_t> shifts(int64_t taps, int64_t dilation, int64_t pad) {
  std::vector<int64_t> result;
  for (int64_t t = 0; t < taps; ++t) result.push_back(t * dilation - pad);
  return result;
}

inline std::vector<int64_t> iota(int64_t n) {
  std::vector<int64_t> result;
  for (int64_t i = 0; i < n; ++i) result.push_back(i);
  return result;
}

inline Convolution fprop_of(const Conv2dProblem& problem, const void* bias) {
  const auto& [pass, s, x, w, y] = problem;
  const int64_t filters = s.k / s.groups;
  return {s.n,
          s.groups,
          s.c / s.groups,
          filters,
          Axis(s.p, s.stride_h, s.h, shifts(s.r, s.dilation_h, s.pad_h)),
          Axis(s.q, s.stride_w, s.w, shifts(s.s, s.dilation_w, s.pad_w)),
          x,
          w.data,
          filters * w.n,
          w.n,
          w.c,
          w.h,
          w.w,
          iota(s.r),
          iota(s.s),
          const_cast<void*>(y.data),
          y,
          bias};
}

// The input positions first, first + stride, ... and the taps that reach them, with the shift from
// there to the output position they come from.
struct Residue {
  Residue(int64_t first, int64_t extent, int64_t out, int64_t stride, int64_t pad, int64_t taps,
          int64_t dilation)
      : positions(ceil_div(extent - first, stride)), out(out) {
    for (int64_t t = 0; t < taps; ++t) {
      const int64_t distance = first + pad - t * dilation;
      if (distance % stride != 0) continue;
      tap.push_back(t);
      shift.push_back(distance / stride);
    }
  }
  Axis axis() const { return Axis(positions, 1, out, shift); }

  int64_t positions, out;
  std::vector<int64_t> tap, shift;
};

// Calls f(convolution) for each residue of the input position modulo the stride.
template <typename F>
void for_each_dgrad(const Conv2dProblem& problem, const void* bias, const F& f) {
  const auto& [pass, s, dx, w, dy] = problem;
  const int64_t channels = s.c / s.groups, filters = s.k / s.groups;
  for (int64_t i = 0; i < std::min(s.stride_h, s.h); ++i) {
    const Residue h(i, s.h, s.p, s.stride_h, s.pad_h, s.r, s.dilation_h);
    for (int64_t j = 0; j < std::min(s.stride_w, s.w); ++j) {
      const Residue v(j, s.w, s.q, s.stride_w, s.pad_w, s.s, s.dilation_w);
      // At this point of the residue, in units of the element size.
      char* to =
          static_cast<char*>(const_cast<void*>(dx.data)) + (i * dx.h + j * dx.w) * size_of(s.dtype);
      const Tensor4dRef strides{to, dx.n, dx.c, dx.h * s.stride_h, dx.w * s.stride_w};
      f(Convolution{s.n, s.groups, filters, channels, h.axis(), v.axis(), dy, w.data, filters * w.n,
                    w.c, w.n, w.h, w.w, h.tap, v.tap, to, strides, bias});
    }
  }
}

// Calls f(convolution) for each that fprop or dgrad consists of.
template <typename F>
void with_convolutions(const Conv2dProblem& problem, const void* bias, const F& f) {
  if (problem.pass == Conv2dPass::kFprop) return f(fprop_of(problem, bias));
  for_each_dgrad(problem, bias, f);
}

inline std::vector<Convolution> convolutions_of(const Conv2dProblem& problem, const void* bias) {
  std::vector<Convolution> result;
  with_convolutions(problem, bias, [&](const Convolution& conv) { result.push_back(conv); });
  return result;
}

inline WeightGradient wgrad_of(const Conv2dProblem& problem) {
  const auto& [pass, s, x, dw, dy] = problem;
  return {s.n,
          s.groups,
          s.c / s.groups,
          s.k / s.groups,
          Axis(s.p, s.stride_h, s.h, shifts(s.r, s.dilation_h, s.pad_h)),
          Axis(s.q, s.stride_w, s.w, shifts(s.s, s.dilation_w, s.pad_w)),
          x,
          dy,
          dw};
}

}  // namespace braze::cpu
