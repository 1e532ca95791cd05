#pragma once

#include <cmath>

#include "launchers/common/both.h"
#include "launchers/common/types.h"

namespace braze {

// torch's modes; corners: the outermost elements keep their places.
enum class UpsampleMode { kNearest, kNearestExact, kBilinear, kBilinearCorners };

// How an axis of `in` elements becomes one of `out`. Result i is
// (1 - weight) * input[first] + weight * input[second]; places are found in A, which is float of
// nearest elements in all dtypes, as torch's are. They never fall from one result to the next.
template <typename A>
struct UpsampleAxis {
  struct Source {
    int first, second;
    A weight;
  };

  UpsampleMode mode;
  int in, out;
  A scale, inverse;  // elements of the input from one result to the next, and the other way

  BRAZE_BOTH bool is_bilinear() const { return mode >= UpsampleMode::kBilinear; }

  // In elements of the input.
  BRAZE_BOTH A place_of(int i) const {
    switch (mode) {
      case UpsampleMode::kNearest: return std::floor(static_cast<A>(i) * scale);
      case UpsampleMode::kNearestExact: return std::floor((static_cast<A>(i) + A(0.5)) * scale);
      case UpsampleMode::kBilinearCorners: return static_cast<A>(i) * scale;
      default: {
        const A place = std::fma(scale, static_cast<A>(i) + A(0.5), A(-0.5));
        return place < 0 ? A(0) : place;
      }
    }
  }
  BRAZE_BOTH int first_of(int i) const { return at_most_last(place_of(i)); }
  BRAZE_BOTH Source source_of(int i) const {
    const A place = place_of(i);
    const int first = at_most_last(place);
    if (!is_bilinear()) return {first, first, A(0)};
    return {first, first + (first < in - 1), place - static_cast<A>(first)};
  }

  // The first result whose source begins at `at` or behind it.
  BRAZE_BOTH int first_from(int at) const {
    if (at <= 0) return 0;
    if (at >= in) return out;
    const A centre =
        mode == UpsampleMode::kNearestExact || mode == UpsampleMode::kBilinear ? A(0.5) : A(0);
    const A shifted =
        mode == UpsampleMode::kBilinear ? static_cast<A>(at) + A(0.5) : static_cast<A>(at);
    const A guess = shifted * inverse - centre;
    int i = guess < static_cast<A>(out) ? static_cast<int>(guess) : out;
    while (i > 0 && first_of(i - 1) >= at) --i;
    while (i < out && first_of(i) < at) ++i;
    return i;
  }
  // The results that input element `at` is part of: from begin_of() to end_of().
  BRAZE_BOTH int begin_of(int at) const { return first_from(is_bilinear() ? at - 1 : at); }
  BRAZE_BOTH int end_of(int at) const { return first_from(at + 1); }
  // What it weighs in result i, which is one of these.
  BRAZE_BOTH A share_of(int at, int i) const {
    const Source source = source_of(i);
    return (source.first == at ? A(1) - source.weight : A(0)) +
           (source.second == at ? source.weight : A(0));
  }

 private:
  BRAZE_BOTH int at_most_last(A place) const {
    return place < static_cast<A>(in - 1) ? static_cast<int>(place) : in - 1;
  }
};

struct Upsample2dShape {
  DType dtype;   // of the input and its gradient
  DType result;  // of the result and its gradient: the same, or float32 beside 16 bits
  UpsampleMode mode;
  int64_t n, c, h, w, p, q;
  double scale_h, scale_w;  // elements of the input from one result to the next
  bool channels_last;       // all tensors in NHWC order in memory, else NCHW

  int64_t output_count() const { return n * c * p * q; }
  int64_t input_count() const { return n * c * h * w; }
  // Both layouts as one: `images` x height x width x `depth` adjacent elements.
  int64_t images() const { return channels_last ? n : n * c; }
  int64_t depth() const { return channels_last ? c : 1; }

  bool is_bilinear() const { return mode >= UpsampleMode::kBilinear; }
  template <typename A>
  UpsampleAxis<A> rows() const {
    return axis<A>(h, p, scale_h);
  }
  template <typename A>
  UpsampleAxis<A> columns() const {
    return axis<A>(w, q, scale_w);
  }

 private:
  template <typename A>
  UpsampleAxis<A> axis(int64_t in, int64_t out, double scale) const {
    const A step = static_cast<A>(scale);
    return {mode, static_cast<int>(in), static_cast<int>(out), step, step > 0 ? A(1) / step : A(0)};
  }
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// Sums are kept in fp32 for 16-bit elements.
void upsample2d(Stream stream, const Upsample2dShape& shape, const void* x, void* y);
void upsample2d_backward(Stream stream, const Upsample2dShape& shape, const void* dy, void* dx);

}  // namespace braze::BRAZE_DEVICE
