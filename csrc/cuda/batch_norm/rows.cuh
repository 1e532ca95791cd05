// Batch norm over [n * inner, c]: rows of channels (channels_last, and [n, c]). A thread keeps to
// one vector of N channels and walks down the rows; a block takes part of the rows for a tile of
// vectors of channels. A line of threads is as long as the tile, made up to a power of two.
#pragma once

#include "channel.cuh"

namespace braze::cuda {

// 80 registers a thread: eight channels of coefficients and the vectors in flight fit without
// spills.
constexpr int kRowThreads = 768;
constexpr int kRowTile = 32;  // vectors of channels per block, at most

// How many vectors a thread has in flight: 64 bytes, as far as four loads go.
constexpr int kRowUnroll = 4;

// Threads in a line.
inline int64_t row_pitch(int64_t vectors, int64_t tile) {
  int64_t pitch = 1;
  while (pitch < std::min(vectors, tile)) pitch *= 2;
  return pitch;
}

// Blocks per tile, for rows of `vectors` vectors: at most one per multiprocessor, since each block
// of the second kernel reads all partial results of its tile.
inline int row_splits(int64_t rows, int64_t vectors) {
  const int64_t height = kRowThreads / row_pitch(vectors, kRowTile);
  const int64_t rounds = ceil_div(rows, height * 2);
  const int64_t wanted = ceil_div(sm_count(), ceil_div(vectors, kRowTile));
  return static_cast<int>(std::min(rounds, wanted));
}

struct RowShape {
  int64_t rows, c;
  int splits;           // blocks per tile
  int tile = kRowTile;  // vectors of channels per block, at most; a power of two
};

// Where a thread stands: vector `column` of the block's tile, row `line` of those that the block
// takes at a time.
template <int N>
struct RowPlace {
  int width;      // vectors in the tile
  int height;     // rows the block takes at a time
  int log_pitch;  // of the threads in a line
  int column, line;
  int tile_channels;   // channels in the tile
  int64_t tile_begin;  // first channel of the tile
  int64_t begin, end;  // the block's rows

  __device__ explicit RowPlace(const RowShape& shape) {
    const int64_t left = shape.c / N - int64_t{blockIdx.y} * shape.tile;
    width = static_cast<int>(left < shape.tile ? left : shape.tile);
    log_pitch = 32 - __clz(width - 1);
    height = static_cast<int>(blockDim.x) >> log_pitch;
    column = static_cast<int>(threadIdx.x) & ((1 << log_pitch) - 1);
    line = static_cast<int>(threadIdx.x) >> log_pitch;
    tile_begin = int64_t{blockIdx.y} * shape.tile * N;
    tile_channels = width * N;
    begin = split_begin(shape.rows, blockIdx.x, shape.splits);
    end = split_begin(shape.rows, blockIdx.x + 1, shape.splits);
  }

  // Not the threads behind the end of the tile.
  __device__ bool works() const { return column < width; }
  __device__ int64_t channel() const { return tile_begin + column * N; }
};

// Shared memory of row_block_sum: a line of up to 32 vectors from each warp.
template <typename A, int N>
using RowSums = A[kRowThreads / 32][N][32];

// v[k] = sum over the block's lines, per column, in every thread: within warps, then over warps.
// The order is fixed.
template <typename A, int N>
__device__ void row_block_sum(A (&v)[N], RowSums<A, N>& shared, const RowPlace<N>& place) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pitch = 1 << place.log_pitch;
  for (int lanes = pitch; lanes < 32; lanes *= 2) {
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] += __shfl_xor_sync(~0u, v[k], lanes);
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (lane < pitch) shared[warp][k][lane] = v[k];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < N * pitch; i += blockDim.x) {
    const int k = i >> place.log_pitch, column = i & (pitch - 1);
    A sum = 0;
#pragma unroll
    for (int w = 0; w < kRowThreads / 32; ++w) {
      if (w < static_cast<int>(blockDim.x / 32)) sum += shared[w][k][column];
    }
    shared[0][k][column] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < N; ++k) v[k] = shared[0][k][place.column];
  __syncthreads();
}

