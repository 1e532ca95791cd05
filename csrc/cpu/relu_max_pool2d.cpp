// max_pool2d(relu(x + bias)) on the CPU, window by window: the executable specification of the CUDA
// kernels, which convert() runs in its place only on GPUs.
#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "launchers/common/registry.h"
#include "launchers/pool.h"

namespace braze::cpu {
namespace {

const KernelEntry kEntry({"relu_max_pool2d", "windows", "float64 float32 bfloat16 float16", "cpu",
                          true, "window by window; threaded over images"});

// Offsets of channel c of a pixel in y or dy.
int64_t pooled_offset(const ReluPoolShape& shape, int64_t n, int64_t p, int64_t q, int64_t c) {
  const Pool2dShape& s = shape.pool;
  return shape.turned ? ((n * s.c + c) * s.p + p) * s.q + q : ((n * s.p + p) * s.q + q) * s.c + c;
}

// Calls f(tap, offset in x) for the elements of a window that lie in the plane, in reading order.
template <typename F>
void for_each_tap(const Pool2dShape& s, int64_t n, int64_t p, int64_t q, const F& f) {
  for (int64_t tap = 0; tap < s.r * s.s; ++tap) {
    const int64_t h = p * s.stride_h - s.pad_h + tap / s.s;
    const int64_t w = q * s.stride_w - s.pad_w + tap % s.s;
    if (h < 0 || h >= s.h || w < 0 || w >= s.w) continue;
    f(static_cast<uint8_t>(tap), ((n * s.h + h) * s.w + w) * s.c);
  }
}

template <typename F>
void for_each_window(const Pool2dShape& s, int64_t n, const F& f) {
  for (int64_t p = 0; p < s.p; ++p) {
    for (int64_t q = 0; q < s.q; ++q) f(n, p, q);
  }
}

// f(tag of x, tag of the bias).
template <typename F>
void dispatch_types(const ReluPoolShape& shape, const F& f) {
  dispatch(shape.pool.dtype, [&](auto tag) {
    if (shape.bias == shape.pool.dtype) return f(tag, tag);
    f(tag, TypeTag<float>{});
  });
}

}  // namespace

void relu_max_pool2d(Stream, const ReluPoolShape& shape, const void* x, const void* bias, void* y,
                     uint8_t* taps) {
  const Pool2dShape& s = shape.pool;
  dispatch_types(shape, [&](auto tag, auto bias_tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    using Bias = typename decltype(bias_tag)::type;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    parallel_for(0, s.n, 1, [&](int64_t first, int64_t last) {
      std::vector<A> added(s.c), best(s.c);
      std::vector<uint8_t> chosen(s.c);
      for (int64_t c = 0; bias && c < s.c; ++c) added[c] = A(static_cast<const Bias*>(bias)[c]);
      const auto pool = [&](int64_t n, int64_t p, int64_t q) {
        std::fill(best.begin(), best.end(), -std::numeric_limits<A>::infinity());
        std::fill(chosen.begin(), chosen.end(), uint8_t{0});
        for_each_tap(s, n, p, q, [&](uint8_t tap, int64_t offset) {
          for (int64_t c = 0; c < s.c; ++c) {
            const A v = A(T(A(in[offset + c]) + added[c]));
            if (!(v > best[c] || v != v)) continue;
            best[c] = v;
            chosen[c] = tap;
          }
        });
        uint8_t* const to = taps + ((n * s.p + p) * s.q + q) * s.c;
        for (int64_t c = 0; c < s.c; ++c) {
          const bool stops = best[c] <= A(0);
          out[pooled_offset(shape, n, p, q, c)] = T(stops ? A(0) : best[c]);
          to[c] = stops ? kNoTap : chosen[c];
        }
      };
      for (int64_t n = first; n < last; ++n) for_each_window(s, n, pool);
    });
  });
}

int64_t relu_max_pool2d_workspace_bytes(const ReluPoolShape& shape) {
  return shape.pool.n * shape.pool.c * static_cast<int64_t>(sizeof(double));
}

void relu_max_pool2d_backward(Stream, const ReluPoolShape& shape, const void* dy,
                              const uint8_t* taps, void* dx, void* dbias, void* workspace) {
  const Pool2dShape& s = shape.pool;
  double* const sums = static_cast<double*>(workspace);  // of each image, so that order is fixed
  dispatch_types(shape, [&](auto tag, auto bias_tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    using Bias = typename decltype(bias_tag)::type;
    const T* grad = static_cast<const T*>(dy);
    T* out = static_cast<T*>(dx);
    const int64_t image = s.h * s.w * s.c;
    parallel_for(0, s.n, 1, [&](int64_t first, int64_t last) {
      std::vector<A> sum(image);
      for (int64_t n = first; n < last; ++n) {
        std::fill(sum.begin(), sum.end(), A(0));
        for_each_window(s, n, [&](int64_t, int64_t p, int64_t q) {
          const uint8_t* const chosen = taps + ((n * s.p + p) * s.q + q) * s.c;
          for_each_tap(s, 0, p, q, [&](uint8_t tap, int64_t offset) {
            for (int64_t c = 0; c < s.c; ++c) {
              if (chosen[c] == tap) sum[offset + c] += A(grad[pooled_offset(shape, n, p, q, c)]);
            }
          });
        });
        for (int64_t i = 0; i < image; ++i) out[n * image + i] = T(sum[i]);
        if (!dbias) continue;
        std::fill_n(sums + n * s.c, s.c, 0.0);
        for (int64_t i = 0; i < image; ++i) sums[n * s.c + i % s.c] += sum[i];
      }
    });
    for (int64_t c = 0; dbias && c < s.c; ++c) {
      double total = 0;
      for (int64_t n = 0; n < s.n; ++n) total += sums[n * s.c + c];
      static_cast<Bias*>(dbias)[c] = Bias(static_cast<acc_t<Bias>>(total));
    }
  });
}

}  // namespace braze::cpu
