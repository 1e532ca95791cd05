// Backward of bn_pool.h: partial sums of g and of g * (z - mean) at the windows' maxima, a merge in
// float64 that gives the parameters' gradients and what dz is made with, and one pass that makes
// dz.
#include "bn_pool.cuh"
#include "kernels/batch_norm/planes.cuh"
#include "kernels/batch_norm/rows.cuh"

namespace braze::cuda {
namespace {

constexpr int kUnroll = 2;  // vectors of a plane that a thread has in flight, of each tensor

// dz = dy * by_grad + (z - center) * by_input + offset, [c] each.
template <typename A>
struct GradCoefficients {
  const A* center;
  A* by_grad;
  A* by_input;
  A* offset;
};

// The element of a window that the code points to.
template <typename T>
__device__ __forceinline__ T coded(uint32_t code, T a, T b, T c, T d) {
  const T top = code & 1 ? b : a, bottom = code & 1 ? d : c;
  return code & 2 ? bottom : top;
}

// A block per part of a channel, as in plane_grad_sums_kernel.
template <typename T, int V, bool kVector>
__global__ void __launch_bounds__(kPlaneThreads)
    pooled_plane_sums_kernel(const T* __restrict__ dy, const T* __restrict__ z,
                             const uint32_t* __restrict__ codes, const acc_t<T>* __restrict__ mean,
                             int64_t steps, int splits, BnPoolSplit split, BnPoolGeometry geometry,
                             GradPartial<acc_t<T>>* __restrict__ partials) {
  using A = acc_t<T>;
  __shared__ A shared[kPlaneThreads / 32];
  const A center = mean[blockIdx.x];
  const int64_t end = split_begin(steps, blockIdx.y + 1, splits);
  int64_t at = split_begin(steps, blockIdx.y, splits) + threadIdx.x;
  A sum = 0, dot = 0;
  for (; at < end; at += kPlaneThreads * kUnroll) {
    Vec<T, V> g[kUnroll];
    Vec<T, 2 * V> top[kUnroll], bottom[kUnroll];
    uint32_t bits[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t step = at + u * kPlaneThreads;
      if (step >= end) break;
      int64_t image;
      int row, column, group;
      split(step, &image, &row, &column, &group);
      const int64_t plane = image * geometry.c + blockIdx.x;
      const int64_t pooled = geometry.pooled(plane, row, V * column);
      const T* corner = z + geometry.input(plane, 2 * row, 2 * V * column);
      g[u] = load_vec<V>(dy + pooled);
      bits[u] = load_codes<V>(codes, pooled);
      top[u] = load_pairs<V, kVector>(corner, true);
      bottom[u] = load_pairs<V, kVector>(corner + geometry.w, true);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * kPlaneThreads >= end) break;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const uint32_t code = bits[u] >> (4 * v) & 7;
        if (code == kStopped) continue;
        const A grad = convert<A>(g[u].v[v]);
        sum += grad;
        dot += grad * (convert<A>(coded(code, top[u].v[2 * v], top[u].v[2 * v + 1],
                                        bottom[u].v[2 * v], bottom[u].v[2 * v + 1])) -
                       center);
      }
    }
  }
  sum = plane_block_sum(sum, shared);
  dot = plane_block_sum(dot, shared);
  if (threadIdx.x == 0) partials[int64_t{blockIdx.x} * splits + blockIdx.y] = {sum, dot};
}