template <typename T, int N>
__global__ void __launch_bounds__(kRowThreads)
    row_moments_kernel(const T* __restrict__ x, RowShape shape,
                       MomentsPartial* __restrict__ partials, int64_t* batches) {
  using A = acc_t<T>;
  constexpr int U = kRowUnroll;
  __shared__ RowSums<A, N> shared;
  if (batches && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) ++*batches;
  const RowPlace<N> place(shape);
  const T* base = x + place.channel();
  A center[N] = {}, sum[N] = {}, squares[N] = {};
  int64_t row = place.works() ? place.begin + place.line : place.end;
  if (row < place.end) {
    const Vec<T, N> v = load_vec<N>(base + row * shape.c);
#pragma unroll
    for (int k = 0; k < N; ++k) center[k] = convert<A>(v.v[k]);
  }
  // Sums about the mean of the block's first rows; see plane_moments_kernel.
  row_block_sum(center, shared, place);
  const int64_t count = place.end - place.begin;
  const A first_rows = static_cast<A>(count < place.height ? count : place.height);
#pragma unroll
  for (int k = 0; k < N; ++k) center[k] /= first_rows;
  for (; row < place.end; row += int64_t{place.height} * U) {
    Vec<T, N> v[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * place.height;
      if (r < place.end) v[u] = load_vec<N>(base + r * shape.c);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (row + u * place.height >= place.end) break;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A d = convert<A>(v[u].v[k]) - center[k];
        sum[k] += d;
        squares[k] += d * d;
      }
    }
  }
  row_block_sum(sum, shared, place);
  row_block_sum(squares, shared, place);
  if (place.line == 0 && place.works()) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const double offset = static_cast<double>(sum[k]) / static_cast<double>(count);
      partials[(place.channel() + k) * shape.splits + blockIdx.x] = {
          static_cast<double>(center[k]) + offset,
          static_cast<double>(squares[k]) - offset * static_cast<double>(sum[k])};
    }
  }
}

// The coefficients of the tile's channels, a team of kLanes lanes to each; f(channel) is called by
// whole teams and returns them in the first lane.
template <int kLanes = 32, typename Coefficients, int N, typename F>
__device__ void tile_coefficients(Coefficients* shared, const RowPlace<N>& place, const F& f) {
  for (int i = threadIdx.x / kLanes; i < place.tile_channels; i += blockDim.x / kLanes) {
    const Coefficients result = f(place.tile_begin + i);
    if (threadIdx.x % kLanes == 0) shared[i] = result;
  }
  __syncthreads();
}

template <typename T, int N, Source kSource, bool kRelu = false>
__global__ void __launch_bounds__(kRowThreads)
    row_normalize_kernel(const T* __restrict__ x, T* __restrict__ y, RowShape shape,
                         const MomentsPartial* __restrict__ partials, int partial_splits,
                         ForwardArgs args) {
  using A = acc_t<T>;
  constexpr int U = kRowUnroll;
  __shared__ ForwardCoefficients<A> shared[kRowTile * N];
  const RowPlace<N> place(shape);
  const bool first = blockIdx.x == 0;
  tile_coefficients(shared, place, [&](int64_t c) {
    if constexpr (kSource == Source::kBatch) {
      return merge_moments<A>(args, partials, partial_splits, shape.rows, 1, c, first);
    } else if constexpr (kSource == Source::kGiven) {
      return given_coefficients<A>(args.statistics, c);
    } else {
      return running_coefficients<A>(args, c, first && threadIdx.x % 32 == 0);
    }
  });
  if (!place.works()) return;
  ForwardCoefficients<A> coefficients[N];
#pragma unroll
  for (int k = 0; k < N; ++k) coefficients[k] = shared[place.column * N + k];
  const int64_t column = place.channel();
  for (int64_t row = place.begin + place.line; row < place.end; row += int64_t{place.height} * U) {
    Vec<T, N> v[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * place.height;
      if (r < place.end) v[u] = load_vec<N>(x + r * shape.c + column);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * place.height;
      if (r >= place.end) break;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        v[u].v[k] = convert<T>(normalized<kRelu>(convert<A>(v[u].v[k]), coefficients[k]));
      }
      store_vec(y + r * shape.c + column, v[u]);
    }
  }
}

