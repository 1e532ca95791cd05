// Pooling on the CPU, a row at a time: a row of results (backward: of input gradients) is kept in
// accumulators, and each tap passes over the row once in runs of evenly spaced elements that the
// compiler vectorises. Max pooling's backward in NCHW goes a plane at a time. Both layouts are
// images x rows x columns x depth (depth 1 for NCHW).
#include "launchers/pool.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

// Input elements per task, enough to outweigh handing the task over.
constexpr int64_t kGrain = 16384;

struct Range {
  int64_t first, last;
};

// The outputs `o` in [0, out) with 0 <= o * stride + offset < in.
Range outputs_inside(int64_t offset, int64_t stride, int64_t in, int64_t out) {
  const int64_t first = offset < 0 ? ceil_div(-offset, stride) : 0;
  const int64_t last = offset < in ? (in - 1 - offset) / stride + 1 : 0;
  return {first, std::min(last, out)};
}

// Calls f(result, element, step, count) for each run of tap column j: results [result, result +
// count) of a row of results belong to the elements element + i * step of a row of the input.
template <typename F>
void for_each_run(const Pool2dShape& shape, int64_t j, const F& f) {
  const int64_t offset = j * shape.dilation_w - shape.pad_w, depth = shape.depth();
  const auto [first, last] = outputs_inside(offset, shape.stride_w, shape.w, shape.q);
  if (first >= last) return;
  if (depth == 1 || shape.stride_w == 1) {
    f(first * depth, (first * shape.stride_w + offset) * depth, shape.stride_w,
      (last - first) * depth);
  } else {
    for (int64_t q = first; q < last; ++q) {
      f(q * depth, (q * shape.stride_w + offset) * depth, 1, depth);
    }
  }
}

// Rows [first, last) in parallel, each about `cost` element visits.
template <typename F>
void for_each_row(int64_t rows, int64_t cost, const F& f) {
  parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(cost, 1)), f);
}

// Constant steps let the compiler vectorise the common ones without gathers.
template <typename F>
void with_constant_step(int64_t step, const F& f) {
  if (step == 1) {
    f(std::integral_constant<int64_t, 1>{});
  } else if (step == 2) {
    f(std::integral_constant<int64_t, 2>{});
  } else {
    f(step);
  }
}

// take ? a : b by masks: short runs are not vectorised, and a branch on random data is mispredicted
// every other time.
inline int32_t select(bool take, int32_t a, int32_t b) {
  const int32_t mask = -static_cast<int32_t>(take);
  return (a & mask) | (b & ~mask);
}
inline float select(bool take, float a, float b) {
  return float_of(static_cast<uint32_t>(
      select(take, static_cast<int32_t>(bits_of(a)), static_cast<int32_t>(bits_of(b)))));
}
inline double select(bool take, double a, double b) {
  int64_t x, y;
  std::memcpy(&x, &a, 8);
  std::memcpy(&y, &b, 8);
  const int64_t mask = -static_cast<int64_t>(take), bits = (x & mask) | (y & ~mask);
  double result;
  std::memcpy(&result, &bits, 8);
  return result;
}

template <typename T>
void take_max(const T* x, int64_t step, int64_t count, int32_t tap, acc_t<T>* best, int32_t* taps) {
  with_constant_step(step, [&](auto stride) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const acc_t<T> v = x[i * stride];
      const bool take = (v > best[i]) | (v != v) | (taps[i] < 0);
      best[i] = select(take, v, best[i]);
      taps[i] = select(take, tap, taps[i]);
    }
  });
}

template <typename T, typename Tap>
void max_pool2d_rows(const Pool2dShape& shape, const T* x, T* y, Tap* taps) {
  const int64_t row = shape.q * shape.depth(), in_row = shape.w * shape.depth();
  for_each_row(shape.images() * shape.p, row * shape.r * shape.s, [&](int64_t begin, int64_t end) {
    std::vector<acc_t<T>> best(row);
    std::vector<int32_t> best_tap(row);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t image = i / shape.p, p = i % shape.p;
      std::fill(best.begin(), best.end(), -std::numeric_limits<acc_t<T>>::infinity());
      std::fill(best_tap.begin(), best_tap.end(), -1);  // the first tap inside wins even at -inf
      for (int64_t r = 0; r < shape.r; ++r) {
        const int64_t h = p * shape.stride_h - shape.pad_h + r * shape.dilation_h;
        if (h < 0 || h >= shape.h) continue;
        const T* in = x + (image * shape.h + h) * in_row;
        for (int64_t s = 0; s < shape.s; ++s) {
          for_each_run(shape, s, [&](int64_t result, int64_t element, int64_t step, int64_t count) {
            take_max(in + element, step, count, static_cast<int32_t>(r * shape.s + s),
                     best.data() + result, best_tap.data() + result);
          });
        }
      }
      for (int64_t j = 0; j < row; ++j) {
        y[i * row + j] = best[j];
        taps[i * row + j] = static_cast<Tap>(std::max(best_tap[j], 0));
      }
    }
  });
}