// A block per part of the pooled pixels and tile of channels, as in row_grad_sums_kernel.
template <typename T, int N>
__global__ void __launch_bounds__(kRowThreads)
    pooled_row_sums_kernel(const T* __restrict__ dy, const T* __restrict__ z,
                           const uint32_t* __restrict__ codes, const acc_t<T>* __restrict__ mean,
                           RowShape shape, BnPoolSplit split, BnPoolGeometry geometry,
                           GradPartial<acc_t<T>>* __restrict__ partials) {
  using A = acc_t<T>;
  __shared__ A shared[N][kRowThreads];
  const RowPlace<N> place(shape);
  const int64_t channel = place.channel();
  const int64_t right = geometry.depth, down = geometry.w * geometry.depth;
  A center[N] = {}, sum[N] = {}, dot[N] = {};
  int64_t pixel = place.end;
  if (place.works()) {
    pixel = place.begin + place.line;
#pragma unroll
    for (int k = 0; k < N; ++k) center[k] = mean[channel + k];
  }
  for (; pixel < place.end; pixel += place.height) {
    int64_t image;
    int row, column, group;
    split(pixel, &image, &row, &column, &group);
    const T* corner = z + geometry.input(image, 2 * row, 2 * column) + channel;
    const int64_t pooled = pixel * shape.c + channel;
    const Vec<T, N> g = load_vec<N>(dy + pooled);
    const uint32_t bits = load_codes<N>(codes, pooled);
    const Vec<T, N> window[4] = {load_vec<N>(corner), load_vec<N>(corner + right),
                                 load_vec<N>(corner + down), load_vec<N>(corner + down + right)};
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const uint32_t code = bits >> (4 * k) & 7;
      if (code == kStopped) continue;
      const A grad = convert<A>(g.v[k]);
      sum[k] += grad;
      dot[k] +=
          grad *
          (convert<A>(coded(code, window[0].v[k], window[1].v[k], window[2].v[k], window[3].v[k])) -
           center[k]);
    }
  }
  row_block_sum<A, N>(sum, shared, place);
  row_block_sum<A, N>(dot, shared, place);
  if (place.line == 0) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      partials[(channel + k) * shape.splits + blockIdx.x] = {sum[k], dot[k]};
    }
  }
}

constexpr int kMergeThreads = 128;

// A warp per channel.
template <typename A>
__global__ void __launch_bounds__(kMergeThreads)
    merge_grads_kernel(int64_t channels, const GradPartial<A>* __restrict__ partials, int splits,
                       int64_t count, BackwardArgs args, GradCoefficients<A> k) {
  const int64_t c = (blockIdx.x * int64_t{kMergeThreads} + threadIdx.x) / 32;
  if (c >= channels) return;
  const BackwardCoefficients<A> result = merge_grads<A>(args, partials, splits, count, c, true);
  if (threadIdx.x % 32 != 0) return;
  k.by_grad[c] = result.by_grad;
  k.by_input[c] = result.by_input;
  k.offset[c] = result.offset;
}

// Steps go over all tiles, those that are cut off included: no window covers them, so that they
// have no gradient of their own.
template <typename T, int V, bool kVector, bool kTraining>
__global__ void __launch_bounds__(kBnPoolThreads)
    spread_planes_kernel(const T* __restrict__ dy, const T* __restrict__ z,
                         const uint32_t* __restrict__ codes, T* __restrict__ dz, int64_t steps,
                         BnPoolSplit split, FastDiv channels, BnPoolGeometry geometry,
                         GradCoefficients<acc_t<T>> k) {
  using A = acc_t<T>;
  const int64_t first = blockIdx.x * int64_t{kBnPoolThreads * kUnroll} + threadIdx.x;
  int64_t corner[kUnroll];
  bool right[kUnroll], below[kUnroll];
  Vec<T, V> g[kUnroll];
  uint32_t bits[kUnroll];
  Vec<T, 2 * V> top[kUnroll], bottom[kUnroll];
  A by_grad[kUnroll], center[kUnroll], by_input[kUnroll], offset[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t step = first + u * kBnPoolThreads;
    if (step >= steps) break;
    int64_t plane;
    int row, column, group, channel;
    split(step, &plane, &row, &column, &group);
    corner[u] = geometry.input(plane, 2 * row, 2 * V * column);
    right[u] = kVector || column < geometry.q;
    below[u] = row < geometry.p;
    bits[u] = kAllStopped;
    if (right[u] && below[u]) {
      const int64_t pooled = geometry.pooled(plane, row, V * column);
      g[u] = load_vec<V>(dy + pooled);
      bits[u] = load_codes<V>(codes, pooled);
    }
    channels.div(static_cast<int>(plane), channel);
    by_grad[u] = k.by_grad[channel];
    if constexpr (kTraining) {
      top[u] = load_pairs<V, kVector>(z + corner[u], right[u]);
      if (below[u]) bottom[u] = load_pairs<V, kVector>(z + corner[u] + geometry.w, right[u]);
      center[u] = k.center[channel];
      by_input[u] = k.by_input[channel];
      offset[u] = k.offset[channel];
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kBnPoolThreads >= steps) break;
    const auto grad = [&](int v, int position, T value) {
      A result = 0;
      if ((bits[u] >> (4 * v) & 7) == position) result = convert<A>(g[u].v[v]) * by_grad[u];
      if constexpr (kTraining) {
        result += (convert<A>(value) - center[u]) * by_input[u] + offset[u];
      }
      return convert<T>(result);
    };
    Vec<T, 2 * V> upper, lower;
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) {
      upper.v[i] = grad(i / 2, i % 2, top[u].v[i]);
      lower.v[i] = grad(i / 2, 2 + i % 2, bottom[u].v[i]);
    }
    store_pairs<V, kVector>(dz + corner[u], right[u], upper);
    if (below[u]) store_pairs<V, kVector>(dz + corner[u] + geometry.w, right[u], lower);
  }
}

