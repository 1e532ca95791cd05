// Batch norm over [n, c, inner]: a block takes a part of one channel, which is n runs of `inner`
// adjacent elements. Vectors of N elements divide `inner`; they are numbered through the channel.
#pragma once

#include "channel.cuh"

namespace braze::cuda {

constexpr int kPlaneThreads = 256;
constexpr int kPlaneBlocksPerSm = 8;  // that the kernels aim at: all threads of a multiprocessor

// Blocks per channel of `vectors` vectors: as many as fill the device, each with at least two
// rounds.
inline int plane_splits(int64_t vectors, int64_t channels) {
  const int64_t rounds = ceil_div(vectors, kPlaneThreads * 2);
  const int64_t wanted = ceil_div(int64_t{sm_count()} * kPlaneBlocksPerSm, channels);
  return static_cast<int>(std::min(rounds, wanted));
}

// How many vectors a thread has in flight: 64 bytes, as far as eight loads go.
template <typename T, int N>
constexpr int kPlaneUnroll = sizeof(T) * N >= 16 ? 4 : 8;

struct PlaneShape {
  int64_t n, c, inner;
  int splits;  // blocks per channel
};

// Walks a thread through its vectors of channel blockIdx.x in part blockIdx.y: every
// kPlaneThreads-th, without a division per step.
template <int N>
class PlaneCursor {
 public:
  __device__ explicit PlaneCursor(const PlaneShape& shape)
      : per_image_(shape.inner / N), image_skip_((shape.c - 1) * shape.inner) {
    const int64_t total = shape.n * per_image_;
    const int64_t begin = split_begin(total, blockIdx.y, shape.splits);
    end_ = split_begin(total, blockIdx.y + 1, shape.splits);
    count_ = end_ - begin;
    at_ = begin + threadIdx.x;
    const int64_t image = at_ / per_image_;
    in_image_ = at_ - image * per_image_;
    offset_ = (image * shape.c + blockIdx.x) * shape.inner + in_image_ * N;
    const int64_t step_images = kPlaneThreads / per_image_;
    step_in_image_ = kPlaneThreads - step_images * per_image_;
    step_ = step_images * shape.c * shape.inner + step_in_image_ * N;
  }

  __device__ int64_t count() const { return count_; }  // vectors of the whole block
  __device__ bool valid() const { return at_ < end_; }
  __device__ int64_t offset() const { return offset_; }
  __device__ void advance() {
    at_ += kPlaneThreads;
    offset_ += step_;
    in_image_ += step_in_image_;
    if (in_image_ >= per_image_) {
      in_image_ -= per_image_;
      offset_ += image_skip_;
    }
  }

 private:
  int64_t per_image_, image_skip_;
  int64_t at_, end_, count_;
  int64_t in_image_, offset_;
  int64_t step_in_image_, step_;
};

// Sums over the block, in every thread.
template <typename A>
__device__ A plane_block_sum(A v, A* shared) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  A total = 0;
#pragma unroll
  for (int w = 0; w < kPlaneThreads / 32; ++w) total += shared[w];
  __syncthreads();
  return total;
}

// Sums about the mean of the block's first elements: close to the mean of all, or, where it is far
// off, so are the first elements, and the sum of squares is large enough to hide the cancellation.
template <typename T, int N>
__global__ void __launch_bounds__(kPlaneThreads)
    plane_moments_kernel(const T* __restrict__ x, PlaneShape shape,
                         MomentsPartial* __restrict__ partials, int64_t* batches) {
  using A = acc_t<T>;
  constexpr int U = kPlaneUnroll<T, N>;
  __shared__ A shared[kPlaneThreads / 32];
  if (batches && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) ++*batches;
  PlaneCursor<N> cursor(shape);
  const int64_t count = cursor.count();
  A first = 0;
  if (cursor.valid()) {
    const Vec<T, N> v = load_vec<N>(x + cursor.offset());
#pragma unroll
    for (int k = 0; k < N; ++k) first += convert<A>(v.v[k]);
  }
  const int64_t first_count = (count < kPlaneThreads ? count : kPlaneThreads) * N;
  const A center = plane_block_sum(first, shared) / static_cast<A>(first_count);
  A sum = 0, squares = 0;
  while (cursor.valid()) {
    Vec<T, N> v[U];
    bool valid[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      valid[u] = cursor.valid();
      if (valid[u]) v[u] = load_vec<N>(x + cursor.offset());
      cursor.advance();
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!valid[u]) continue;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A d = convert<A>(v[u].v[k]) - center;
        sum += d;
        squares += d * d;
      }
    }
  }
  sum = plane_block_sum(sum, shared);
  squares = plane_block_sum(squares, shared);
  if (threadIdx.x == 0) {
    const double offset = static_cast<double>(sum) / static_cast<double>(count * N);
    partials[int64_t{blockIdx.x} * shape.splits + blockIdx.y] = {
        static_cast<double>(center) + offset,
        static_cast<double>(squares) - offset * static_cast<double>(sum)};
  }
}

