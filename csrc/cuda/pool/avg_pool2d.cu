// Average pooling: sums in fp32 (fp64 for fp64), one division a window. Backward gathers, as max
// pooling does.
#include "exact_2x2.cuh"
#include "launchers/common/registry.h"
#include "window.cuh"

namespace braze::cuda {
namespace {

__device__ __forceinline__ int64_t divisor_of(const Window& window, const AvgPoolDivisor& divisor,
                                              int p, int q) {
  if (divisor.divisor_override != 0) return divisor.divisor_override;
  if (divisor.count_include_pad) {
    return padded_extent(p, window.stride_h, window.pad_h, window.r, window.h) *
           padded_extent(q, window.stride_w, window.pad_w, window.s, window.w);
  }
  return inner_extent(p, window.stride_h, window.pad_h, window.r, window.h) *
         inner_extent(q, window.stride_w, window.pad_w, window.s, window.w);
}

template <typename T, int N, typename Split>
__global__ void __launch_bounds__(kPoolThreads)
    avg_pool2d_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t count, Split split,
                      Window window, AvgPoolDivisor divisor) {
  const int64_t i = global_thread();
  if (i >= count) return;
  int64_t image;
  int p, q, group;
  split(i, &image, &p, &q, &group);
  const int h0 = p * window.stride_h - window.pad_h, w0 = q * window.stride_w - window.pad_w;
  const int h_end = min(h0 + window.r, window.h), w_end = min(w0 + window.s, window.w);
  acc_t<T> sum[N] = {};
  for (int h = max(h0, 0); h < h_end; ++h) {
    for (int w = max(w0, 0); w < w_end; ++w) {
      const Vec<T, N> v = load_vec<N>(x + window.input_offset(image, h, w) + group * N);
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += convert<acc_t<T>>(v.v[k]);
    }
  }
  const acc_t<T> d = static_cast<acc_t<T>>(divisor_of(window, divisor, p, q));
  Vec<T, N> result;
#pragma unroll
  for (int k = 0; k < N; ++k) result.v[k] = convert<T>(sum[k] / d);
  store_vec(y + i * N, result);
}

// Up to how many windows an element is in along each axis, of those whose gradients a thread asks
// for all at once: 3 x 3 windows of 64 x 64 x 56 x 56 in fp32, one after the other and with a
// division for each element, took 70 us where a copy takes 27 (H200).
constexpr int kFewWindows = 3;

// kMost: how many there are along each axis at most, 1 or kFewWindows; 0: any number.
template <int kMost, typename T, int N, typename Split>
__global__ void __launch_bounds__(kPoolThreads)
    avg_pool2d_backward_kernel(const T* __restrict__ dy, T* __restrict__ dx, int64_t count,
                               Split split, Window window, AvgPoolDivisor divisor) {
  using A = acc_t<T>;
  const int64_t i = global_thread();
  if (i >= count) return;
  int64_t image;
  int h, w, group;
  split(i, &image, &h, &w, &group);
  int p0, p1, q0, q1;
  covering_windows(h, window.by_stride_h, window.pad_h, 1, window.r, window.p, &p0, &p1);
  covering_windows(w, window.by_stride_w, window.pad_w, 1, window.s, window.q, &q0, &q1);
  A sum[N] = {};
  const auto load = [&](int p, int q) {
    return load_vec<N>(dy + window.output_offset(image, p, q) + group * N);
  };
  const auto add = [&](int p, int q, const Vec<T, N>& grad) {
    const A by = A(1) / static_cast<A>(divisor_of(window, divisor, p, q));
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] += convert<A>(grad.v[k]) * by;
  };
  if constexpr (kMost > 0) {
    Vec<T, N> grads[kMost][kMost];
    const auto each = [&](const auto& f) {
#pragma unroll
      for (int a = 0; a < kMost; ++a) {
#pragma unroll
        for (int b = 0; b < kMost; ++b) {
          if (p0 + a <= p1 && q0 + b <= q1) f(p0 + a, q0 + b, grads[a][b]);
        }
      }
    };
    each([&](int p, int q, Vec<T, N>& grad) { grad = load(p, q); });
    each(add);
  } else {
    for (int p = p0; p <= p1; ++p) {
      for (int q = q0; q <= q1; ++q) add(p, q, load(p, q));
    }
  }
  Vec<T, N> result;
#pragma unroll
  for (int k = 0; k < N; ++k) result.v[k] = convert<T>(sum[k]);
  store_vec(dx + i * N, result);
}

