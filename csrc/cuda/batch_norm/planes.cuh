// Batch norm over [n, c, inner]: a block takes a part of one channel, which is n runs of `inner`
// adjacent elements. Vectors of N elements divide `inner`; they are numbered through the channel.
#pragma once

#include "cuda/common/own_moments.cuh"
#include "pass.cuh"

namespace braze::cuda {

constexpr int kPlaneThreads = 256;
constexpr int kPlaneBlocksPerSm = 8;  // that the kernels aim at: all threads of a multiprocessor
// Of a multiprocessor at a time, of the kernels that read much and of the others.
constexpr int kHeavyPlaneBlocks = 3, kPlaneBlocks = 4;
// How many one after the other, at most: many waves end together, few long ones do not. And of how
// many rounds a block is no worse for being one of many. (128 x 1024 x 90 x 90: 9 % less in eight
// waves than in two; 64 x 32 x 112 x 112 in bf16: 12 % more in eight, of three rounds, than in
// one.)
constexpr int kPlaneWaves = 8, kPlaneRounds = 10;

// Blocks per channel of `vectors` vectors: as many as fill the device, each with at least two
// rounds.
inline int plane_splits(int64_t vectors, int64_t channels) {
  const int64_t rounds = ceil_div(vectors, kPlaneThreads * 2);
  const int64_t wanted = ceil_div(int64_t{sm_count()} * kPlaneBlocksPerSm, channels);
  return static_cast<int>(std::min(rounds, wanted));
}

// The same of kernels of which a multiprocessor has `of_sm` blocks at a time: waves of them, the
// last of which fills the device as well as the others do; as many as leave blocks long, else few.
inline int plane_splits_in_waves(int64_t vectors, int64_t channels, int of_sm) {
  const int64_t rounds = ceil_div(vectors, kPlaneThreads * 2);
  const int64_t at_once = int64_t{sm_count()} * of_sm;
  int64_t best = 1;
  double best_share = 0;
  for (int waves = 1; waves <= kPlaneWaves; ++waves) {
    const int64_t splits = std::min(std::max<int64_t>(waves * at_once / channels, 1), rounds);
    const int64_t blocks = splits * channels;
    const double share = static_cast<double>(blocks) / (ceil_div(blocks, at_once) * at_once);
    const bool is_long = vectors >= splits * kPlaneThreads * kPlaneRounds;
    if (share > best_share + (is_long ? -0.03 : 0.03)) best = splits, best_share = share;
  }
  return static_cast<int>(best);
}

// How many vectors a thread has in flight: 64 bytes, as far as eight loads go.
template <typename T, int N>
constexpr int kPlaneUnroll = sizeof(T) * N >= 16 ? 4 : 8;

struct PlaneShape {
  int64_t n, c, inner;
  int splits;  // blocks per channel
};

// Walks a thread through its vectors of a channel in part `part`: every kPlaneThreads-th, without a
// division per step.
template <int N>
class PlaneCursor {
 public:
  __device__ PlaneCursor(const PlaneShape& shape, int64_t channel, int part)
      : per_image_(shape.inner / N), image_skip_((shape.c - 1) * shape.inner) {
    const int64_t total = shape.n * per_image_;
    const int64_t begin = split_begin(total, part, shape.splits);
    end_ = split_begin(total, part + 1, shape.splits);
    count_ = end_ - begin;
    at_ = begin + threadIdx.x;
    const int64_t image = at_ / per_image_;
    in_image_ = at_ - image * per_image_;
    offset_ = (image * shape.c + channel) * shape.inner + in_image_ * N;
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

template <typename T, int N>
__global__ void __launch_bounds__(kPlaneThreads, kPlaneBlocks)
    plane_moments_kernel(const T* __restrict__ x, PlaneShape shape,
                         MomentsPartial* __restrict__ partials, int64_t* batches) {
  using A = acc_t<T>;
  constexpr int U = kPlaneUnroll<T, N>;
  __shared__ A shared[kPlaneThreads / 32];
  if (batches && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) ++*batches;
  PlaneCursor<N> cursor(shape, blockIdx.x, blockIdx.y);
  const int64_t count = cursor.count() * N;
  OwnMoments<A> moments;
  bool started = false;
  while (cursor.valid()) {
    Packed<T, N> v[U];
    bool valid[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      valid[u] = cursor.valid();
      if (valid[u]) v[u].load(x + cursor.offset());
      cursor.advance();
    }
    A element[N];
    if (!started) {
      moments.pivot = pivot_of<A, N>([&](int u, A(&first)[N]) { unpack(v[u], first); },
                                     [&](int u) { return valid[u]; });
      started = true;
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!valid[u]) continue;
      unpack(v[u], element);
      moments.add(element);
    }
  }
  const A center = plane_block_sum(moments.total(), shared) / static_cast<A>(count);
  A sums[2];
  moments.about(center, sums);
  const double sum = plane_block_sum(sums[0], shared);
  const double squares = plane_block_sum(sums[1], shared);
  if (threadIdx.x == 0) {
    const double elements = static_cast<double>(count), offset = sum / elements;
    partials[int64_t{blockIdx.x} * shape.splits + blockIdx.y] = {
        static_cast<double>(center) + offset, squares - offset * sum, elements};
  }
}

// Walks backwards through the blocks of the pass before: see BackwardRowWorker.
template <typename T, int N, ActivationCode kCode>
__global__ void __launch_bounds__(kPlaneThreads, kHeavyPlaneBlocks)
    plane_apply_kernel(ApplyArgs<T> args, PlaneShape shape) {
  wait_for_earlier_kernels();
  constexpr int U = kPlaneUnroll<T, N>;
  const int64_t channel = gridDim.x - 1 - blockIdx.x;
  using Coefficients = PerElement<acc_t<T>, N, true>;
  const Coefficients center(args.statistics.mean, channel);
  const Coefficients scale(args.statistics.scale, channel);
  const Coefficients shift(args.statistics.shift, channel);
  PlaneCursor<N> cursor(shape, channel, gridDim.y - 1 - blockIdx.y);
  while (cursor.valid()) {
    Packed<T, N> x[U], residual[U];
    int64_t offset[U];
    bool valid[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      valid[u] = cursor.valid();
      offset[u] = cursor.offset();
      if (valid[u]) {
        x[u].load(args.x + offset[u]);
        if (args.residual) residual[u].load(args.residual + offset[u]);
      }
      cursor.advance();
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!valid[u]) continue;
      apply_vector<kCode>(args, offset[u], x[u], residual[u], center, scale, shift);
    }
  }
}

template <typename T, int N, ActivationCode kCode>
__global__ void __launch_bounds__(kPlaneThreads, kHeavyPlaneBlocks)
    plane_grad_sums_kernel(GradSumsArgs<T> args, PlaneShape shape,
                           GradPartial<acc_t<T>>* __restrict__ partials) {
  using A = acc_t<T>;
  constexpr int U = kPlaneUnroll<T, N> / 2;  // two tensors
  __shared__ A shared[kPlaneThreads / 32];
  const int64_t channel = blockIdx.x;
  using Coefficients = PerElement<A, N, true>;
  const Coefficients center(args.statistics.mean, channel);
  const Coefficients scale(args.statistics.scale, channel);
  const Coefficients shift(args.statistics.shift, channel);
  A sum = 0, dot = 0;
  PlaneCursor<N> cursor(shape, channel, blockIdx.y);
  while (cursor.valid()) {
    Packed<T, N> dy[U], x[U], residual[U];
    uint8_t open[U];
    int64_t offset[U];
    bool valid[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      valid[u] = cursor.valid();
      offset[u] = cursor.offset();
      if (valid[u]) {
        dy[u].load(args.dy + offset[u]);
        x[u].load(args.x + offset[u]);
        if (args.residual) residual[u].load(args.residual + offset[u]);
        if (args.mask) open[u] = args.mask[offset[u] / N];
      }
      cursor.advance();
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!valid[u]) continue;
      sum_vector<kCode>(
          args, dy[u], x[u], residual[u], open[u], center, scale, shift,
          [&](const Vec<T, N>& kept) { store_vec(args.dresidual + offset[u], kept); },
          [&](int, A g, A product) {
            sum += g;
            dot += product;
          });
    }
  }
  sum = plane_block_sum(sum, shared);
  dot = plane_block_sum(dot, shared);
  if (threadIdx.x == 0) partials[channel * shape.splits + blockIdx.y] = {sum, dot};
}

