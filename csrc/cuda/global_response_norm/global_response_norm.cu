// Global response norm, by passes over images (csrc/cuda/channel_scale/passes.cuh): forward sums of
// squares, a block for each image that makes its norms and their scale, and the result; backward
// sums of dy x and of dy, again a block for each image, and dx. (Woo et al., ConvNeXt V2, 2023)
//
// Bytes per element of a 16-bit tensor: forward 6 (x twice, y), backward 10 (dy and x twice, dx);
// the second time they come from the L2 cache as far as it holds them.
#include "launchers/global_response_norm.h"

#include "cuda/channel_scale/passes.cuh"
#include "cuda/common/ordered_sum.cuh"
#include "cuda/layer_norm/row.cuh"

namespace braze::cuda {
namespace {

const KernelEntry kEntry({"global_response_norm", "vectorized", "float64 float32 bfloat16 float16",
                          "sm_80+", true, "two passes forward and backward, both layouts"});

constexpr int kImageThreads = 512;  // of a block for an image

template <typename T>
struct Squares {
  static constexpr int kSums = 1;
  const T* x;
  acc_t<T>* out;

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
    for (int k = 0; k < N; ++k) sums[0][k] += v[k] * v[k];
  }
  __device__ __forceinline__ void store(int64_t channel, const acc_t<T> (&sums)[1]) const {
    out[channel] = sums[0];
  }
};

// Sums of squares become norms, in place; r = 1 / (their mean + eps).
template <typename A>
__global__ void __launch_bounds__(kImageThreads)
    norms_kernel(A* __restrict__ norms, A* __restrict__ scales, int64_t c, double eps) {
  wait_for_earlier_kernels();
  A* const g = norms + blockIdx.x * c;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < c; i += kImageThreads) {
    const A norm = sqrt(g[i]);
    g[i] = norm;
    sum += norm;
  }
  sum = block_sum<kImageThreads>(sum);
  if (threadIdx.x == 0) scales[blockIdx.x] = static_cast<A>(1 / (sum / c + eps));
}

// The parameters and what the forward pass keeps.
template <typename T>
struct Kept {
  using A = acc_t<T>;
  const void* weight;
  const void* bias;
  bool wide;  // float32 parameters beside a 16-bit T
  const A* norms;
  const A* scales;
  int64_t c;

  __device__ __forceinline__ A weight_of(int64_t channel) const {
    return parameter_of<T>(weight, wide, channel, A(1));
  }
  // y = x slope + bias, in a channel, counted over all images, that is the `own`-th of its image.
  __device__ __forceinline__ A slope(int64_t channel, int64_t image, int64_t own) const {
    return A(1) + weight_of(own) * (norms[channel] * scales[image]);
  }
};

template <typename T>
struct Forward {
  using A = acc_t<T>;
  const T* x;
  Kept<T> kept;

  template <int N>
  struct Values {
    A slope[N], bias[N];
  };
  template <int N>
  using Loaded = Packed<T, N>;

  template <int N, bool kPlanes>
  __device__ __forceinline__ void get(Values<N>& values, int64_t channel) const {
    const int64_t image = channel / kept.c, own = channel - image * kept.c;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int i = kPlanes ? 0 : k;
      values.slope[k] = kept.slope(channel + i, image, own + i);
      values.bias[k] = parameter_of<T>(kept.bias, kept.wide, own + i, A(0));
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
    for (int k = 0; k < N; ++k) v[k] = v[k] * values.slope[k] + values.bias[k];
  }
};

template <typename T, int N>
struct TwoPacked {
  Packed<T, N> dy, x;
};

// Of each image, c sums of dy x and behind them c of dy.
template <typename T>
struct GradSums {
  static constexpr int kSums = 2;
  const T* dy;
  const T* x;
  acc_t<T>* out;
  int64_t c;

  template <int N>
  using Loaded = TwoPacked<T, N>;

  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& to, int64_t at) const {
    to.dy.load(dy + at), to.x.load(x + at);
  }
  template <int N>
  __device__ __forceinline__ void add(const Loaded<N>& loaded, acc_t<T> (&sums)[2][N]) const {
    acc_t<T> g[N], v[N];
    unpack(loaded.dy, g);
    unpack(loaded.x, v);
#pragma unroll
    for (int k = 0; k < N; ++k) sums[0][k] += g[k] * v[k], sums[1][k] += g[k];
  }
  __device__ __forceinline__ void store(int64_t channel, const acc_t<T> (&sums)[2]) const {
    const int64_t image = channel / c;
    acc_t<T>* const to = out + channel + image * c;
    to[0] = sums[0];
    to[c] = sums[1];
  }
};

