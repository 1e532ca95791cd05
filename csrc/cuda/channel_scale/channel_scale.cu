// Channels scaled, and sums of products, or means, over a channel's pixels: memory-bound, 16 bytes
// per thread and access, four accesses in flight.
//
// channels_last: threads that follow each other take vectors of channels that follow each other,
// and go on in steps of whole pixels, so that each keeps its channels, their factors and their sums
// in registers. Contiguous: a warp takes a plane.
#include "launchers/channel_scale.h"

#include "cuda/common/cluster.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256, kDotThreads = 512, kWarp = 32;
constexpr int kUnroll = 4;         // vectors that a thread loads before it uses them
constexpr int kMostLanes = 32;     // of a block of sums in channels_last: vectors of channels
constexpr int64_t kMostY = 65535;  // blocks along a grid's second dimension

const KernelEntry kScale({"channel_scale", "vectorized", "float64 float32 bfloat16 float16",
                          "sm_80+", true, "one pass, 16 bytes per access, both layouts"});
const KernelEntry kDot({"channel_dot", "vectorized", "float64 float32 bfloat16 float16", "sm_80+",
                        true, "one pass, fixed order, both layouts"});
const KernelEntry kMean({"channel_mean", "vectorized", "float64 float32 bfloat16 float16", "sm_80+",
                         true, "one pass, fixed order, both layouts"});

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> scaled(const Vec<T, N>& x, const acc_t<T> (&scale)[N],
                                            const acc_t<T> (&shift)[N]) {
  Vec<T, N> y;
#pragma unroll
  for (int k = 0; k < N; ++k) y.v[k] = convert<T>(convert<acc_t<T>>(x.v[k]) * scale[k] + shift[k]);
  return y;
}

// A block takes `lanes` columns, vectors of channels, of an image, from column blockIdx.z * lanes
// on; a row of so many threads takes a pixel.
template <int N, typename T>
__global__ void scale_channels_last_kernel(const T* x, const T* scale, const T* spread, T* y,
                                           int64_t n, int64_t pixels, int columns, int lanes) {
  using A = acc_t<T>;
  wait_for_earlier_kernels();
  const int rows = kThreads / lanes, row = threadIdx.x / lanes;
  const int column = blockIdx.z * lanes + threadIdx.x % lanes;
  if (row >= rows || column >= columns) return;
  const int64_t step = int64_t{gridDim.x} * rows;
  for (int64_t image = blockIdx.y; image < n; image += gridDim.y) {
    const int64_t factors = (image * columns + column) * N;
    A s[N], b[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      s[k] = convert<A>(scale[factors + k]);
      b[k] = spread ? convert<A>(spread[factors + k]) / A(pixels) : A(0);
    }
    for (int64_t pixel = blockIdx.x * int64_t{rows} + row; pixel < pixels;
         pixel += step * kUnroll) {
      Packed<T, N> v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = ((image * pixels + pixel + u * step) * columns + column) * N;
        if (pixel + u * step < pixels) v[u].load(x + at);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = ((image * pixels + pixel + u * step) * columns + column) * N;
        if (pixel + u * step < pixels) store_vec<N>(y + at, scaled<T, N>(v[u].unpacked(), s, b));
      }
    }
  }
}

// A warp for each plane of `vectors` vectors.
template <int N, typename T>
__global__ void scale_planes_kernel(const T* x, const T* __restrict__ scale,
                                    const T* __restrict__ spread, T* y, int64_t planes,
                                    int64_t vectors) {
  using A = acc_t<T>;
  const int lane = threadIdx.x % kWarp;
  const int64_t warps = int64_t{gridDim.x} * (blockDim.x / kWarp);
  for (int64_t plane = blockIdx.x * int64_t{blockDim.x / kWarp} + threadIdx.x / kWarp;
       plane < planes; plane += warps) {
    A s[N], b[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      s[k] = convert<A>(scale[plane]);
      b[k] = spread ? convert<A>(spread[plane]) / A(vectors * N) : A(0);
    }
    for (int64_t i = lane; i < vectors; i += kWarp * kUnroll) {
      Packed<T, N> v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * kWarp < vectors) v[u].load(x + (plane * vectors + i + u * kWarp) * N);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * kWarp < vectors) {
          store_vec<N>(y + (plane * vectors + i + u * kWarp) * N,
                       scaled<T, N>(v[u].unpacked(), s, b));
        }
      }
    }
  }
}

// What is summed over the pixels of a channel, N elements of it at a time.
template <typename T>
struct Products {
  const T *a, *b;

