#include "cpu/conv2d/side_by_side.h"

#include <cstring>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"

namespace braze::cpu {
namespace {

template <typename T>
void move_patch(T* image, T* matrix, const PatchExtents& extents, bool to_matrix) {
  const auto& [outer, middle, inner] = extents;
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

int64_t Patches::bytes() const {
  const Conv2dShape& s = problem_.shape;
  const int64_t elements = is_matrix() ? 0 : s.n * s.p * s.q * weights_of_filter(s);
  return ceil_div(elements * size_of(s.dtype), int64_t{64}) * 64;
}

Conv2dProblem Patches::product(void* matrix) const {
  const int64_t row = weights_of_filter(problem_.shape);
  Conv2dProblem result = problem_;
  result.shape = shape_of_patches(problem_.shape, row);
  result.x = patches_at(problem_.shape, is_matrix() ? problem_.x.data : matrix, row);
  result.w = {problem_.w.data, row, 1, row, row};
  return result;
}

void Patches::move(void* matrix) const {
  if (is_matrix()) return;
  const Conv2dShape& s = problem_.shape;
  const Tensor4dRef& x = problem_.x;
  const PatchExtents extents = patch_extents(s, x, problem_.w);
  const bool to_matrix = problem_.pass != Conv2dPass::kDgrad;
  const int64_t row = weights_of_filter(s), of_line = s.q * row;
  dispatch(s.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* const image = static_cast<T*>(const_cast<void*>(x.data));
    parallel_for(0, s.n * s.p, ceil_div(int64_t{32768}, of_line + 1),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t line = begin; line < end; ++line) {
                     T* const from = image + line / s.p * x.n + line % s.p * s.r * x.h;
                     T* const to = static_cast<T*>(matrix) + line * of_line;
                     for (int64_t q = 0; q < s.q; ++q) {
                       move_patch(from + q * s.s * x.w, to + q * row, extents, to_matrix);
                     }
                   }
                 });
  });
}

}  // namespace braze::cpu