// What x is multiplied by in dx, and in the place of the sums of dy x what they add to dweight.
template <typename T>
__global__ void __launch_bounds__(kImageThreads)
    slopes_kernel(Kept<T> kept, acc_t<T>* __restrict__ sums, acc_t<T>* __restrict__ by_input) {
  using A = acc_t<T>;
  __shared__ double shared;
  wait_for_earlier_kernels();
  const int64_t image = blockIdx.x, c = kept.c;
  A* const of_image = sums + image * 2 * c;
  const A* const g = kept.norms + image * c;
  const A r = kept.scales[image];
  double products = 0;
  for (int64_t i = threadIdx.x; i < c; i += kImageThreads) {
    products += static_cast<double>(kept.weight_of(i) * of_image[i]) * g[i];
  }
  products = block_sum<kImageThreads>(products);
  if (threadIdx.x == 0) shared = products / c;
  __syncthreads();
  const double of_mean = shared * r * r;
  for (int64_t i = threadIdx.x; i < c; i += kImageThreads) {
    const A dot = of_image[i];
    const double slope = static_cast<double>(kept.weight_of(i) * dot) * r - of_mean;
    by_input[image * c + i] = g[i] == A(0) ? A(0) : static_cast<A>(slope / g[i]);
    of_image[i] = dot * (g[i] * r);
  }
}

template <typename T>
struct Backward {
  using A = acc_t<T>;
  const T* dy;
  const T* x;
  Kept<T> kept;
  const A* by_input;

  template <int N>
  struct Values {
    A by_grad[N], by_input[N];
  };
  template <int N>
  using Loaded = TwoPacked<T, N>;

  template <int N, bool kPlanes>
  __device__ __forceinline__ void get(Values<N>& values, int64_t channel) const {
    const int64_t image = channel / kept.c, own = channel - image * kept.c;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int i = kPlanes ? 0 : k;
      values.by_grad[k] = kept.slope(channel + i, image, own + i);
      values.by_input[k] = by_input[channel + i];
    }
  }
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& to, int64_t at) const {
    to.dy.load(dy + at), to.x.load(x + at);
  }
  template <int N>
  __device__ __forceinline__ void apply(const Loaded<N>& loaded, const Values<N>& values,
                                        A (&v)[N]) const {
    A in[N];
    unpack(loaded.dy, v);
    unpack(loaded.x, in);
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = v[k] * values.by_grad[k] + in[k] * values.by_input[k];
  }
};

template <typename T>
Kept<T> kept_of(const ChannelScaleShape& shape, const ResponseNormParameters& parameters,
                const void* norms, const void* scales) {
  using A = acc_t<T>;
  return {parameters.weight,
          parameters.bias,
          parameters.dtype != shape.dtype,
          static_cast<const A*>(norms),
          static_cast<const A*>(scales),
          shape.c};
}

}  // namespace

void global_response_norm(Stream stream, const ChannelScaleShape& shape, const void* x,
                          const ResponseNormParameters& parameters, double eps, void* y,
                          void* norms, void* scales) {
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const T* const in = static_cast<const T*>(x);
    T* const out = static_cast<T*>(y);
    const Squares<T> squares{in, static_cast<A*>(norms)};
    const Forward<T> forward{in, kept_of<T>(shape, parameters, norms, scales)};
    with_channel_vectors<T>(
        shape,
        [&](auto width) {
          constexpr int N = decltype(width)::value;
          launch_sums<T, N>(s, shape, squares);
          launch_early(norms_kernel<A>, static_cast<unsigned>(shape.n), kImageThreads, 0, stream,
                       static_cast<A*>(norms), static_cast<A*>(scales), shape.c, eps);
          launch_pass<T, N>(s, shape, forward, out);
        },
        in, out);
  });
  check_launch("global_response_norm");
}

// 2c sums of each image, and what x is multiplied by.
int64_t global_response_norm_backward_workspace_bytes(const ChannelScaleShape& shape) {
  return 3 * shape.n * shape.c * (shape.dtype == DType::kFloat64 ? 8 : 4);
}

void global_response_norm_backward(Stream stream, const ChannelScaleShape& shape, const void* dy,
                                   const void* x, const ResponseNormParameters& parameters,
                                   const void* norms, const void* scales,
                                   const ResponseNormGradients& gradients, void* workspace) {
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    A* const sums = static_cast<A*>(workspace);
    A* const by_input = sums + 2 * shape.n * shape.c;
    const T *const grad = static_cast<const T*>(dy), *const in = static_cast<const T*>(x);
    T* const dx = static_cast<T*>(gradients.x);
    const Kept<T> kept = kept_of<T>(shape, parameters, norms, scales);
    with_channel_vectors<T>(
        shape,
        [&](auto width) {
          constexpr int N = decltype(width)::value;
          launch_sums<T, N>(s, shape, GradSums<T>{grad, in, sums, shape.c});
          launch_early(slopes_kernel<T>, static_cast<unsigned>(shape.n), kImageThreads, 0, stream,
                       kept, sums, by_input);
          if (dx) launch_pass<T, N>(s, shape, Backward<T>{grad, in, kept, by_input}, dx);
        },
        grad, in, dx);
    if (!gradients.weight) return;
    dispatch(parameters.dtype, [&](auto parameter_tag) {
      using P = typename decltype(parameter_tag)::type;
      if constexpr (std::is_same_v<acc_t<P>, A>) {
        launch_ordered_sum<P>(stream, sums, static_cast<int>(shape.n), shape.c,
                              static_cast<P*>(gradients.weight), shape.c,
                              static_cast<P*>(gradients.bias));
      }
    });
  });
  check_launch("global_response_norm_backward");
}

}  // namespace braze::cuda