  template <int N>
  struct Loaded {
    Packed<T, N> a, b;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& to, int64_t at) const {
    to.a.load(a + at), to.b.load(b + at);
  }
  template <int N>
  __device__ __forceinline__ void add(const Loaded<N>& loaded, acc_t<T> (&sums)[N]) const {
    using A = acc_t<T>;
    const Vec<T, N> p = loaded.a.unpacked(), q = loaded.b.unpacked();
#pragma unroll
    for (int k = 0; k < N; ++k) sums[k] += convert<A>(p.v[k]) * convert<A>(q.v[k]);
  }
  __device__ __forceinline__ T result(acc_t<T> sum) const { return convert<T>(sum); }
};

template <typename T>
struct Mean {
  const T* x;
  acc_t<T> pixels;

  template <int N>
  struct Loaded {
    Packed<T, N> x;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& to, int64_t at) const {
    to.x.load(x + at);
  }
  template <int N>
  __device__ __forceinline__ void add(const Loaded<N>& loaded, acc_t<T> (&sums)[N]) const {
    const Vec<T, N> v = loaded.x.unpacked();
#pragma unroll
    for (int k = 0; k < N; ++k) sums[k] += convert<acc_t<T>>(v.v[k]);
  }
  __device__ __forceinline__ T result(acc_t<T> sum) const { return convert<T>(sum / pixels); }
};

// A block sums `lanes` vectors of channels (a power of two) of an image, in kDotThreads / lanes
// rows of threads that take a pixel each; these are added up pair by pair. The blocks of a cluster
// share the pixels.
template <int N, typename T, template <typename> class Terms>
__global__ void __launch_bounds__(kDotThreads, 1)
    sum_channels_last_kernel(Terms<T> terms, T* out, int64_t n, int64_t pixels, int columns,
                             int lanes, int cluster) {
  using A = acc_t<T>;
  __shared__ A shared[kDotThreads * N];
  wait_for_earlier_kernels();
  const int rows = kDotThreads / lanes, row = threadIdx.x / lanes;
  const int tile = blockIdx.x / cluster, rank = blockIdx.x - tile * cluster;
  const int column = tile * lanes + threadIdx.x % lanes, step = rows * cluster;
  for (int64_t image = blockIdx.y; image < n; image += gridDim.y) {
    A sums[N] = {};
    if (column < columns) {
      for (int64_t pixel = rank * rows + row; pixel < pixels; pixel += step * kUnroll) {
        typename Terms<T>::template Loaded<N> loaded[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int64_t at = ((image * pixels + pixel + u * step) * columns + column) * N;
          if (pixel + u * step < pixels) terms.template load<N>(loaded[u], at);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (pixel + u * step < pixels) terms.template add<N>(loaded[u], sums);
        }
      }
    }
    for (int half = rows / 2; half > 0; half /= 2) {
      // The upper rows hand theirs down. Element by element: no bank conflicts.
      if (row >= half && row < 2 * half) {
#pragma unroll
        for (int k = 0; k < N; ++k) shared[k * kDotThreads + threadIdx.x] = sums[k];
      }
      __syncthreads();
      if (row < half) {
#pragma unroll
        for (int k = 0; k < N; ++k) sums[k] += shared[k * kDotThreads + threadIdx.x + half * lanes];
      }
      __syncthreads();
    }
    if (cluster > 1) {
      if (row == 0) {
#pragma unroll
        for (int k = 0; k < N; ++k) shared[k * kDotThreads + threadIdx.x] = sums[k];
      }
      cluster_sync();
      for (int other = 1; rank == 0 && row == 0 && other < cluster; ++other) {
        const A* const theirs = in_cluster(shared, other);
#pragma unroll
        for (int k = 0; k < N; ++k) sums[k] += theirs[k * kDotThreads + threadIdx.x];
      }
      cluster_sync();  // they have been read
    }
    if (rank == 0 && row == 0 && column < columns) {
#pragma unroll
      for (int k = 0; k < N; ++k) out[(image * columns + column) * N + k] = terms.result(sums[k]);
    }
  }
}

// A warp for each plane.
template <int N, typename T, template <typename> class Terms>
__global__ void sum_planes_kernel(Terms<T> terms, T* out, int64_t planes, int64_t vectors) {
  using A = acc_t<T>;
  const int lane = threadIdx.x % kWarp;
  const int64_t warps = int64_t{gridDim.x} * (blockDim.x / kWarp);
  for (int64_t plane = blockIdx.x * int64_t{blockDim.x / kWarp} + threadIdx.x / kWarp;
       plane < planes; plane += warps) {
    A sums[N] = {};
    for (int64_t i = lane; i < vectors; i += kWarp * kUnroll) {
      typename Terms<T>::template Loaded<N> loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = (plane * vectors + i + u * kWarp) * N;
        if (i + u * kWarp < vectors) terms.template load<N>(loaded[u], at);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * kWarp < vectors) terms.template add<N>(loaded[u], sums);
      }
    }
    A sum = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) sum += sums[k];
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, offset);
    }
    if (lane == 0) out[plane] = terms.result(sum);
  }
}