template <typename T, int N, ActivationCode kCode>
__global__ void __launch_bounds__(kPlaneThreads, kPlaneBlocks)
    plane_input_grad_kernel(InputGradArgs<T> args, PlaneShape shape) {
  wait_for_earlier_kernels();
  constexpr int U = kPlaneUnroll<T, N> / 2;
  const int64_t channel = gridDim.x - 1 - blockIdx.x;
  using Coefficients = PerElement<acc_t<T>, N, true>;
  const Coefficients center(args.statistics.mean, channel);
  const Coefficients by_grad(args.coefficients.by_grad, channel);
  const Coefficients shift(args.statistics.shift, channel);
  const Coefficients by_input(args.coefficients.by_input, channel);
  const Coefficients constant(args.coefficients.offset, channel);
  PlaneCursor<N> cursor(shape, channel, gridDim.y - 1 - blockIdx.y);
  while (cursor.valid()) {
    Packed<T, N> dy[U], x[U];
    int64_t offset[U];
    bool valid[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      valid[u] = cursor.valid();
      offset[u] = cursor.offset();
      if (valid[u]) {
        dy[u].load(args.dy + offset[u]);
        if (args.x) x[u].load(args.x + offset[u]);
      }
      cursor.advance();
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!valid[u]) continue;
      input_grad_vector<kCode>(args, offset[u], dy[u], x[u], center, by_grad, shift, by_input,
                               constant);
    }
  }
}

}  // namespace braze::cuda
