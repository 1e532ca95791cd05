// Non-overlapping 2 x 2 windows that cover the plane: the pooling of most small networks. A thread
// loads whole windows and, backward, stores whole windows: every byte crosses the bus once.
//
// NCHW: rows 2i and 2i + 1 of the input lie behind one another over all planes, so the tensor is
// row pairs of 2 x 2q elements and a thread takes V windows of a pair. kUnroll such steps are in
// flight per thread, since a step is only 4 bytes a row where rows are not multiples of 16 bytes.
// NHWC: a thread takes 16 bytes of channels of one window.
#pragma once

#include "window.cuh"

namespace braze::cuda {

constexpr int kUnroll = 4;

// Forward: op(window, i) stores the result of window `i`, given its four elements in reading order.
template <typename T, int V, typename Op>
__global__ void __launch_bounds__(kPoolThreads)
    reduce_row_pairs_kernel(Op op, const T* __restrict__ x, uint32_t steps, FastDiv row_steps,
                            int64_t width) {
  const uint32_t first = blockIdx.x * (kPoolThreads * kUnroll) + threadIdx.x;
  Vec<T, 2 * V> top[kUnroll], bottom[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint32_t step = first + u * kPoolThreads;
    if (step >= steps) break;
    int in_row;
    const int64_t pair = row_steps.div(static_cast<int>(step), in_row);
    const T* row = x + pair * 2 * width + in_row * (2 * V);
    top[u] = load_vec<2 * V>(row);
    bottom[u] = load_vec<2 * V>(row + width);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint32_t step = first + u * kPoolThreads;
    if (step >= steps) break;
    T windows[V][4];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      windows[v][0] = top[u].v[2 * v];
      windows[v][1] = top[u].v[2 * v + 1];
      windows[v][2] = bottom[u].v[2 * v];
      windows[v][3] = bottom[u].v[2 * v + 1];
    }
    op(windows, int64_t{step} * V);
  }
}

// Backward: op(i, windows) gives the four input gradients of each of V windows from `i` on.
template <typename T, int V, typename Op>
__global__ void __launch_bounds__(kPoolThreads)
    spread_row_pairs_kernel(Op op, T* __restrict__ dx, uint32_t steps, FastDiv row_steps,
                            int64_t width) {
  const uint32_t first = blockIdx.x * (kPoolThreads * kUnroll) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint32_t step = first + u * kPoolThreads;
    if (step >= steps) break;
    T windows[V][4];
    op(int64_t{step} * V, windows);
    Vec<T, 2 * V> top, bottom;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      top.v[2 * v] = windows[v][0];
      top.v[2 * v + 1] = windows[v][1];
      bottom.v[2 * v] = windows[v][2];
      bottom.v[2 * v + 1] = windows[v][3];
    }
    int in_row;
    const int64_t pair = row_steps.div(static_cast<int>(step), in_row);
    T* row = dx + pair * 2 * width + in_row * (2 * V);
    store_vec(row, top);
    store_vec(row + width, bottom);
  }
}

template <typename T, int N, typename Op, typename Split>
__global__ void __launch_bounds__(kPoolThreads)
    reduce_pixels_kernel(Op op, const T* __restrict__ x, int64_t count, Split split,
                         Window window) {
  const int64_t i = global_thread();
  if (i >= count) return;
  int64_t image;
  int p, q, group;
  split(i, &image, &p, &q, &group);
  const T* corner = x + window.input_offset(image, 2 * p, 2 * q) + group * N;
  const int64_t row = window.w * window.depth;
  const Vec<T, N> v[4] = {load_vec<N>(corner), load_vec<N>(corner + window.depth),
                          load_vec<N>(corner + row), load_vec<N>(corner + row + window.depth)};
  T windows[N][4];
#pragma unroll
  for (int k = 0; k < N; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) windows[k][j] = v[j].v[k];
  }
  op(windows, i * N);
}

template <typename T, int N, typename Op, typename Split>
__global__ void __launch_bounds__(kPoolThreads)
    spread_pixels_kernel(Op op, T* __restrict__ dx, int64_t count, Split split, Window window) {
  const int64_t i = global_thread();
  if (i >= count) return;
  int64_t image;
  int p, q, group;
  split(i, &image, &p, &q, &group);
  T windows[N][4];
  op(i * N, windows);
  T* corner = dx + window.input_offset(image, 2 * p, 2 * q) + group * N;
  const int64_t row = window.w * window.depth;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    Vec<T, N> v;
#pragma unroll
    for (int k = 0; k < N; ++k) v.v[k] = windows[k][j];
    store_vec(corner + (j / 2) * row + (j % 2) * window.depth, v);
  }
}