template <typename T, int N, Source kSource, bool kRelu = false>
__global__ void __launch_bounds__(kPlaneThreads)
    plane_normalize_kernel(const T* __restrict__ x, T* __restrict__ y, PlaneShape shape,
                           const MomentsPartial* __restrict__ partials, int partial_splits,
                           ForwardArgs args) {
  using A = acc_t<T>;
  constexpr int U = kPlaneUnroll<T, N>;
  __shared__ ForwardCoefficients<A> shared;
  if (threadIdx.x < 32) {
    const bool first = blockIdx.y == 0;
    ForwardCoefficients<A> result;
    if constexpr (kSource == Source::kBatch) {
      result = merge_moments<A>(args, partials, partial_splits, shape.n * (shape.inner / N), N,
                                blockIdx.x, first);
    } else if constexpr (kSource == Source::kGiven) {
      result = given_coefficients<A>(args.statistics, blockIdx.x);
    } else {
      result = running_coefficients<A>(args, blockIdx.x, first && threadIdx.x == 0);
    }
    if (threadIdx.x == 0) shared = result;
  }
  __syncthreads();
  const ForwardCoefficients<A> k = shared;
  PlaneCursor<N> cursor(shape);
  while (cursor.valid()) {
    Vec<T, N> v[U];
    int64_t offset[U];
    bool valid[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      valid[u] = cursor.valid();
      offset[u] = cursor.offset();
      if (valid[u]) v[u] = load_vec<N>(x + offset[u]);
      cursor.advance();
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!valid[u]) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        v[u].v[j] = convert<T>(normalized<kRelu>(convert<A>(v[u].v[j]), k));
      }
      store_vec(y + offset[u], v[u]);
    }
  }
}

// kRelu: of dy where ReLU let x's normalised value through.
template <typename T, int N, bool kRelu>
__global__ void __launch_bounds__(kPlaneThreads)
    plane_grad_sums_kernel(const T* __restrict__ dy, const T* __restrict__ x,
                           BatchNormStatistics statistics, PlaneShape shape,
                           GradPartial<acc_t<T>>* __restrict__ partials) {
  using A = acc_t<T>;
  constexpr int U = kPlaneUnroll<T, N> / 2;  // two tensors
  __shared__ A shared[kPlaneThreads / 32];
  const ReluGate<A, kRelu> gate(statistics, blockIdx.x);
  const A center = static_cast<const A*>(statistics.mean)[blockIdx.x];
  A sum = 0, dot = 0;
  PlaneCursor<N> cursor(shape);
  while (cursor.valid()) {
    Vec<T, N> g[U], v[U];
    bool valid[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      valid[u] = cursor.valid();
      if (valid[u]) {
        g[u] = load_vec<N>(dy + cursor.offset());
        v[u] = load_vec<N>(x + cursor.offset());
      }
      cursor.advance();
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!valid[u]) continue;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A deviation = convert<A>(v[u].v[k]) - center;
        const A grad = gate(convert<A>(g[u].v[k]), deviation);
        sum += grad;
        dot += grad * deviation;
      }
    }
  }
  sum = plane_block_sum(sum, shared);
  dot = plane_block_sum(dot, shared);
  if (threadIdx.x == 0) {
    partials[int64_t{blockIdx.x} * shape.splits + blockIdx.y] = {sum, dot};
  }
}

// dx may be nullptr: then only dweight and dbias are made.
template <typename T, int N, bool kTraining, bool kRelu>
__global__ void __launch_bounds__(kPlaneThreads)
    plane_input_grad_kernel(const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx,
                            PlaneShape shape, const GradPartial<acc_t<T>>* __restrict__ partials,
                            int partial_splits, BackwardArgs args) {
  using A = acc_t<T>;
  constexpr int U = kPlaneUnroll<T, N> / 2;
  __shared__ BackwardCoefficients<A> shared;
  if (threadIdx.x < 32) {
    const BackwardCoefficients<A> result = merge_grads<A>(
        args, partials, partial_splits, shape.n * shape.inner, blockIdx.x, blockIdx.y == 0);
    if (threadIdx.x == 0) shared = result;
  }
  __syncthreads();
  if (!dx) return;
  const BackwardCoefficients<A> k = shared;
  const ReluGate<A, kRelu> gate(args.statistics, blockIdx.x);
  PlaneCursor<N> cursor(shape);
  while (cursor.valid()) {
    Vec<T, N> g[U], v[U];
    int64_t offset[U];
    bool valid[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      valid[u] = cursor.valid();
      offset[u] = cursor.offset();
      if (valid[u]) {
        g[u] = load_vec<N>(dy + offset[u]);
        if constexpr (kTraining || kRelu) {
          v[u] = load_vec<N>(x + offset[u]);
        }
      }
      cursor.advance();
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!valid[u]) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        A deviation = 0;
        if constexpr (kTraining || kRelu) deviation = convert<A>(v[u].v[j]) - k.center;
        A grad = gate(convert<A>(g[u].v[j]), deviation) * k.by_grad;
        if constexpr (kTraining) grad += deviation * k.by_input + k.offset;
        g[u].v[j] = convert<T>(grad);
      }
      store_vec(dx + offset[u], g[u]);
    }
  }
}

}  // namespace braze::cuda
