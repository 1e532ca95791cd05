#include "cpu/conv2d/side_by_side.h"

#include <cstring>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"

namespace braze::cpu {
namespace {

// Dimensions of a patch, the outermost first: as many elements, so far apart in the image.
struct Extent {
  int64_t count, stride;
};

template <typename T>
void move_patch(T* image, T* matrix, const Extent& outer, const Extent& middle, const Extent& inner,
                bool to_matrix) {
  for (int64_t a = 0; a < outer.count; ++a) {
    for (int64_t b = 0; b < middle.count; ++b, matrix += inner.count) {
      T* const at = image + a * outer.stride + b * middle.stride;
      if (inner.stride == 1) {
        std::memcpy(to_matrix ? matrix : at, to_matrix ? at : matrix, inner.count * sizeof(T));
      } else if (to_matrix) {
        for (int64_t i = 0; i < inner.count; ++i) matrix[i] = at[i * inner.stride];
      } else {
        for (int64_t i = 0; i < inner.count; ++i) at[i * inner.stride] = matrix[i];
      }
    }
  }
}

}  // namespace

int64_t Patches::weights() const {
  const Conv2dShape& s = problem_.shape;
  return s.r * s.s * s.c;
}

bool Patches::has_weights_channels_last() const {
  const Conv2dShape& s = problem_.shape;
  const Tensor4dRef& w = problem_.w;
  return w.c == 1 && w.w == s.c && w.h == s.s * s.c && w.n == weights();
}

bool Patches::has_weights_contiguous() const {
  const Conv2dShape& s = problem_.shape;
  const Tensor4dRef& w = problem_.w;
  return w.w == 1 && w.h == s.s && w.c == s.r * s.s && w.n == weights();
}

bool Patches::is_matrix() const {
  const Conv2dShape& s = problem_.shape;
  const Tensor4dRef& x = problem_.x;
  if (s.h != s.r || s.w != s.s || x.n != weights()) return false;
  return has_weights_channels_last() ? x.c == 1 && x.w == s.c && x.h == s.s * s.c
                                     : x.w == 1 && x.h == s.s && x.c == s.r * s.s;
}

const char* Patches::obstacle() const {
  const Conv2dShape& s = problem_.shape;
  const bool side_by_side = (s.stride_h == s.r || s.p == 1) && (s.stride_w == s.s || s.q == 1);
  if (s.r * s.s < 2 || !side_by_side || s.pad_h != 0 || s.pad_w != 0 || s.dilation_h != 1 ||
      s.dilation_w != 1 || s.groups != 1) {
    return "patches takes filters as large as the stride, no padding, no dilation, one group";
  }
  if (!has_weights_channels_last() && !has_weights_contiguous()) {
    return "patches takes dense weights";
  }
  if (problem_.pass == Conv2dPass::kDgrad && (s.h != s.p * s.r || s.w != s.q * s.s)) {
    return "patches takes input gradients of whole patches";
  }
  return nullptr;
}

int64_t Patches::bytes() const {
  const Conv2dShape& s = problem_.shape;
  const int64_t bytes = is_matrix() ? 0 : s.n * s.p * s.q * weights() * size_of(s.dtype);
  return ceil_div(bytes, int64_t{64}) * 64;
}

Conv2dProblem Patches::product(void* matrix) const {
  Conv2dProblem result = problem_;
  Conv2dShape& s = result.shape;
  const int64_t row = weights();
  s.c = row, s.h = s.p, s.w = s.q;
  s.r = s.s = s.stride_h = s.stride_w = 1;
  result.x = {is_matrix() ? problem_.x.data : matrix, s.p * s.q * row, 1, s.q * row, row};
  result.w = {problem_.w.data, row, 1, row, row};
  return result;
}

void Patches::move(void* matrix) const {
  if (is_matrix()) return;
  const Conv2dShape& s = problem_.shape;
  const Tensor4dRef& x = problem_.x;
  Extent outer{s.c, x.c}, middle{s.r, x.h}, inner{s.s, x.w};
  if (has_weights_channels_last()) {
    outer = {s.r, x.h}, middle = {s.s, x.w}, inner = {s.c, x.c};
    if (x.c == 1 && x.w == s.c) outer = {1, 0}, middle = {s.r, x.h}, inner = {s.s * s.c, 1};
  }
  const bool to_matrix = problem_.pass != Conv2dPass::kDgrad;
  const int64_t of_line = s.q * weights();
  dispatch(s.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* const image = static_cast<T*>(const_cast<void*>(x.data));
    parallel_for(
        0, s.n * s.p, ceil_div(int64_t{32768}, of_line + 1), [&](int64_t begin, int64_t end) {
          for (int64_t line = begin; line < end; ++line) {
            T* const from = image + line / s.p * x.n + line % s.p * s.r * x.h;
            T* const to = static_cast<T*>(matrix) + line * of_line;
            for (int64_t q = 0; q < s.q; ++q) {
              move_patch(from + q * s.s * x.w, to + q * weights(), outer, middle, inner, to_matrix);
            }
          }
        });
  });
}

}  // namespace braze::cpu