template <typename T>
struct MeanOf2x2 {
  T* y;
  acc_t<T> divisor;

  template <int V>
  __device__ void operator()(const T (&windows)[V][4], int64_t i) const {
    Vec<T, V> result;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      acc_t<T> sum = convert<acc_t<T>>(windows[v][0]);
#pragma unroll
      for (int j = 1; j < 4; ++j) sum += convert<acc_t<T>>(windows[v][j]);
      result.v[v] = convert<T>(sum / divisor);
    }
    store_vec(y + i, result);
  }
};

template <typename T>
struct MeanOf2x2Backward {
  const T* dy;
  acc_t<T> divisor;

  template <int V>
  __device__ void operator()(int64_t i, T (&windows)[V][4]) const {
    const Vec<T, V> grad = load_vec<V>(dy + i);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const T share = convert<T>(convert<acc_t<T>>(grad.v[v]) / divisor);
#pragma unroll
      for (int j = 0; j < 4; ++j) windows[v][j] = share;
    }
  }
};

template <typename T>
acc_t<T> exact_2x2_divisor(const AvgPoolDivisor& divisor) {
  return static_cast<acc_t<T>>(divisor.divisor_override != 0 ? divisor.divisor_override : 4);
}

const KernelEntry kExactEntry({"avg_pool2d", "exact_2x2", "float64 float32 bfloat16 float16",
                               "sm_80+", true, "2 x 2 windows, stride 2: each byte moved once"});
const KernelEntry kEntry({"avg_pool2d", "gather", "float64 float32 bfloat16 float16", "sm_80+",
                          true, "any window; 16 bytes of channels per thread where NHWC"});

}  // namespace

void avg_pool2d(Stream stream, const Pool2dShape& shape, const AvgPoolDivisor& divisor,
                const void* x, void* y) {
  if (shape.output_count() == 0) return;
  const Window window(shape);
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    const bool aligned = is_vec_aligned(in) && is_vec_aligned(out);
    if (takes_exact_2x2(shape, in)) {
      const MeanOf2x2<T> op{out, exact_2x2_divisor<T>(divisor)};
      return reduce_exact_2x2(stream, shape, aligned, op, in);
    }
    with_depth_vectors<T>(shape.depth(), aligned, [&](auto width) {
      constexpr int N = decltype(width)::value;
      const int64_t count = shape.output_count() / N;
      with_split(count, shape.depth() / N, shape.q, shape.p, [&](auto split) {
        avg_pool2d_kernel<T, N>
            <<<pool_blocks(count), kPoolThreads, 0, s>>>(in, out, count, split, window, divisor);
      });
    });
  });
  check_launch("avg_pool2d");
}

void avg_pool2d_backward(Stream stream, const Pool2dShape& shape, const AvgPoolDivisor& divisor,
                         const void* dy, void* dx) {
  if (shape.input_count() == 0) return;
  const Window window(shape);
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* grad = static_cast<const T*>(dy);
    T* out = static_cast<T*>(dx);
    const bool aligned = is_vec_aligned(grad) && is_vec_aligned(out);
    if (takes_exact_2x2(shape, out)) {
      const MeanOf2x2Backward<T> op{grad, exact_2x2_divisor<T>(divisor)};
      return spread_exact_2x2(stream, shape, aligned, op, out);
    }
    with_depth_vectors<T>(shape.depth(), aligned, [&](auto width) {
      constexpr int N = decltype(width)::value;
      const int64_t count = shape.input_count() / N;
      const int most =
          std::max(ceil_div(window.r, window.stride_h), ceil_div(window.s, window.stride_w));
      with_split(count, shape.depth() / N, shape.w, shape.h, [&](auto split) {
        using Split = decltype(split);
        const auto kernel = most == 1 ? avg_pool2d_backward_kernel<1, T, N, Split>
                            : most <= kFewWindows
                                ? avg_pool2d_backward_kernel<kFewWindows, T, N, Split>
                                : avg_pool2d_backward_kernel<0, T, N, Split>;
        kernel<<<pool_blocks(count), kPoolThreads, 0, s>>>(grad, out, count, split, window,
                                                           divisor);
      });
    });
  });
  check_launch("avg_pool2d_backward");
}

}  // namespace braze::cuda
