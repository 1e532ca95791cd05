// Forward of conv_bn_relu2d.h: one pass that normalises and pools.
#include "bn_pool.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

// y = (z - center) * scale + shift, [c] each.
template <typename A>
struct Coefficients {
  const A* center;
  const A* scale;
  const A* shift;
};

constexpr int kPlaneUnrollForward = 4;

template <typename T, int V, bool kVector>
__global__ void __launch_bounds__(kBnPoolThreads)
    pool_planes_kernel(const T* z, T* __restrict__ y, uint32_t* __restrict__ codes, int64_t steps,
                       BnPoolSplit split, FastDiv channels, BnPoolGeometry geometry,
                       Coefficients<acc_t<T>> k) {
  wait_for_earlier_kernels();
  using A = acc_t<T>;
  constexpr int U = kPlaneUnrollForward;
  const int64_t first = blockIdx.x * int64_t{kBnPoolThreads * U} + threadIdx.x;
  Vec<T, 2 * V> top[U], bottom[U];
  A center[U], scale[U], shift[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t step = first + u * kBnPoolThreads;
    if (step >= steps) break;
    int64_t plane;
    int row, column, group, channel;
    split(step, &plane, &row, &column, &group);
    const T* corner = z + geometry.input(plane, 2 * row, 2 * V * column);
    top[u] = load_pairs<V, kVector>(corner, true);
    bottom[u] = load_pairs<V, kVector>(corner + geometry.w, true);
    channels.div(static_cast<int>(plane), channel);
    center[u] = k.center[channel];
    scale[u] = k.scale[channel];
    shift[u] = k.shift[channel];
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t step = first + u * kBnPoolThreads;
    const bool valid = step < steps;
    uint32_t bits = 0;
    if (valid) {
      Vec<T, V> result;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const T window[4] = {top[u].v[2 * v], top[u].v[2 * v + 1], bottom[u].v[2 * v],
                             bottom[u].v[2 * v + 1]};
        A values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          values[i] = (convert<A>(window[i]) - center[u]) * scale[u] + shift[u];
        }
        uint32_t code;
        result.v[v] = convert<T>(pool_window(values, &code));
        bits |= code << (4 * v);
      }
      store_vec(y + step * V, result);
    }
    store_codes<V>(codes, step * V, valid, bits);
  }
}

// What a block has pooled, of whole pixels, on its way to NCHW order: lanes beside each other store
// pixels beside each other there. (A lane with eight channels of a pixel stores to eight lines.)
template <typename T, int N>
class TurnedBlock {
 public:
  // `groups`: vectors of channels of a pixel. A power of two, so that a block has whole pixels.
  static bool fits(int64_t groups) {
    return groups <= kBnPoolThreads && kBnPoolThreads % groups == 0;
  }

  // This thread's vector, of its pixel.
  __device__ __forceinline__ void put(int groups, const Vec<T, N>& v) {
    const int pixels = kBnPoolThreads / groups, thread = static_cast<int>(threadIdx.x);
    T* const to = values_ + (thread & (groups - 1)) * N * (pixels + 1) + thread / groups;
#pragma unroll
    for (int j = 0; j < N; ++j) to[j * (pixels + 1)] = v.v[j];
  }

  // By all threads. steps: vectors in all.
  __device__ __forceinline__ void store(int groups, int64_t steps, const BnPoolSplit& split,
                                        const BnPoolGeometry& geometry, T* __restrict__ y) const {
    __syncthreads();
    const int pixels = kBnPoolThreads / groups, plane = geometry.p * geometry.q;
    const int log_pixels = 31 - __clz(pixels);
    const int64_t first_step = blockIdx.x * int64_t{kBnPoolThreads};
    const int64_t there = (steps - first_step) / groups;  // pixels, of which the block may have all
    int64_t first_image;
    int row, column, group;
    split(first_step, &first_image, &row, &column, &group);
#pragma unroll
    for (int u = 0; u < N; ++u) {
      const int at = static_cast<int>(threadIdx.x) + u * kBnPoolThreads;
      const int channel = at >> log_pixels, pixel = at & (pixels - 1);
      if (pixel >= there) continue;
      const int place = row * geometry.q + column + pixel, images = place / plane;
      y[((first_image + images) * geometry.c + channel) * plane + place - images * plane] =
          values_[channel * (pixels + 1) + pixel];
    }
  }

 private:
  T values_[2 * kBnPoolThreads * N];  // [channel][pixel], with room for one pixel more
};