// Whether rows of `extent` elements can be cut into vectors, from pointers that are aligned.
template <typename T, typename... P>
bool takes_vectors(int64_t extent, const P*... pointers) {
  return extent % kVecWidth<T> == 0 && (is_vec_aligned(pointers) && ...);
}

template <typename T, typename F>
void with_width(bool vectors, const F& run) {
  if (vectors) {
    run(std::integral_constant<int, kVecWidth<T>>{});
  } else {
    run(std::integral_constant<int, 1>{});
  }
}

int plane_blocks(int64_t planes) { return grid_stride_blocks(planes * kWarp, kThreads); }

template <int N, typename T, template <typename> class Terms>
void launch_sums(cudaStream_t stream, const ChannelScaleShape& shape, const Terms<T>& terms,
                 T* out) {
  if (!shape.channels_last) {
    sum_planes_kernel<N><<<plane_blocks(shape.n * shape.c), kThreads, 0, stream>>>(
        terms, out, shape.n * shape.c, shape.pixels / N);
    return;
  }
  const int columns = static_cast<int>(shape.c / N);
  int lanes = 1;
  while (lanes < std::min(columns, kMostLanes)) lanes *= 2;
  // Few images leave most of the device idle; sectors of 32 bytes are read whole all the same.
  const auto blocks = [&] { return ceil_div(columns, lanes) * std::min(shape.n, kMostY); };
  while (lanes * N * sizeof(T) > 32 && blocks() < sm_count()) lanes /= 2;
  int cluster = 1;
  const auto halves = [&] {  // of what is left to a block
    return 2 * cluster * blocks() <= sm_count() && cluster * kDotThreads / lanes < shape.pixels;
  };
  while (runs_sm90_code() && cluster < kMaxCluster && halves()) cluster *= 2;
  const dim3 grid(static_cast<unsigned>(ceil_div(columns, lanes) * cluster),
                  static_cast<unsigned>(std::min(shape.n, kMostY)));
  launch_early_in_clusters(sum_channels_last_kernel<N, T, Terms>, grid, dim3(kDotThreads), 0,
                           stream, cluster, terms, out, shape.n, shape.pixels, columns, lanes,
                           cluster);
}

}  // namespace

void channel_scale(Stream stream, const ChannelScaleShape& shape, const void* x, const void* scale,
                   const void* spread, void* y) {
  const auto cuda_stream = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto *in = static_cast<const T*>(x), *s = static_cast<const T*>(scale),
               *b = static_cast<const T*>(spread);
    auto* out = static_cast<T*>(y);
    const int64_t extent = shape.channels_last ? shape.c : shape.pixels;
    with_width<T>(takes_vectors<T>(extent, in, out), [&](auto width) {
      constexpr int N = decltype(width)::value;
      if (!shape.channels_last) {
        scale_planes_kernel<N><<<plane_blocks(shape.n * shape.c), kThreads, 0, cuda_stream>>>(
            in, s, b, out, shape.n * shape.c, shape.pixels / N);
        return;
      }
      const int columns = static_cast<int>(shape.c / N), lanes = std::min(columns, kThreads);
      const int64_t tiles = ceil_div(columns, lanes), rows = kThreads / lanes;
      const int64_t wanted = ceil_div(int64_t{sm_count()} * 8, shape.n * tiles);
      const dim3 grid(static_cast<unsigned>(std::min(wanted, ceil_div(shape.pixels, rows))),
                      static_cast<unsigned>(std::min(shape.n, kMostY)),
                      static_cast<unsigned>(tiles));
      launch_early(scale_channels_last_kernel<N, T>, grid, dim3(kThreads), 0, cuda_stream, in, s, b,
                   out, shape.n, shape.pixels, columns, lanes);
    });
  });
  check_launch("channel_scale");
}

void channel_dot(Stream stream, const ChannelScaleShape& shape, const void* a, const void* b,
                 void* out) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Products<T> terms{static_cast<const T*>(a), static_cast<const T*>(b)};
    const int64_t extent = shape.channels_last ? shape.c : shape.pixels;
    with_width<T>(takes_vectors<T>(extent, terms.a, terms.b), [&](auto width) {
      launch_sums<decltype(width)::value>(as_cuda(stream), shape, terms, static_cast<T*>(out));
    });
  });
  check_launch("channel_dot");
}

void channel_mean(Stream stream, const ChannelScaleShape& shape, const void* x, void* out) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Mean<T> terms{static_cast<const T*>(x), static_cast<acc_t<T>>(shape.pixels)};
    const int64_t extent = shape.channels_last ? shape.c : shape.pixels;
    with_width<T>(takes_vectors<T>(extent, terms.x), [&](auto width) {
      launch_sums<decltype(width)::value>(as_cuda(stream), shape, terms, static_cast<T*>(out));
    });
  });
  check_launch("channel_mean");
}

}  // namespace braze::cuda
