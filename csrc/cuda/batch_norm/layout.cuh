// Which kernels a shape is for: those over planes or those over rows, and the width of vectors.
#pragma once

#include "planes.cuh"
#include "rows.cuh"

namespace braze::cuda {

// Calls f(N): the widest vector, up to 16 bytes, that divides `extent`.
template <typename T, typename F>
void with_vectors(int64_t extent, const F& f) {
  if constexpr (kVecWidth<T> >= 8) {
    if (extent % 8 == 0) return f(std::integral_constant<int, 8>{});
  }
  if constexpr (kVecWidth<T> >= 4) {
    if (extent % 4 == 0) return f(std::integral_constant<int, 4>{});
  }
  if (extent % 2 == 0) return f(std::integral_constant<int, 2>{});
  f(std::integral_constant<int, 1>{});
}

// Calls planes(N, shape, grid) or rows(N, rows, vectors of a row), whichever the layout asks for.
// of_sm: blocks of the kernel over planes that a multiprocessor has.
template <typename T, typename Planes, typename Rows>
void with_layout(const BatchNormShape& shape, int of_sm, const Planes& planes, const Rows& rows) {
  if (shape.channels_last) {
    with_vectors<T>(
        shape.c, [&](auto width) { rows(width, shape.count(), shape.c / decltype(width)::value); });
  } else {
    with_vectors<T>(shape.inner, [&](auto width) {
      const int splits =
          plane_splits_in_waves(shape.count() / decltype(width)::value, shape.c, of_sm);
      planes(width, PlaneShape{shape.n, shape.c, shape.inner, splits},
             dim3(static_cast<unsigned>(shape.c), static_cast<unsigned>(splits)));
    });
  }
}

// As with_layout, with the activation's code for the vectors behind the width.
template <typename T, typename Planes, typename Rows>
void with_layout_and_code(const BatchNormShape& shape, const Activation& activation, int of_sm,
                          const Planes& planes, const Rows& rows) {
  with_layout<T>(
      shape, of_sm,
      [&](auto width, const PlaneShape& plane_shape, dim3 grid) {
        with_activation_code<T, decltype(width)::value>(
            activation, [&](auto code) { planes(width, code, plane_shape, grid); });
      },
      [&](auto width, int64_t row_count, int64_t vectors) {
        with_activation_code<T, decltype(width)::value>(
            activation, [&](auto code) { rows(width, code, row_count, vectors); });
      });
}

constexpr int kCoefficientThreads = 128;

// Blocks of a kernel with a warp for each channel.
inline unsigned coefficient_blocks(int64_t channels) {
  return static_cast<unsigned>(ceil_div(channels, kCoefficientThreads / 32));
}

// Calls f(channel) in a warp of its own for each channel.
template <typename F>
__device__ void for_each_channel(int64_t channels, const F& f) {
  const int64_t c = (blockIdx.x * int64_t{kCoefficientThreads} + threadIdx.x) / 32;
  if (c < channels) f(c);
}

}  // namespace braze::cuda