// Calls f(p, r) for every window row p one of whose tap rows, r, is input row h.
template <typename F>
void for_each_window_row(const Pool2dShape& shape, int64_t h, const F& f) {
  for (int64_t r = 0; r < shape.r; ++r) {
    const int64_t start = h + shape.pad_h - r * shape.dilation_h;
    if (start < 0 || start % shape.stride_h != 0 || start / shape.stride_h >= shape.p) continue;
    f(start / shape.stride_h, r);
  }
}

template <typename T, typename Tap>
void max_pool2d_backward_rows(const Pool2dShape& shape, const T* dy, const Tap* taps, T* dx) {
  const int64_t row = shape.q * shape.depth(), in_row = shape.w * shape.depth();
  for_each_row(shape.images() * shape.h, in_row, [&](int64_t begin, int64_t end) {
    std::vector<acc_t<T>> sum(in_row);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t image = i / shape.h, h = i % shape.h;
      std::fill(sum.begin(), sum.end(), acc_t<T>(0));
      for_each_window_row(shape, h, [&](int64_t p, int64_t r) {
        const T* grad = dy + (image * shape.p + p) * row;
        const Tap* chosen = taps + (image * shape.p + p) * row;
        for (int64_t s = 0; s < shape.s; ++s) {
          const Tap tap = static_cast<Tap>(r * shape.s + s);
          for_each_run(shape, s, [&](int64_t result, int64_t element, int64_t step, int64_t count) {
            const T* g = grad + result;
            const Tap* t = chosen + result;
            acc_t<T>* out = sum.data() + element;
            with_constant_step(step, [&](auto stride) {
#pragma omp simd
              for (int64_t j = 0; j < count; ++j) {
                const acc_t<T> v = g[j];
                out[j * stride] += t[j] == tap ? v : acc_t<T>(0);
              }
            });
          });
        }
      });
      for (int64_t j = 0; j < in_row; ++j) dx[i * in_row + j] = sum[j];
    }
  });
}

// Depth 1: a task owns whole planes, so it can scatter. Each window adds to one element.
template <typename T, typename Tap>
void max_pool2d_backward_planes(const Pool2dShape& shape, const T* dy, const Tap* taps, T* dx) {
  struct Offset {
    int64_t h, w;
  };
  std::vector<Offset> offsets;
  for (int64_t r = 0; r < shape.r; ++r) {
    for (int64_t s = 0; s < shape.s; ++s) {
      offsets.push_back({r * shape.dilation_h - shape.pad_h, s * shape.dilation_w - shape.pad_w});
    }
  }
  const int64_t plane = shape.h * shape.w;
  for_each_row(shape.images(), plane, [&](int64_t begin, int64_t end) {
    std::vector<acc_t<T>> sum(plane);
    for (int64_t i = begin; i < end; ++i) {
      std::fill(sum.begin(), sum.end(), acc_t<T>(0));
      const T* grad = dy + i * shape.p * shape.q;
      const Tap* chosen = taps + i * shape.p * shape.q;
      for (int64_t p = 0; p < shape.p; ++p) {
        for (int64_t q = 0; q < shape.q; ++q) {
          const Offset& offset = offsets[chosen[p * shape.q + q]];
          const int64_t h = p * shape.stride_h + offset.h, w = q * shape.stride_w + offset.w;
          // A window without an element inside the plane names a tap outside of it.
          if (h < 0 || h >= shape.h || w < 0 || w >= shape.w) continue;
          sum[h * shape.w + w] += static_cast<acc_t<T>>(grad[p * shape.q + q]);
        }
      }
      for (int64_t j = 0; j < plane; ++j) dx[i * plane + j] = sum[j];
    }
  });
}

// The divisors of a row of windows, one per result.
template <typename A>
void fill_divisors(const Pool2dShape& shape, const AvgPoolDivisor& divisor, int64_t p, A* out) {
  const auto extent = divisor.count_include_pad ? padded_extent : inner_extent;
  const int64_t height = extent(p, shape.stride_h, shape.pad_h, shape.r, shape.h);
  const int64_t depth = shape.depth();
  for (int64_t q = 0; q < shape.q; ++q) {
    const int64_t area = height * extent(q, shape.stride_w, shape.pad_w, shape.s, shape.w);
    const int64_t d = divisor.divisor_override != 0 ? divisor.divisor_override : area;
    std::fill_n(out + q * depth, depth, static_cast<A>(d));
  }
}

template <typename T>
void avg_pool2d_rows(const Pool2dShape& shape, const AvgPoolDivisor& divisor, const T* x, T* y) {
  const int64_t row = shape.q * shape.depth(), in_row = shape.w * shape.depth();
  for_each_row(shape.images() * shape.p, row * shape.r * shape.s, [&](int64_t begin, int64_t end) {
    std::vector<acc_t<T>> sum(row), divisors(row);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t image = i / shape.p, p = i % shape.p;
      std::fill(sum.begin(), sum.end(), acc_t<T>(0));
      fill_divisors(shape, divisor, p, divisors.data());
      for (int64_t r = 0; r < shape.r; ++r) {
        const int64_t h = p * shape.stride_h - shape.pad_h + r;
        if (h < 0 || h >= shape.h) continue;
        const T* in = x + (image * shape.h + h) * in_row;
        for (int64_t s = 0; s < shape.s; ++s) {
          for_each_run(shape, s, [&](int64_t result, int64_t element, int64_t step, int64_t count) {
            acc_t<T>* out = sum.data() + result;
            with_constant_step(step, [&](auto stride) {
#pragma omp simd
              for (int64_t j = 0; j < count; ++j) {
                out[j] += static_cast<acc_t<T>>(in[element + j * stride]);
              }
            });
          });
        }
      }
      for (int64_t j = 0; j < row; ++j) y[i * row + j] = sum[j] / divisors[j];
    }
  });
}

