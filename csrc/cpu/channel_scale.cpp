// Loops that the compiler vectorises: over the channels of a pixel (channels_last) or the pixels of
// a channel (contiguous).
#include "launchers/channel_scale.h"

#include <algorithm>
#include <vector>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

constexpr int64_t kGrain = 8192;  // elements per task
// Accumulators of a task of channels_last sums, which stay in L1; and terms of a sum that is then
// added to the others, since in one long sum roundings add up.
constexpr int64_t kChannels = 256, kPixels = 128;

const KernelEntry kScale({"channel_scale", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised, threaded"});
const KernelEntry kDot({"channel_dot", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                        "vectorised, threaded"});
const KernelEntry kMean({"channel_mean", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                         "vectorised, threaded"});

int64_t grain(int64_t elements) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(elements, 1));
}

template <typename T>
void scale_channels_last(const ChannelScaleShape& shape, const T* x, const T* scale,
                         const T* spread, T* y) {
  using A = acc_t<T>;
  const A share = A(1) / A(shape.pixels);
  parallel_for(0, shape.n * shape.pixels, grain(shape.c), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const T* in = x + row * shape.c;
      T* out = y + row * shape.c;
      const int64_t image = row / shape.pixels * shape.c;
      const T* s = scale + image;
      if (spread) {
        const T* b = spread + image;
        for (int64_t i = 0; i < shape.c; ++i) out[i] = T(A(in[i]) * A(s[i]) + A(b[i]) * share);
      } else {
        for (int64_t i = 0; i < shape.c; ++i) out[i] = T(A(in[i]) * A(s[i]));
      }
    }
  });
}

template <typename T>
void scale_planes(const ChannelScaleShape& shape, const T* x, const T* scale, const T* spread,
                  T* y) {
  using A = acc_t<T>;
  parallel_for(0, shape.n * shape.c, grain(shape.pixels), [&](int64_t first, int64_t last) {
    for (int64_t plane = first; plane < last; ++plane) {
      const T* in = x + plane * shape.pixels;
      T* out = y + plane * shape.pixels;
      const A s = scale[plane];
      if (spread) {
        const A b = A(spread[plane]) / A(shape.pixels);
        for (int64_t i = 0; i < shape.pixels; ++i) out[i] = T(A(in[i]) * s + b);
      } else {
        for (int64_t i = 0; i < shape.pixels; ++i) out[i] = T(A(in[i]) * s);
      }
    }
  });
}

// What is summed over the pixels of a channel.
template <typename T>
struct Products {
  const T *a, *b;
  acc_t<T> operator[](int64_t i) const { return acc_t<T>(a[i]) * acc_t<T>(b[i]); }
  T result(acc_t<T> sum) const { return T(sum); }
};

template <typename T>
struct Mean {
  const T* x;
  acc_t<T> pixels;
  acc_t<T> operator[](int64_t i) const { return acc_t<T>(x[i]); }
  T result(acc_t<T> sum) const { return T(sum / pixels); }
};

template <typename T, template <typename> class Terms>
void sum_channels_last(const ChannelScaleShape& shape, const Terms<T>& terms, T* out) {
  using A = acc_t<T>;
  const int64_t blocks = ceil_div(shape.c, kChannels);
  const int64_t elements = shape.pixels * std::min(shape.c, kChannels);
  parallel_for(0, shape.n * blocks, grain(elements), [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t image = task / blocks, begin = task % blocks * kChannels;
      const int64_t count = std::min(kChannels, shape.c - begin);
      A sums[kChannels] = {};
      for (int64_t at_once = 0; at_once < shape.pixels; at_once += kPixels) {
        A some[kChannels] = {};
        const int64_t end = std::min(at_once + kPixels, shape.pixels);
        for (int64_t pixel = at_once; pixel < end; ++pixel) {
          const int64_t at = (image * shape.pixels + pixel) * shape.c + begin;
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) some[i] += terms[at + i];
        }
        for (int64_t i = 0; i < count; ++i) sums[i] += some[i];
      }
      T* result = out + image * shape.c + begin;
      for (int64_t i = 0; i < count; ++i) result[i] = terms.result(sums[i]);
    }
  });
}

template <typename T, template <typename> class Terms>
void sum_planes(const ChannelScaleShape& shape, const Terms<T>& terms, T* out) {
  using A = acc_t<T>;
  parallel_for(0, shape.n * shape.c, grain(shape.pixels), [&](int64_t first, int64_t last) {
    for (int64_t plane = first; plane < last; ++plane) {
      const int64_t first_pixel = plane * shape.pixels;
      A sum = 0;
      for (int64_t at_once = 0; at_once < shape.pixels; at_once += kPixels) {
        const int64_t end = std::min(at_once + kPixels, shape.pixels);
        A some = 0;
#pragma omp simd reduction(+ : some)
        for (int64_t i = at_once; i < end; ++i) some += terms[first_pixel + i];
        sum += some;
      }
      out[plane] = terms.result(sum);
    }
  });
}

}  // namespace

void channel_scale(Stream, const ChannelScaleShape& shape, const void* x, const void* scale,
                   const void* spread, void* y) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run = shape.channels_last ? &scale_channels_last<T> : &scale_planes<T>;
    run(shape, static_cast<const T*>(x), static_cast<const T*>(scale),
        static_cast<const T*>(spread), static_cast<T*>(y));
  });
}

void channel_dot(Stream, const ChannelScaleShape& shape, const void* a, const void* b, void* out) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run =
        shape.channels_last ? &sum_channels_last<T, Products> : &sum_planes<T, Products>;
    run(shape, {static_cast<const T*>(a), static_cast<const T*>(b)}, static_cast<T*>(out));
  });
}

void channel_mean(Stream, const ChannelScaleShape& shape, const void* x, void* out) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run = shape.channels_last ? &sum_channels_last<T, Mean> : &sum_planes<T, Mean>;
    run(shape, {static_cast<const T*>(x), static_cast<acc_t<T>>(shape.pixels)},
        static_cast<T*>(out));
  });
}

}  // namespace braze::cpu