template <typename T, int N, bool kTraining>
__global__ void __launch_bounds__(kBnPoolThreads)
    spread_pixels_kernel(const T* __restrict__ dy, const T* __restrict__ z,
                         const uint32_t* __restrict__ codes, T* __restrict__ dz, int64_t steps,
                         BnPoolSplit split, BnPoolGeometry geometry, GradCoefficients<acc_t<T>> k) {
  using A = acc_t<T>;
  const int64_t step = blockIdx.x * int64_t{kBnPoolThreads} + threadIdx.x;
  if (step >= steps) return;
  int64_t image;
  int row, column, group;
  split(step, &image, &row, &column, &group);
  const int64_t channel = int64_t{group} * N;
  const int64_t corner = geometry.input(image, 2 * row, 2 * column) + channel;
  const bool right = column < geometry.q, below = row < geometry.p;
  const bool inside[4] = {true, right, below, right && below};
  int64_t at[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    at[i] = corner + (i / 2 * geometry.w + i % 2) * geometry.depth;
  }
  Vec<T, N> g, window[4];
  uint32_t bits = kAllStopped;
  if (right && below) {
    const int64_t pooled = geometry.pooled(image, row, column) + channel;
    g = load_vec<N>(dy + pooled);
    bits = load_codes<N>(codes, pooled);
  }
  const Vec<A, N> by_grad = load_vec<N>(k.by_grad + channel);
  Vec<A, N> center, by_input, offset;
  if constexpr (kTraining) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (inside[i]) window[i] = load_vec<N>(z + at[i]);
    }
    center = load_vec<N>(k.center + channel);
    by_input = load_vec<N>(k.by_input + channel);
    offset = load_vec<N>(k.offset + channel);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!inside[i]) continue;
    Vec<T, N> result;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      A grad = 0;
      if ((bits >> (4 * j) & 7) == i) grad = convert<A>(g.v[j]) * by_grad.v[j];
      if constexpr (kTraining) {
        grad += (convert<A>(window[i].v[j]) - center.v[j]) * by_input.v[j] + offset.v[j];
      }
      result.v[j] = convert<T>(grad);
    }
    store_vec(dz + at[i], result);
  }
}

template <typename T, typename Args>
int launch_sums(cudaStream_t s, const BnPoolShape& shape, const T* dy, const T* z,
                const uint32_t* codes, const Args& args, GradPartial<acc_t<T>>* partials) {
  const auto* mean = static_cast<const acc_t<T>*>(args.mean);
  const BnPoolGeometry geometry(shape);
  int splits = 0;
  if (shape.channels_last) {
    with_channels<T>(shape, {dy, z}, [&](auto width) {
      constexpr int N = decltype(width)::value;
      const int64_t vectors = shape.c / N, pixels = shape.n * shape.p() * shape.q();
      splits = row_splits(pixels, vectors);
      const dim3 grid(splits, static_cast<unsigned int>(ceil_div(vectors, kRowTile)));
      pooled_row_sums_kernel<T, N>
          <<<grid, kRowThreads, 0, s>>>(dy, z, codes, mean, RowShape{pixels, shape.c, splits},
                                        BnPoolSplit(1, shape.q(), shape.p()), geometry, partials);
    });
  } else {
    with_windows<T>(shape, {z}, {dy}, [&](auto windows, auto vector) {
      constexpr int V = decltype(windows)::value;
      const int64_t steps = shape.n * shape.p() * (shape.q() / V);
      splits = plane_splits(steps, shape.c);
      const dim3 grid(static_cast<unsigned int>(shape.c), splits);
      pooled_plane_sums_kernel<T, V, decltype(vector)::value><<<grid, kPlaneThreads, 0, s>>>(
          dy, z, codes, mean, steps, splits, BnPoolSplit(1, shape.q() / V, shape.p()), geometry,
          partials);
    });
  }
  check_launch("bn_relu_max_pool2d_backward");
  return splits;
}

