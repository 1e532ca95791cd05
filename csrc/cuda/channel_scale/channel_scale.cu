// Channels scaled, and sums of products, or means, over a channel's pixels: passes.cuh.
#include "launchers/channel_scale.h"

#include "launchers/common/registry.h"
#include "passes.cuh"

namespace braze::cuda {
namespace {

const KernelEntry kScale({"channel_scale", "vectorized", "float64 float32 bfloat16 float16",
                          "sm_80+", true, "one pass, 16 bytes per access, both layouts"});
const KernelEntry kDot({"channel_dot", "vectorized", "float64 float32 bfloat16 float16", "sm_80+",
                        true, "one pass, fixed order, both layouts"});
const KernelEntry kMean({"channel_mean", "vectorized", "float64 float32 bfloat16 float16", "sm_80+",
                         true, "one pass, fixed order, both layouts"});

template <typename T>
struct Scale {
  using A = acc_t<T>;

  const T* x;
  const T* scale;
  const T* spread;  // or nullptr
  A pixels;

  template <int N>
  struct Values {
    A scale[N], shift[N];
  };
  template <int N>
  using Loaded = Packed<T, N>;

  template <int N, bool kPlanes>
  __device__ __forceinline__ void get(Values<N>& values, int64_t channel) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int64_t at = kPlanes ? channel : channel + k;
      values.scale[k] = convert<A>(scale[at]);
      values.shift[k] = spread ? convert<A>(spread[at]) / pixels : A(0);
    }
  }
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& to, int64_t at) const {
    to.load(x + at);
  }
  template <int N>
  __device__ __forceinline__ void apply(const Loaded<N>& loaded, const Values<N>& values,
                                        A (&v)[N]) const {
    unpack(loaded, v);
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = v[k] * values.scale[k] + values.shift[k];
  }
};

template <typename T>
struct Products {
  static constexpr int kSums = 1;
  const T *a, *b;
  T* out;

  template <int N>
  struct Loaded {
    Packed<T, N> a, b;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& to, int64_t at) const {
    to.a.load(a + at), to.b.load(b + at);
  }
  template <int N>
  __device__ __forceinline__ void add(const Loaded<N>& loaded, acc_t<T> (&sums)[1][N]) const {
    acc_t<T> p[N], q[N];
    unpack(loaded.a, p);
    unpack(loaded.b, q);
#pragma unroll
    for (int k = 0; k < N; ++k) sums[0][k] += p[k] * q[k];
  }
  __device__ __forceinline__ void store(int64_t channel, const acc_t<T> (&sums)[1]) const {
    out[channel] = convert<T>(sums[0]);
  }
};

template <typename T>
struct Mean {
  static constexpr int kSums = 1;
  const T* x;
  acc_t<T> pixels;
  T* out;

  template <int N>
  using Loaded = Packed<T, N>;

  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& to, int64_t at) const {
    to.load(x + at);
  }
  template <int N>
  __device__ __forceinline__ void add(const Loaded<N>& loaded, acc_t<T> (&sums)[1][N]) const {
    acc_t<T> v[N];
    unpack(loaded, v);
#pragma unroll
    for (int k = 0; k < N; ++k) sums[0][k] += v[k];
  }
  __device__ __forceinline__ void store(int64_t channel, const acc_t<T> (&sums)[1]) const {
    out[channel] = convert<T>(sums[0] / pixels);
  }
};

}  // namespace

void channel_scale(Stream stream, const ChannelScaleShape& shape, const void* x, const void* scale,
                   const void* spread, void* y) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Scale<T> pass{static_cast<const T*>(x), static_cast<const T*>(scale),
                        static_cast<const T*>(spread), static_cast<acc_t<T>>(shape.pixels)};
    T* const out = static_cast<T*>(y);
    with_channel_vectors<T>(
        shape,
        [&](auto width) {
          launch_pass<T, decltype(width)::value>(as_cuda(stream), shape, pass, out);
        },
        pass.x, out);
  });
  check_launch("channel_scale");
}

void channel_dot(Stream stream, const ChannelScaleShape& shape, const void* a, const void* b,
                 void* out) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Products<T> terms{static_cast<const T*>(a), static_cast<const T*>(b),
                            static_cast<T*>(out)};
    with_channel_vectors<T>(
        shape,
        [&](auto width) { launch_sums<T, decltype(width)::value>(as_cuda(stream), shape, terms); },
        terms.a, terms.b);
  });
  check_launch("channel_dot");
}

void channel_mean(Stream stream, const ChannelScaleShape& shape, const void* x, void* out) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Mean<T> terms{static_cast<const T*>(x), static_cast<acc_t<T>>(shape.pixels),
                        static_cast<T*>(out)};
    with_channel_vectors<T>(
        shape,
        [&](auto width) { launch_sums<T, decltype(width)::value>(as_cuda(stream), shape, terms); },
        terms.x);
  });
  check_launch("channel_mean");
}

}  // namespace braze::cuda