template <typename T>
void avg_pool2d_backward_rows(const Pool2dShape& shape, const AvgPoolDivisor& divisor, const T* dy,
                              T* dx) {
  const int64_t row = shape.q * shape.depth(), in_row = shape.w * shape.depth();
  for_each_row(shape.images() * shape.h, in_row, [&](int64_t begin, int64_t end) {
    std::vector<acc_t<T>> sum(in_row), share(row);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t image = i / shape.h, h = i % shape.h;
      std::fill(sum.begin(), sum.end(), acc_t<T>(0));
      for_each_window_row(shape, h, [&](int64_t p, int64_t) {
        const T* grad = dy + (image * shape.p + p) * row;
        fill_divisors(shape, divisor, p, share.data());
        for (int64_t j = 0; j < row; ++j) share[j] = static_cast<acc_t<T>>(grad[j]) / share[j];
        for (int64_t s = 0; s < shape.s; ++s) {
          for_each_run(shape, s, [&](int64_t result, int64_t element, int64_t step, int64_t count) {
            const acc_t<T>* in = share.data() + result;
            acc_t<T>* out = sum.data() + element;
            with_constant_step(step, [&](auto stride) {
#pragma omp simd
              for (int64_t j = 0; j < count; ++j) out[j * stride] += in[j];
            });
          });
        }
      });
      for (int64_t j = 0; j < in_row; ++j) dx[i * in_row + j] = sum[j];
    }
  });
}

template <typename F>
void with_tap_type(const Pool2dShape& shape, const F& f) {
  if (has_byte_taps(shape)) {
    f(TypeTag<uint8_t>{});
  } else {
    f(TypeTag<int32_t>{});
  }
}

const KernelEntry kMaxEntry({"max_pool2d", "rows", "float64 float32 bfloat16 float16", "cpu", true,
                             "a row of windows at a time, vectorised, threaded"});
const KernelEntry kAvgEntry({"avg_pool2d", "rows", "float64 float32 bfloat16 float16", "cpu", true,
                             "a row of windows at a time, vectorised, threaded"});

}  // namespace

void max_pool2d(Stream, const Pool2dShape& shape, const void* x, void* y, void* taps) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    with_tap_type(shape, [&](auto tap_tag) {
      using Tap = typename decltype(tap_tag)::type;
      max_pool2d_rows(shape, static_cast<const T*>(x), static_cast<T*>(y), static_cast<Tap*>(taps));
    });
  });
}

void max_pool2d_backward(Stream, const Pool2dShape& shape, const void* dy, const void* taps,
                         void* dx) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    with_tap_type(shape, [&](auto tap_tag) {
      using Tap = typename decltype(tap_tag)::type;
      const auto backward = shape.depth() == 1 ? max_pool2d_backward_planes<T, Tap>
                                               : max_pool2d_backward_rows<T, Tap>;
      backward(shape, static_cast<const T*>(dy), static_cast<const Tap*>(taps),
               static_cast<T*>(dx));
    });
  });
}

void max_pool2d_indices(Stream, const Pool2dShape& shape, const void* taps, int64_t* indices) {
  with_tap_type(shape, [&](auto tap_tag) {
    using Tap = typename decltype(tap_tag)::type;
    const Tap* chosen = static_cast<const Tap*>(taps);
    const int64_t depth = shape.depth();
    for_each_row(shape.images() * shape.p, shape.q * depth, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * shape.q * depth; i < end * shape.q * depth; ++i) {
        const int64_t q = i / depth % shape.q, p = i / depth / shape.q % shape.p;
        const int64_t h = p * shape.stride_h - shape.pad_h + chosen[i] / shape.s * shape.dilation_h;
        const int64_t w = q * shape.stride_w - shape.pad_w + chosen[i] % shape.s * shape.dilation_w;
        indices[i] = h * shape.w + w;
      }
    });
  });
}

void avg_pool2d(Stream, const Pool2dShape& shape, const AvgPoolDivisor& divisor, const void* x,
                void* y) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    avg_pool2d_rows(shape, divisor, static_cast<const T*>(x), static_cast<T*>(y));
  });
}

void avg_pool2d_backward(Stream, const Pool2dShape& shape, const AvgPoolDivisor& divisor,
                         const void* dy, void* dx) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    avg_pool2d_backward_rows(shape, divisor, static_cast<const T*>(dy), static_cast<T*>(dx));
  });
}

}  // namespace braze::cpu