template <typename T, bool kTraining>
void launch_spread(cudaStream_t s, const BnPoolShape& shape, const T* dy, const T* z,
                   const uint32_t* codes, T* dz, const GradCoefficients<acc_t<T>>& k) {
  const BnPoolGeometry geometry(shape);
  const int64_t rows = (shape.h + 1) / 2, columns = (shape.w + 1) / 2;
  if (shape.channels_last) {
    with_channels<
        T>(shape, {dy, z, dz, k.center, k.by_grad, k.by_input, k.offset}, [&](auto width) {
      constexpr int N = decltype(width)::value;
      const int64_t steps = shape.tiles() / N;
      spread_pixels_kernel<T, N, kTraining>
          <<<static_cast<unsigned int>(ceil_div(steps, kBnPoolThreads)), kBnPoolThreads, 0, s>>>(
              dy, z, codes, dz, steps, BnPoolSplit(shape.c / N, columns, rows), geometry, k);
    });
  } else {
    with_windows<T>(shape, {z, dz}, {dy}, [&](auto windows, auto vector) {
      constexpr int V = decltype(windows)::value;
      const int64_t steps = shape.tiles() / V;
      const int64_t blocks = ceil_div(steps, int64_t{kBnPoolThreads} * kUnroll);
      spread_planes_kernel<T, V, decltype(vector)::value, kTraining>
          <<<static_cast<unsigned int>(blocks), kBnPoolThreads, 0, s>>>(
              dy, z, codes, dz, steps, BnPoolSplit(1, columns / V, rows), FastDiv(shape.c),
              geometry, k);
    });
  }
  check_launch("bn_relu_max_pool2d_backward");
}

}  // namespace

int64_t bn_pool_workspace_bytes(const BnPoolShape& shape) {
  // Up to three coefficients per channel, then partial results: a gradient's is no larger than
  // what the statistics take, and pooled elements are fewer.
  return 3 * shape.c * sizeof(double) + batch_norm_workspace_bytes(shape.norm());
}

void bn_pool_backward(Stream stream, const BnPoolShape& shape, bool training, const void* dy,
                      const void* z, const uint32_t* codes, const BatchNormAffine& affine,
                      const void* mean, const void* rstd, void* dz, void* dweight, void* dbias,
                      void* workspace) {
  if (!dz && !dweight && !dbias) return;
  const bool has_sums = dweight || dbias || training;
  const BackwardArgs args{affine, mean, rstd, dweight, dbias, has_sums};
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const T* grad = static_cast<const T*>(dy);
    const T* in = static_cast<const T*>(z);
    T* out = static_cast<T*>(dz);
    // Arrays 8 * c bytes apart whatever A is: aligned to 16 bytes where vectors of channels are.
    auto* doubles = static_cast<double*>(workspace);
    const GradCoefficients<A> k{static_cast<const A*>(mean), reinterpret_cast<A*>(doubles),
                                reinterpret_cast<A*>(doubles + shape.c),
                                reinterpret_cast<A*>(doubles + 2 * shape.c)};
    auto* partials = reinterpret_cast<GradPartial<A>*>(doubles + 3 * shape.c);
    int splits = 0;
    if (has_sums) splits = launch_sums<T>(s, shape, grad, in, codes, args, partials);
    const auto blocks = static_cast<unsigned int>(ceil_div(shape.c, kMergeThreads / 32));
    merge_grads_kernel<A><<<blocks, kMergeThreads, 0, s>>>(shape.c, partials, splits,
                                                           shape.n * shape.h * shape.w, args, k);
    check_launch("bn_relu_max_pool2d_backward");
    if (!dz) return;
    if (training) {
      launch_spread<T, true>(s, shape, grad, in, codes, out, k);
    } else {
      launch_spread<T, false>(s, shape, grad, in, codes, out, k);
    }
  });
}

}  // namespace braze::cuda
