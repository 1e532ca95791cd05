// Max pooling's backward for windows of up to 3 x 3 that begin in every second row and column: as
// in ResNets, and 2 x 2 ones that leave a row over. A thread makes the gradients of 2 x 2 inputs
// from the at most four windows that reach them, and so reads 1.5 bytes for each that it writes
// where a thread for each input would read 3.4; all reads are under way before the first is used.
#pragma once

#include "window.cuh"

namespace braze::cuda {

inline bool takes_stride_2(const Window& w) {
  return w.stride_h == 2 && w.stride_w == 2 && w.dilation_h == 1 && w.dilation_w == 1 && w.r <= 3 &&
         w.s <= 3;
}

// How many blocks of 2 x 2 inputs there are along an axis. The first begins `pad` before the input,
// with the first window.
inline int64_t pairs_along(int64_t extent, int64_t pad) { return ceil_div(extent + pad, 2); }

// The gradients of 2 x 2 inputs, of N channels from `channel` on, in block (a, b) of an image:
// f(offset, sums) for each that lies in the plane. load_grads(p, q) has those of a window's result.
// kReach: windows along an axis that reach a pair of inputs, 2 if any has three taps.
template <typename T, int N, int kReach, typename Load, typename F>
__device__ __forceinline__ void stride_2_gradients(const Window& window, const uint8_t* taps,
                                                   int64_t image, int a, int b, int64_t channel,
                                                   const Load& load_grads, const F& f) {
  // Of windows p = a - up, q = b - left.
  Vec<T, N> grads[kReach][kReach];
  Vec<uint8_t, N> chosen[kReach][kReach];
#pragma unroll
  for (int up = 0; up < kReach; ++up) {
#pragma unroll
    for (int left = 0; left < kReach; ++left) {
      const int p = a - up, q = b - left;
      if (p >= 0 && p < window.p && q >= 0 && q < window.q) {
        grads[up][left] = load_grads(p, q);
        chosen[up][left] = load_vec<N>(taps + window.output_offset(image, p, q) + channel);
      } else {
#pragma unroll
        for (int k = 0; k < N; ++k) {
          grads[up][left].v[k] = convert<T>(acc_t<T>(0)), chosen[up][left].v[k] = kNoTap;
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int row = j / 2, column = j % 2;
    const int h = 2 * a - window.pad_h + row, w = 2 * b - window.pad_w + column;
    if (h < 0 || h >= window.h || w < 0 || w >= window.w) continue;
    acc_t<T> sum[N] = {};
    // From the first window to the last, as other kernels add.
#pragma unroll
    for (int up = kReach - 1; up >= 0; --up) {
#pragma unroll
      for (int left = kReach - 1; left >= 0; --left) {
        const int down = row + 2 * up, right = column + 2 * left;
        if (down >= window.r || right >= window.s) continue;
        const int tap = down * window.s + right;
#pragma unroll
        for (int k = 0; k < N; ++k) {
          if (chosen[up][left].v[k] == tap) sum[k] += convert<acc_t<T>>(grads[up][left].v[k]);
        }
      }
    }
    f(window.input_offset(image, h, w) + channel, sum);
  }
}

template <typename T, int N>
__device__ __forceinline__ void store_sums(T* to, const acc_t<T> (&sum)[N]) {
  Vec<T, N> result;
#pragma unroll
  for (int k = 0; k < N; ++k) result.v[k] = convert<T>(sum[k]);
  store_vec(to, result);
}

// `count` vectors of N elements for each pair of rows and columns.
template <typename T, int N, int kReach, typename Split>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_stride_2_backward_kernel(const T* __restrict__ dy, const uint8_t* __restrict__ taps,
                                        T* __restrict__ dx, int64_t count, Split split,
                                        Window window) {
  const int64_t i = global_thread();
  if (i >= count) return;
  int64_t image;
  int a, b, group;
  split(i, &image, &a, &b, &group);
  const auto load_grads = [&](int p, int q) {
    return load_vec<N>(dy + window.output_offset(image, p, q) + group * N);
  };
  stride_2_gradients<T, N, kReach>(
      window, taps, image, a, b, group * N, load_grads,
      [&](int64_t offset, const acc_t<T>(&sum)[N]) { store_sums<T>(dx + offset, sum); });
}

// aligned: all three, to 16 bytes.
template <typename T>
void max_pool2d_stride_2_backward(Stream stream, const Pool2dShape& shape, const Window& window,
                                  bool aligned, const T* dy, const uint8_t* taps, T* dx) {
  with_depth_vectors<T>(shape.depth(), aligned, [&](auto width) {
    constexpr int N = decltype(width)::value;
    const int64_t rows = pairs_along(window.h, window.pad_h);
    const int64_t columns = pairs_along(window.w, window.pad_w), groups = shape.depth() / N;
    const int64_t images = shape.input_count() / (shape.h * shape.w * shape.depth());
    const int64_t count = images * rows * columns * groups;
    with_split(count, groups, columns, rows, [&](auto split) {
      const auto kernel = std::max(window.r, window.s) > 2
                              ? max_pool2d_stride_2_backward_kernel<T, N, 2, decltype(split)>
                              : max_pool2d_stride_2_backward_kernel<T, N, 1, decltype(split)>;
      kernel<<<pool_blocks(count), kPoolThreads, 0, as_cuda(stream)>>>(dy, taps, dx, count, split,
                                                                       window);
    });
  });
}

}  // namespace braze::cuda
