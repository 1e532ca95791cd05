// Passes over images that end or begin with values of each channel of each image: sums over a
// channel's pixels, and results made of an element and its channel's values. Memory-bound, 16 bytes
// per thread and access, four accesses in flight.
//
// channels_last: threads that follow each other take vectors of channels that follow each other,
// and go on in steps of whole pixels, so that each keeps its channels, their values and their sums
// in registers. Contiguous: a warp takes a plane.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "launchers/channel_scale.h"

namespace braze::cuda {

constexpr int kPassThreads = 256, kDotThreads = 512, kWarp = 32;
constexpr int kUnroll = 4;         // vectors that a thread loads before it uses them
constexpr int kMostLanes = 32;     // of a block of sums in channels_last: vectors of channels
constexpr int kLeastPixels = 8;    // of its threads, where there are many blocks
constexpr int64_t kMostY = 65535;  // blocks along a grid's second dimension

// A pass P over elements T writes, for vectors of N of them, what apply(loaded, values, y) makes of
// what load(loaded, at) has read and of what get(values, channel) has of the channels from that
// one, counted over all images, on: of each its own, or of a plane's one (kPlanes) for all.

// A block takes `lanes` columns, vectors of channels, of an image, from column blockIdx.z * lanes
// on; a row of so many threads takes a pixel.
template <int N, typename T, typename P>
__global__ void __launch_bounds__(kPassThreads)
    pass_channels_last_kernel(P pass, T* y, int64_t n, int64_t pixels, int columns, int lanes) {
  wait_for_earlier_kernels();
  const int rows = kPassThreads / lanes, row = threadIdx.x / lanes;
  const int column = blockIdx.z * lanes + threadIdx.x % lanes;
  if (row >= rows || column >= columns) return;
  const int64_t step = int64_t{gridDim.x} * rows;
  for (int64_t image = blockIdx.y; image < n; image += gridDim.y) {
    typename P::template Values<N> values;
    pass.template get<N, false>(values, (image * columns + column) * N);
    for (int64_t pixel = blockIdx.x * int64_t{rows} + row; pixel < pixels;
         pixel += step * kUnroll) {
      typename P::template Loaded<N> loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = ((image * pixels + pixel + u * step) * columns + column) * N;
        if (pixel + u * step < pixels) pass.template load<N>(loaded[u], at);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = ((image * pixels + pixel + u * step) * columns + column) * N;
        if (pixel + u * step >= pixels) break;
        acc_t<T> v[N];
        pass.template apply<N>(loaded[u], values, v);
        store_as(y + at, v);
      }
    }
  }
}

// A warp for each plane of `vectors` vectors.
template <int N, typename T, typename P>
__global__ void __launch_bounds__(kPassThreads)
    pass_planes_kernel(P pass, T* y, int64_t planes, int64_t vectors) {
  const int lane = threadIdx.x % kWarp;
  const int64_t warps = int64_t{gridDim.x} * (blockDim.x / kWarp);
  wait_for_earlier_kernels();
  for (int64_t plane = blockIdx.x * int64_t{blockDim.x / kWarp} + threadIdx.x / kWarp;
       plane < planes; plane += warps) {
    typename P::template Values<N> values;
    pass.template get<N, true>(values, plane);
    for (int64_t i = lane; i < vectors; i += kWarp * kUnroll) {
      typename P::template Loaded<N> loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = (plane * vectors + i + u * kWarp) * N;
        if (i + u * kWarp < vectors) pass.template load<N>(loaded[u], at);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * kWarp >= vectors) break;
        acc_t<T> v[N];
        pass.template apply<N>(loaded[u], values, v);
        store_as(y + (plane * vectors + i + u * kWarp) * N, v);
      }
    }
  }
}

// Sums S over elements T, kSums of them: add(loaded, sums) of what load(loaded, at) has read, and
// store(channel, sums) of the channel, counted over all images.

