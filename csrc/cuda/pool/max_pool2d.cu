// Max pooling. Forward keeps, per window, the tap that won (one byte where the window has at most
// 256); backward gathers: every input element visits the windows that contain it and takes the
// gradients of those that chose it, so that there are no atomics and the sum's order is fixed.
#include "exact_2x2.cuh"
#include "launchers/common/registry.h"
#include "stride_2.cuh"
#include "window.cuh"

namespace braze::cuda {
namespace {

// NaN counts as largest; of equals the first stays.
template <typename A>
__device__ __forceinline__ bool beats(A v, A best) {
  return v > best || v != v;
}

template <typename A>
__device__ __forceinline__ A lowest() {
  return -static_cast<A>(INFINITY);
}

// The running maxima of N elements, and the taps that have them.
template <typename T, int N>
struct Maxima {
  acc_t<T> best[N];
  int tap[N];

  __device__ __forceinline__ explicit Maxima(int first_tap) {
#pragma unroll
    for (int k = 0; k < N; ++k) best[k] = lowest<acc_t<T>>(), tap[k] = first_tap;
  }
  __device__ __forceinline__ void add(const Vec<T, N>& v, int of_tap) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const acc_t<T> value = convert<acc_t<T>>(v.v[k]);
      if (beats(value, best[k])) best[k] = value, tap[k] = of_tap;
    }
  }
};

// kSide: of a window without dilation, all of whose elements are asked for before the first is
// compared; 0: of any.
template <typename T, typename Tap, int N, int kSide, typename Split>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_kernel(const T* __restrict__ x, T* __restrict__ y, Tap* __restrict__ taps,
                      int64_t count, Split split, Window window) {
  const int64_t i = global_thread();
  if (i >= count) return;
  int64_t image;
  int p, q, group;
  split(i, &image, &p, &q, &group);
  const int h0 = p * window.stride_h - window.pad_h, w0 = q * window.stride_w - window.pad_w;
  // The first tap inside the plane, which wins where all are -inf.
  const int first_r = h0 < 0 ? window.by_dilation_h.div(-h0 + window.dilation_h - 1) : 0;
  const int first_s = w0 < 0 ? window.by_dilation_w.div(-w0 + window.dilation_w - 1) : 0;
  const bool empty =
      h0 + first_r * window.dilation_h >= window.h || w0 + first_s * window.dilation_w >= window.w;
  Maxima<T, N> found(empty ? 0 : first_r * window.s + first_s);
  if constexpr (kSide > 0) {
    Packed<T, N> v[kSide][kSide];
    const auto inside = [&](int r, int s) {
      return h0 + r >= 0 && h0 + r < window.h && w0 + s >= 0 && w0 + s < window.w;
    };
#pragma unroll
    for (int r = 0; r < kSide; ++r) {
#pragma unroll
      for (int s = 0; s < kSide; ++s) {
        if (inside(r, s)) v[r][s].load(x + window.input_offset(image, h0 + r, w0 + s) + group * N);
      }
    }
#pragma unroll
    for (int r = 0; r < kSide; ++r) {
#pragma unroll
      for (int s = 0; s < kSide; ++s) {
        if (inside(r, s)) found.add(v[r][s].unpacked(), r * kSide + s);
      }
    }
  } else {
    for (int r = first_r; r < window.r; ++r) {
      const int h = h0 + r * window.dilation_h;
      if (h >= window.h) break;
      for (int s = first_s; s < window.s; ++s) {
        const int w = w0 + s * window.dilation_w;
        if (w >= window.w) break;
        const T* const from = x + window.input_offset(image, h, w) + group * N;
        found.add(load_vec<N>(from), r * window.s + s);
      }
    }
  }
  Vec<T, N> result;
  Vec<Tap, N> chosen;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    result.v[k] = convert<T>(found.best[k]);
    chosen.v[k] = static_cast<Tap>(found.tap[k]);
  }
  store_vec(y + i * N, result);
  store_vec(taps + i * N, chosen);
}

