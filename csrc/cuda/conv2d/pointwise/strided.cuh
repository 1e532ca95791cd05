// Every s-th pixel of images, in either direction, side by side, and back again with zeros between:
// what a 1 x 1 convolution of stride s has to do with its input before the product, and with its
// input's gradient behind it. Where that gradient is added to another one, the latter is what lies
// between.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"

namespace braze::cuda::pointwise {

// Where a unit of the large grid lies, and where the one that it comes from, or -1.
struct SmallPixel {
  int64_t large, small;
};

// `planes` grids of rows x columns x units, units of 2 to 16 bytes: of channels-last images pixels
// are many units, and planes images; of contiguous ones a pixel is a unit, and planes are channels.
// Of the small grid, dense, element (p, q) is (stride_h p, stride_w q) of the large one.
struct Grids {
  FastDiv small_rows, small_columns, large_rows, large_columns, units;
  FastDiv stride_h, stride_w;
  int64_t plane, row, column;  // strides of the large grid, in units
  int64_t planes;

  __device__ __forceinline__ int64_t large(int64_t p, int h, int w, int u) const {
    return p * plane + h * row + w * column + u;
  }
  // Of the large grid's pixel i, in order over all images, channels last: the small grid's, or -1.
  __device__ __forceinline__ int64_t small_pixel_of(int i) const {
    int w, h;
    const int image = large_rows.div(large_columns.div(i, w), h);
    return small_pixel_at(image, h, w);
  }
  __device__ __forceinline__ int64_t small_pixel_at(int64_t p, int h, int w) const {
    int rest_h, rest_w;
    const int small_h = stride_h.div(h, rest_h), small_w = stride_w.div(w, rest_w);
    const bool counts = rest_h == 0 && rest_w == 0 && small_h < small_rows.divisor() &&
                        small_w < small_columns.divisor();
    return counts ? (p * small_rows.divisor() + small_h) * small_columns.divisor() + small_w : -1;
  }
  // Unit i of the large grid's plane p, in order.
  __device__ __forceinline__ SmallPixel small_pixel(int64_t p, int i) const {
    int u, w;
    const int h = large_columns.div(units.div(i, u), w);
    const int64_t pixel = small_pixel_at(p, h, w);
    return {large(p, h, w, u), pixel < 0 ? -1 : pixel * units.divisor() + u};
  }
};

template <typename Unit>
__global__ void __launch_bounds__(256)
    gather_pixels_kernel(const __grid_constant__ Grids g, const Unit* large,
                         Unit* __restrict__ small) {
  wait_for_earlier_kernels();
  const int inner = g.small_rows.divisor() * g.small_columns.divisor() * g.units.divisor();
  for (int64_t plane = blockIdx.y; plane < g.planes; plane += gridDim.y) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < inner; i += gridDim.x * blockDim.x) {
      int u, w;
      const int h = g.small_columns.div(g.units.div(i, u), w);
      small[plane * inner + i] =
          large[g.large(plane, h * g.stride_h.divisor(), w * g.stride_w.divisor(), u)];
    }
  }
}

template <typename Unit>
__global__ void __launch_bounds__(256)
    spread_pixels_kernel(const __grid_constant__ Grids g, const Unit* small,
                         Unit* __restrict__ large) {
  wait_for_earlier_kernels();
  const int inner = g.large_rows.divisor() * g.large_columns.divisor() * g.units.divisor();
  for (int64_t plane = blockIdx.y; plane < g.planes; plane += gridDim.y) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < inner; i += gridDim.x * blockDim.x) {
      const SmallPixel from = g.small_pixel(plane, i);
      Unit value{};
      if (from.small >= 0) value = small[from.small];
      large[from.large] = value;
    }
  }
}

// large = added, which lies as it does, and `small` where there is a pixel of it; a unit is a
// vector of N elements.
template <typename T, int N>
__global__ void __launch_bounds__(256)
    add_pixels_kernel(const __grid_constant__ Grids g, const Vec<T, N>* small,
                      const Vec<T, N>* __restrict__ added, Vec<T, N>* __restrict__ large) {
  wait_for_earlier_kernels();
  const int inner = g.large_rows.divisor() * g.large_columns.divisor() * g.units.divisor();
  for (int64_t plane = blockIdx.y; plane < g.planes; plane += gridDim.y) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < inner; i += gridDim.x * blockDim.x) {
      const SmallPixel from = g.small_pixel(plane, i);
      Vec<T, N> sum = added[from.large];
      if (from.small >= 0) {
        const Vec<T, N> own = small[from.small];
#pragma unroll
        for (int k = 0; k < N; ++k) {
          using A = acc_t<T>;
          sum.v[k] = convert<T>(convert<A>(sum.v[k]) + convert<A>(own.v[k]));
        }
      }
      large[from.large] = sum;
    }
  }
}

// Bytes of a unit of `count` elements of `size` bytes whose strides are these: as many as divide
// all.
inline int unit_bytes(int64_t size, int64_t count, std::initializer_list<int64_t> strides,
                      const void* large, const void* small) {
  int64_t bytes = 16;
  const auto divides = [&] {
    bool all = count * size % bytes == 0 && reinterpret_cast<uintptr_t>(large) % bytes == 0 &&
               reinterpret_cast<uintptr_t>(small) % bytes == 0;
    for (const int64_t stride : strides) all = all && stride * size % bytes == 0;
    return all;
  };
  while (bytes > size && !divides()) bytes /= 2;
  return static_cast<int>(bytes);
}

constexpr int kThreads = 256;

// Of a kernel whose threads take the units of a grid's plane of so many rows and columns.
inline dim3 grid_of(const Grids& g, int64_t rows, int64_t columns) {
  const int64_t blocks = ceil_div(rows * columns * g.units.divisor(), kThreads);
  const int64_t most = int64_t{sm_count()} * 8;
  return dim3(static_cast<unsigned>(std::min(blocks, most)),
              static_cast<unsigned>(std::clamp(g.planes, int64_t{1}, int64_t{65535})));
}

template <typename Unit>
void launch_pixels(Stream stream, const Grids& g, const void* large, void* small, bool spread) {
  const dim3 grid = spread ? grid_of(g, g.large_rows.divisor(), g.large_columns.divisor())
                           : grid_of(g, g.small_rows.divisor(), g.small_columns.divisor());
  auto* const to = static_cast<Unit*>(const_cast<void*>(large));
  if (spread) {
    launch_early(spread_pixels_kernel<Unit>, grid, kThreads, 0, stream, g,
                 static_cast<const Unit*>(small), to);
  } else {
    launch_early(gather_pixels_kernel<Unit>, grid, kThreads, 0, stream, g,
                 static_cast<const Unit*>(to), static_cast<Unit*>(small));
  }
  check_launch("conv2d pointwise stride");
}

template <typename T>
void launch_added_pixels(Stream stream, const Grids& g, const void* large, const void* added,
                         const void* small) {
  using V = Vec<T, kVecWidth<T>>;
  launch_early(add_pixels_kernel<T, kVecWidth<T>>,
               grid_of(g, g.large_rows.divisor(), g.large_columns.divisor()), kThreads, 0, stream,
               g, static_cast<const V*>(small), static_cast<const V*>(added),
               static_cast<V*>(const_cast<void*>(large)));
  check_launch("conv2d pointwise stride, added");
}

}  // namespace braze::cuda::pointwise