// Calls f(V) with the windows a thread takes of a row of `q`: as many as a 16-byte access holds
// and divide the row. `aligned`: the input tensor is to 16 bytes, the results are to their vectors.
template <typename T, typename F>
void with_row_vectors(int64_t q, bool aligned, const F& f) {
  constexpr int kMost = kVecWidth<T> / 2;
  if constexpr (kMost >= 4) {
    if (aligned && q % 4 == 0) return f(std::integral_constant<int, 4>{});
  }
  if constexpr (kMost >= 2) {
    if (aligned && q % 2 == 0) return f(std::integral_constant<int, 2>{});
  }
  f(std::integral_constant<int, 1>{});
}

// Whether the kernels of this file take the arguments: `plane` is the larger tensor (x or dx), of
// which a thread accesses at least two adjacent elements at once.
template <typename T>
bool takes_exact_2x2(const Pool2dShape& shape, const T* plane) {
  return shape.is_exact_2x2() && shape.output_count() < (int64_t{1} << 31) &&
         (shape.channels_last || reinterpret_cast<uintptr_t>(plane) % (2 * sizeof(T)) == 0);
}

// Calls row_pairs(V, blocks, steps, row_steps) or pixels(N, blocks, count, split), which launch the
// kernels above.
template <typename T, typename RowPairs, typename Pixels>
void launch_exact_2x2(const Pool2dShape& shape, bool aligned, const RowPairs& row_pairs,
                      const Pixels& pixels) {
  if (shape.channels_last) {
    with_depth_vectors<T>(shape.c, aligned, [&](auto width) {
      constexpr int N = decltype(width)::value;
      const int64_t count = shape.output_count() / N;
      pixels(width, pool_blocks(count), count, Split<FastDiv, int>(shape.c / N, shape.q, shape.p));
    });
  } else {
    with_row_vectors<T>(shape.q, aligned, [&](auto width) {
      constexpr int V = decltype(width)::value;
      const int64_t steps = shape.output_count() / V;
      row_pairs(width, pool_blocks(ceil_div(steps, kUnroll)), static_cast<uint32_t>(steps),
                FastDiv(shape.q / V));
    });
  }
}

// One result for each window of x, by op(four elements of each of V windows, where the results go).
template <typename T, typename Op>
void reduce_exact_2x2(Stream stream, const Pool2dShape& shape, bool aligned, const Op& op,
                      const T* x) {
  const cudaStream_t s = as_cuda(stream);
  launch_exact_2x2<T>(
      shape, aligned,
      [&](auto width, unsigned int blocks, uint32_t steps, FastDiv row_steps) {
        reduce_row_pairs_kernel<T, decltype(width)::value>
            <<<blocks, kPoolThreads, 0, s>>>(op, x, steps, row_steps, shape.w);
      },
      [&](auto width, unsigned int blocks, int64_t count, auto split) {
        reduce_pixels_kernel<T, decltype(width)::value>
            <<<blocks, kPoolThreads, 0, s>>>(op, x, count, split, Window(shape));
      });
}

// The way back: four elements of dx for each window.
template <typename T, typename Op>
void spread_exact_2x2(Stream stream, const Pool2dShape& shape, bool aligned, const Op& op, T* dx) {
  const cudaStream_t s = as_cuda(stream);
  launch_exact_2x2<T>(
      shape, aligned,
      [&](auto width, unsigned int blocks, uint32_t steps, FastDiv row_steps) {
        spread_row_pairs_kernel<T, decltype(width)::value>
            <<<blocks, kPoolThreads, 0, s>>>(op, dx, steps, row_steps, shape.w);
      },
      [&](auto width, unsigned int blocks, int64_t count, auto split) {
        spread_pixels_kernel<T, decltype(width)::value>
            <<<blocks, kPoolThreads, 0, s>>>(op, dx, count, split, Window(shape));
      });
}

}  // namespace braze::cuda