template <typename T, typename Tap, int N, typename Split>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_backward_kernel(const T* __restrict__ dy, const Tap* __restrict__ taps,
                               T* __restrict__ dx, int64_t count, Split split, Window window) {
  const int64_t i = global_thread();
  if (i >= count) return;
  int64_t image;
  int h, w, group;
  split(i, &image, &h, &w, &group);
  int p0, p1, q0, q1;
  covering_windows(h, window.by_stride_h, window.pad_h, window.dilation_h, window.r, window.p, &p0,
                   &p1);
  covering_windows(w, window.by_stride_w, window.pad_w, window.dilation_w, window.s, window.q, &q0,
                   &q1);
  acc_t<T> sum[N] = {};
  for (int p = p0; p <= p1; ++p) {
    int between;  // of taps
    const int down = window.by_dilation_h.div(h + window.pad_h - p * window.stride_h, between);
    if (between != 0) continue;
    for (int q = q0; q <= q1; ++q) {
      const int right = window.by_dilation_w.div(w + window.pad_w - q * window.stride_w, between);
      if (between != 0) continue;
      const Tap tap = static_cast<Tap>(down * window.s + right);
      const int64_t offset = window.output_offset(image, p, q) + group * N;
      const Vec<Tap, N> chosen = load_vec<N>(taps + offset);
      const Vec<T, N> grad = load_vec<N>(dy + offset);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (chosen.v[k] == tap) sum[k] += convert<acc_t<T>>(grad.v[k]);
      }
    }
  }
  Vec<T, N> result;
#pragma unroll
  for (int k = 0; k < N; ++k) result.v[k] = convert<T>(sum[k]);
  store_vec(dx + i * N, result);
}

template <typename Tap, typename Split>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_indices_kernel(const Tap* __restrict__ taps, int64_t* __restrict__ indices,
                              int64_t count, Split split, Window window) {
  const int64_t i = global_thread();
  if (i >= count) return;
  int64_t image;
  int p, q, group;
  split(i, &image, &p, &q, &group);
  const int tap = taps[i];
  const int64_t h = p * window.stride_h - window.pad_h + tap / window.s * window.dilation_h;
  const int64_t w = q * window.stride_w - window.pad_w + tap % window.s * window.dilation_w;
  indices[i] = h * window.w + w;
}

template <typename T>
struct MaxOf2x2 {
  T* y;
  uint8_t* taps;

  template <int V>
  __device__ void operator()(const T (&windows)[V][4], int64_t i) const {
    Vec<T, V> result;
    Vec<uint8_t, V> chosen;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      acc_t<T> best = convert<acc_t<T>>(windows[v][0]);
      int tap = 0;
#pragma unroll
      for (int j = 1; j < 4; ++j) {
        const acc_t<T> value = convert<acc_t<T>>(windows[v][j]);
        if (beats(value, best)) {
          best = value;
          tap = j;
        }
      }
      result.v[v] = convert<T>(best);
      chosen.v[v] = static_cast<uint8_t>(tap);
    }
    store_vec(y + i, result);
    store_vec(taps + i, chosen);
  }
};

template <typename T>
struct MaxOf2x2Backward {
  const T* dy;
  const uint8_t* taps;

  template <int V>
  __device__ void operator()(int64_t i, T (&windows)[V][4]) const {
    const Vec<T, V> grad = load_vec<V>(dy + i);
    const Vec<uint8_t, V> chosen = load_vec<V>(taps + i);
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        windows[v][j] = chosen.v[v] == j ? grad.v[v] : convert<T>(acc_t<T>(0));
      }
    }
  }
};

template <typename F>
void with_tap_type(const Pool2dShape& shape, const F& f) {
  if (has_byte_taps(shape)) {
    f(TypeTag<uint8_t>{});
  } else {
    f(TypeTag<int32_t>{});
  }
}

const KernelEntry kExactEntry({"max_pool2d", "exact_2x2", "float64 float32 bfloat16 float16",
                               "sm_80+", true, "2 x 2 windows, stride 2: each byte moved once"});
const KernelEntry kStride2Entry(
    {"max_pool2d", "stride_2", "float64 float32 bfloat16 float16", "sm_80+", true,
     "backward of windows up to 3 x 3, stride 2: 2 x 2 inputs a thread"});