// A block sums `lanes` vectors of channels (a power of two) of an image, in a power of two of rows
// of threads that take a pixel each; these are added up pair by pair. The blocks of a cluster share
// the pixels.
template <int N, typename T, typename S>
__global__ void __launch_bounds__(kDotThreads, 1)
    sum_channels_last_kernel(S terms, int64_t n, int64_t pixels, int columns, int lanes,
                             int cluster) {
  using A = acc_t<T>;
  constexpr int M = N * S::kSums;  // of a thread
  __shared__ A shared[kDotThreads * M];
  wait_for_earlier_kernels();
  const int rows = blockDim.x / lanes, row = threadIdx.x / lanes;
  const int tile = blockIdx.x / cluster, rank = blockIdx.x - tile * cluster;
  const int column = tile * lanes + threadIdx.x % lanes, step = rows * cluster;
  for (int64_t image = blockIdx.y; image < n; image += gridDim.y) {
    A sums[S::kSums][N] = {};
    A* const all = sums[0];
    if (column < columns) {
      for (int64_t pixel = rank * rows + row; pixel < pixels; pixel += step * kUnroll) {
        typename S::template Loaded<N> loaded[kUnroll];
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
        for (int k = 0; k < M; ++k) shared[k * kDotThreads + threadIdx.x] = all[k];
      }
      __syncthreads();
      if (row < half) {
#pragma unroll
        for (int k = 0; k < M; ++k) all[k] += shared[k * kDotThreads + threadIdx.x + half * lanes];
      }
      __syncthreads();
    }
    if (cluster > 1) {
      if (row == 0) {
#pragma unroll
        for (int k = 0; k < M; ++k) shared[k * kDotThreads + threadIdx.x] = all[k];
      }
      cluster_sync();
      for (int other = 1; rank == 0 && row == 0 && other < cluster; ++other) {
        const A* const theirs = in_cluster(shared, other);
#pragma unroll
        for (int k = 0; k < M; ++k) all[k] += theirs[k * kDotThreads + threadIdx.x];
      }
      cluster_sync();  // they have been read
    }
    if (rank == 0 && row == 0 && column < columns) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        A of_channel[S::kSums];
#pragma unroll
        for (int j = 0; j < S::kSums; ++j) of_channel[j] = sums[j][k];
        terms.store((image * columns + column) * N + k, of_channel);
      }
    }
  }
}

// A warp for each plane.
template <int N, typename T, typename S>
__global__ void sum_planes_kernel(S terms, int64_t planes, int64_t vectors) {
  using A = acc_t<T>;
  const int lane = threadIdx.x % kWarp;
  const int64_t warps = int64_t{gridDim.x} * (blockDim.x / kWarp);
  for (int64_t plane = blockIdx.x * int64_t{blockDim.x / kWarp} + threadIdx.x / kWarp;
       plane < planes; plane += warps) {
    A sums[S::kSums][N] = {};
    for (int64_t i = lane; i < vectors; i += kWarp * kUnroll) {
      typename S::template Loaded<N> loaded[kUnroll];
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
    A of_channel[S::kSums] = {};
#pragma unroll
    for (int j = 0; j < S::kSums; ++j) {
#pragma unroll
      for (int k = 0; k < N; ++k) of_channel[j] += sums[j][k];
#pragma unroll
      for (int offset = kWarp / 2; offset > 0; offset /= 2) {
        of_channel[j] += __shfl_xor_sync(0xffffffff, of_channel[j], offset);
      }
    }
    if (lane == 0) terms.store(plane, of_channel);
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

inline int plane_blocks(int64_t planes) { return grid_stride_blocks(planes * kWarp, kPassThreads); }

template <typename T, int N, typename S>
void launch_sums(cudaStream_t stream, const ChannelScaleShape& shape, const S& terms) {
  const int64_t planes = shape.n * shape.c;
  if (!shape.channels_last) {
    sum_planes_kernel<N, T>
        <<<plane_blocks(planes), kPassThreads, 0, stream>>>(terms, planes, shape.pixels / N);
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
  // The more rows, the more steps until they are added up.
  int threads = kDotThreads;
  while (blocks() >= sm_count() && threads > 2 * kWarp &&
         threads / 2 / lanes * kLeastPixels >= shape.pixels) {
    threads /= 2;
  }
  launch_early_in_clusters(sum_channels_last_kernel<N, T, S>, grid, dim3(threads), 0, stream,
                           cluster, terms, shape.n, shape.pixels, columns, lanes, cluster);
}

template <typename T, int N, typename P>
void launch_pass(cudaStream_t stream, const ChannelScaleShape& shape, const P& pass, T* y) {
  const int64_t planes = shape.n * shape.c;
  if (!shape.channels_last) {
    launch_early(pass_planes_kernel<N, T, P>, static_cast<unsigned>(plane_blocks(planes)),
                 kPassThreads, 0, stream, pass, y, planes, shape.pixels / N);
    return;
  }
  const int columns = static_cast<int>(shape.c / N), lanes = std::min(columns, kPassThreads);
  const int64_t tiles = ceil_div(columns, lanes), rows = kPassThreads / lanes;
  const int64_t wanted = ceil_div(int64_t{sm_count()} * 8, shape.n * tiles);
  const dim3 grid(static_cast<unsigned>(std::min(wanted, ceil_div(shape.pixels, rows))),
                  static_cast<unsigned>(std::min(shape.n, kMostY)), static_cast<unsigned>(tiles));
  launch_early(pass_channels_last_kernel<N, T, P>, grid, dim3(kPassThreads), 0, stream, pass, y,
               shape.n, shape.pixels, columns, lanes);
}

// f(integral constant N) for vectors of the innermost extent, where all pointers take them.
template <typename T, typename F, typename... Pointers>
void with_channel_vectors(const ChannelScaleShape& shape, const F& f, const Pointers*... pointers) {
  const int64_t extent = shape.channels_last ? shape.c : shape.pixels;
  with_width<T>(takes_vectors<T>(extent, pointers...), f);
}

}  // namespace braze::cuda