// kRelu: of dy where ReLU let x's normalised value through.
template <typename T, int N, bool kRelu>
__global__ void __launch_bounds__(kRowThreads)
    row_grad_sums_kernel(const T* __restrict__ dy, const T* __restrict__ x,
                         BatchNormStatistics statistics, RowShape shape,
                         GradPartial<acc_t<T>>* __restrict__ partials) {
  using A = acc_t<T>;
  constexpr int U = kRowUnroll / 2;  // two tensors
  __shared__ RowSums<A, N> shared;
  const RowPlace<N> place(shape);
  const int64_t column = place.channel();
  A center[N] = {}, sum[N] = {}, dot[N] = {};
  ReluGate<A, kRelu> gate[N];
  int64_t row = place.end;
  if (place.works()) {
    row = place.begin + place.line;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      center[k] = static_cast<const A*>(statistics.mean)[column + k];
      gate[k] = ReluGate<A, kRelu>(statistics, column + k);
    }
  }
  for (; row < place.end; row += int64_t{place.height} * U) {
    Vec<T, N> g[U], v[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * place.height;
      if (r >= place.end) break;
      g[u] = load_vec<N>(dy + r * shape.c + column);
      v[u] = load_vec<N>(x + r * shape.c + column);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (row + u * place.height >= place.end) break;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A deviation = convert<A>(v[u].v[k]) - center[k];
        const A grad = gate[k](convert<A>(g[u].v[k]), deviation);
        sum[k] += grad;
        dot[k] += grad * deviation;
      }
    }
  }
  row_block_sum(sum, shared, place);
  row_block_sum(dot, shared, place);
  if (place.line == 0 && place.works()) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      partials[(column + k) * shape.splits + blockIdx.x] = {sum[k], dot[k]};
    }
  }
}

// dx may be nullptr: then only dweight and dbias are made.
template <typename T, int N, bool kTraining, bool kRelu>
__global__ void __launch_bounds__(kRowThreads)
    row_input_grad_kernel(const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx,
                          RowShape shape, const GradPartial<acc_t<T>>* __restrict__ partials,
                          int partial_splits, BackwardArgs args) {
  using A = acc_t<T>;
  constexpr int U = kRowUnroll / 2;
  __shared__ BackwardCoefficients<A> shared[kRowTile * N];
  const RowPlace<N> place(shape);
  tile_coefficients(shared, place, [&](int64_t c) {
    return merge_grads<A>(args, partials, partial_splits, shape.rows, c, blockIdx.x == 0);
  });
  if (!dx || !place.works()) return;
  // dx = dy * by_grad + x * by_input + offset would cancel where the mean is large: keep the
  // center.
  BackwardCoefficients<A> coefficients[N];
#pragma unroll
  for (int k = 0; k < N; ++k) coefficients[k] = shared[place.column * N + k];
  const int64_t column = place.channel();
  ReluGate<A, kRelu> gate[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    gate[k] = ReluGate<A, kRelu>(args.statistics, column + k);
    if constexpr (kRelu) coefficients[k].by_grad = gate[k].scale;  // one register for both
  }
  for (int64_t row = place.begin + place.line; row < place.end; row += int64_t{place.height} * U) {
    Vec<T, N> g[U], v[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * place.height;
      if (r >= place.end) break;
      g[u] = load_vec<N>(dy + r * shape.c + column);
      if constexpr (kTraining || kRelu) {
        v[u] = load_vec<N>(x + r * shape.c + column);
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * place.height;
      if (r >= place.end) break;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const BackwardCoefficients<A>& c = coefficients[k];
        A deviation = 0;
        if constexpr (kTraining || kRelu) deviation = convert<A>(v[u].v[k]) - c.center;
        A grad = gate[k](convert<A>(g[u].v[k]), deviation) * c.by_grad;
        if constexpr (kTraining) grad += deviation * c.by_input + c.offset;
        g[u].v[k] = convert<T>(grad);
      }
      store_vec(dx + r * shape.c + column, g[u]);
    }
  }
}

}  // namespace braze::cuda