const KernelEntry kEntry({"max_pool2d", "gather", "float64 float32 bfloat16 float16", "sm_80+",
                          true, "any window; 16 bytes of channels per thread where NHWC"});

}  // namespace

void max_pool2d(Stream stream, const Pool2dShape& shape, const void* x, void* y, void* taps) {
  if (shape.output_count() == 0) return;
  const Window window(shape);
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    const bool aligned = is_vec_aligned(in) && is_vec_aligned(out) &&
                         is_vec_aligned(static_cast<const uint8_t*>(taps));
    if (takes_exact_2x2(shape, in)) {
      const MaxOf2x2<T> op{out, static_cast<uint8_t*>(taps)};
      return reduce_exact_2x2(stream, shape, aligned, op, in);
    }
    with_tap_type(shape, [&](auto tap_tag) {
      using Tap = typename decltype(tap_tag)::type;
      with_depth_vectors<T>(shape.depth(), aligned, [&](auto width) {
        constexpr int N = decltype(width)::value;
        const int64_t count = shape.output_count() / N;
        with_split(count, shape.depth() / N, shape.q, shape.p, [&](auto split) {
          auto kernel = max_pool2d_kernel<T, Tap, N, 0, decltype(split)>;
          if constexpr (sizeof(Tap) == 1) {
            const bool plain = window.dilation_h == 1 && window.dilation_w == 1;
            if (window.r == 3 && window.s == 3 && plain) {
              kernel = max_pool2d_kernel<T, Tap, N, 3, decltype(split)>;
            }
          }
          kernel<<<pool_blocks(count), kPoolThreads, 0, s>>>(in, out, static_cast<Tap*>(taps),
                                                             count, split, window);
        });
      });
    });
  });
  check_launch("max_pool2d");
}

void max_pool2d_backward(Stream stream, const Pool2dShape& shape, const void* dy, const void* taps,
                         void* dx) {
  if (shape.input_count() == 0) return;
  const Window window(shape);
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* grad = static_cast<const T*>(dy);
    T* out = static_cast<T*>(dx);
    const bool aligned = is_vec_aligned(grad) && is_vec_aligned(out) &&
                         is_vec_aligned(static_cast<const uint8_t*>(taps));
    if (takes_exact_2x2(shape, out)) {
      const MaxOf2x2Backward<T> op{grad, static_cast<const uint8_t*>(taps)};
      return spread_exact_2x2(stream, shape, aligned, op, out);
    }
    if (takes_stride_2(window)) {
      return max_pool2d_stride_2_backward(stream, shape, window, aligned, grad,
                                          static_cast<const uint8_t*>(taps), out);
    }
    with_tap_type(shape, [&](auto tap_tag) {
      using Tap = typename decltype(tap_tag)::type;
      with_depth_vectors<T>(shape.depth(), aligned, [&](auto width) {
        constexpr int N = decltype(width)::value;
        const int64_t count = shape.input_count() / N;
        with_split(count, shape.depth() / N, shape.w, shape.h, [&](auto split) {
          max_pool2d_backward_kernel<T, Tap, N><<<pool_blocks(count), kPoolThreads, 0, s>>>(
              grad, static_cast<const Tap*>(taps), out, count, split, window);
        });
      });
    });
  });
  check_launch("max_pool2d_backward");
}

void max_pool2d_indices(Stream stream, const Pool2dShape& shape, const void* taps,
                        int64_t* indices) {
  const int64_t count = shape.output_count();
  if (count == 0) return;
  with_tap_type(shape, [&](auto tap_tag) {
    using Tap = typename decltype(tap_tag)::type;
    with_split(count, shape.depth(), shape.q, shape.p, [&](auto split) {
      max_pool2d_indices_kernel<<<pool_blocks(count), kPoolThreads, 0, as_cuda(stream)>>>(
          static_cast<const Tap*>(taps), indices, count, split, Window(shape));
    });
  });
  check_launch("max_pool2d_indices");
}

}  // namespace braze::cuda