// kTurned: y is in NCHW order, and TurnedBlock fits.
template <typename T, int N, bool kTurned>
__global__ void __launch_bounds__(kBnPoolThreads)
    pool_pixels_kernel(const T* z, T* __restrict__ y, uint32_t* __restrict__ codes,
                       T* __restrict__ maxima, int64_t steps, BnPoolSplit split,
                       BnPoolGeometry geometry, Coefficients<acc_t<T>> k) {
  order_earlier_kernels();
  using A = acc_t<T>;
  [[maybe_unused]] const int groups = static_cast<int>(geometry.c) / N;
  __shared__ std::conditional_t<kTurned, TurnedBlock<T, N>, char> turned;
  const int64_t step = blockIdx.x * int64_t{kBnPoolThreads} + threadIdx.x;
  const bool valid = step < steps;
  uint32_t bits = 0;
  if (valid) {
    int64_t image;
    int row, column, group;
    split(step, &image, &row, &column, &group);
    const T* corner = z + geometry.input(image, 2 * row, 2 * column) + int64_t{group} * N;
    const int64_t right = geometry.depth, down = geometry.w * geometry.depth;
    const Vec<T, N> window[4] = {load_vec<N>(corner), load_vec<N>(corner + right),
                                 load_vec<N>(corner + down), load_vec<N>(corner + down + right)};
    const int64_t channel = int64_t{group} * N;
    const Vec<A, N> center = load_vec<N>(k.center + channel);
    const Vec<A, N> scale = load_vec<N>(k.scale + channel);
    const Vec<A, N> shift = load_vec<N>(k.shift + channel);
    Vec<T, N> result, maximum;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      A values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = (convert<A>(window[i].v[j]) - center.v[j]) * scale.v[j] + shift.v[j];
      }
      uint32_t code;
      result.v[j] = convert<T>(pool_window(values, &code));
      maximum.v[j] = coded(code, window[0].v[j], window[1].v[j], window[2].v[j], window[3].v[j]);
      bits |= code << (4 * j);
    }
    if (maxima) store_vec(maxima + step * N, maximum);
    if constexpr (kTurned) {
      turned.put(groups, result);
    } else {
      geometry.store_pooled(y, image, row, column, channel, result);
    }
  }
  store_codes<N>(codes, step * N, valid, bits);
  if constexpr (kTurned) {
    turned.store(groups, steps, split, geometry, y);
  }
}

const KernelEntry kEntry({"bn_relu2d", "bn_pool", "float64 float32 bfloat16 float16", "sm_80+",
                          true,
                          "normalises and pools in one pass; 4-bit codes for the backward pass"});

}  // namespace

bool bn_pool_turns(const BnPoolShape& shape) {
  return shape.channels_last && shape.pooled() <= int64_t{1} << 20;
}

void bn_pool_forward(Stream stream, const BnPoolShape& shape, const void* z,
                     const BatchNormStatistics& statistics, void* y, uint32_t* codes) {
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const T* in = static_cast<const T*>(z);
    T* out = static_cast<T*>(y);
    const BnPoolGeometry geometry(shape);
    const Coefficients<A> k{static_cast<const A*>(statistics.mean),
                            static_cast<const A*>(statistics.scale),
                            static_cast<const A*>(statistics.shift)};
    if (shape.channels_last) {
      with_channels<T>(shape, {z, y, k.center, k.scale, k.shift}, [&](auto width) {
        constexpr int N = decltype(width)::value;
        const int64_t steps = shape.pooled() / N;
        const auto blocks = static_cast<unsigned int>(ceil_div(steps, kBnPoolThreads));
        T* const maxima =
            shape.keeps_maxima ? reinterpret_cast<T*>(codes + bn_pool_maxima_word(shape)) : nullptr;
        const bool turned = shape.turned && TurnedBlock<T, N>::fits(shape.c / N);
        const auto kernel =
            turned ? pool_pixels_kernel<T, N, true> : pool_pixels_kernel<T, N, false>;
        launch_early(kernel, blocks, kBnPoolThreads, 0, s, in, out, codes, maxima, steps,
                     BnPoolSplit(shape.c / N, shape.q(), shape.p()), geometry, k);
      });
      note_ordering_kernel(stream, {{y, shape.pooled() * size_of(shape.dtype)},
                                    {codes, bn_pool_code_words(shape) * int64_t{4}}});
    } else {
      with_windows<T>(shape, {z}, {y}, [&](auto windows, auto vector) {
        constexpr int V = decltype(windows)::value;
        const int64_t steps = shape.pooled() / V;
        const auto blocks = static_cast<unsigned int>(
            ceil_div(steps, int64_t{kBnPoolThreads} * kPlaneUnrollForward));
        launch_early(pool_planes_kernel<T, V, decltype(vector)::value>, blocks, kBnPoolThreads, 0,
                     s, in, out, codes, steps, BnPoolSplit(1, shape.q() / V, shape.p()),
                     FastDiv(shape.c), geometry, k);
      });
    }
  });
  check_launch("bn_relu2d");
}

}  // namespace braze::cuda
