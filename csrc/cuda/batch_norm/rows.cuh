// Batch norm over [rows, c]: channels_last, and [n, c]. A thread keeps to one vector of N channels,
// whose coefficients are in registers, and walks down the rows; a block takes part of the rows for
// a tile of vectors of channels. Lines of threads are exactly as long as the tile, so that a block
// reads memory without gaps for any number of channels.
#pragma once

#include "pass.cuh"

namespace braze::cuda {

constexpr int kMostRowThreads = 512;  // of a multiprocessor: 128 registers each, without spills
// Vectors of a tensor that a thread has in flight: 64 bytes, of two tensors half as much.
constexpr int kRowLoads = 4;

// How the rows are shared out.
struct RowPlan {
  int64_t rows, vectors;  // vectors: of a row
  int tile;               // vectors of a block's line; the last tile may have fewer
  int tiles;
  int height;   // lines of a block
  int threads;  // of a block
  int parts;    // that the rows are cut into

  dim3 grid() const { return dim3(static_cast<unsigned>(parts), static_cast<unsigned>(tiles)); }
};

// widest: vectors of a tile, at most kMostRowThreads. A multiprocessor holds kMostRowThreads in up
// to most_blocks blocks, as many as let the most threads work. `waves` of blocks, at most, where
// each thread still has enough rows to make up for loading coefficients.
inline RowPlan plan_rows(int64_t rows, int64_t vectors, int widest, int most_blocks, int waves) {
  RowPlan plan{rows, vectors};
  plan.tiles = static_cast<int>(ceil_div(vectors, widest));
  plan.tile = static_cast<int>(ceil_div(vectors, plan.tiles));
  int per_sm = 0;
  for (int blocks = 1; blocks <= most_blocks; ++blocks) {
    const int height = kMostRowThreads / blocks / 32 * 32 / plan.tile;
    if (height > 0 && blocks * height >= per_sm * plan.height) {
      plan.height = height;
      per_sm = blocks;
    }
  }
  plan.threads = static_cast<int>(ceil_div(plan.tile * plan.height, 32)) * 32;
  constexpr int64_t kRowsPerThread = 16;
  const int64_t slots = std::max<int64_t>(1, int64_t{sm_count()} * per_sm / plan.tiles);
  const int64_t rounds = ceil_div(rows, plan.height);
  const int64_t wanted = rounds / (slots * kRowsPerThread);
  const int64_t blocks = slots * std::clamp<int64_t>(wanted, 1, waves);
  plan.parts = static_cast<int>(std::min(rounds, blocks));
  return plan;
}

// Reductions: narrow tiles, so that many lines of a block share the sums that it leaves, and one
// block per multiprocessor.
inline RowPlan plan_row_sums(int64_t rows, int64_t vectors) {
  return plan_rows(rows, vectors, 32, 1, 1);
}
// Passes that write a tensor: whole rows, and several waves of blocks, so that multiprocessors
// which get their memory sooner take more of them.
inline RowPlan plan_row_pass(int64_t rows, int64_t vectors) {
  return plan_rows(rows, vectors, 256, 3, 4);
}

// Where a thread stands.
template <int N>
struct RowWorker {
  bool works;  // not the threads behind the end of the tile
  int line, column;
  int64_t channel;      // of its vector's first element
  int64_t begin, rows;  // of the block

  __device__ explicit RowWorker(const RowPlan& plan, int64_t part) {
    line = static_cast<int>(threadIdx.x) / plan.tile;
    column = static_cast<int>(threadIdx.x) - line * plan.tile;
    const int64_t vector = int64_t{blockIdx.y} * plan.tile + column;
    works = line < plan.height && vector < plan.vectors;
    channel = vector * N;
    begin = split_begin(plan.rows, static_cast<int>(part), plan.parts);
    rows = split_begin(plan.rows, static_cast<int>(part) + 1, plan.parts) - begin;
  }
};

// A pass walks backwards through the tensor that the pass before it walked through forwards: what
// that read last is still in the L2 cache.
template <int N>
struct BackwardRowWorker : RowWorker<N> {
  __device__ explicit BackwardRowWorker(const RowPlan& plan)
      : RowWorker<N>(plan, plan.parts - 1 - int64_t{blockIdx.x}),
        step(plan.vectors * N),
        last((this->begin + this->rows - 1) * step + this->channel) {}

  // Of the vector in the `at`-th row from the end.
  __device__ __forceinline__ int64_t offset(int64_t at) const { return last - at * step; }

  int64_t step, last;
};

// Shared memory of row_totals.
template <typename A, int N>
using RowTotals = A[N * (kMostRowThreads + 32)];

// The sum of v over the block's lines, for a channel a thread: that of element i / tile of column
// i % tile in thread i < N * tile. First `teams` of threads sum some of the lines each. The order
// is fixed.
template <typename A, int N>
__device__ A row_total(const A (&v)[N], RowTotals<A, N>& shared, const RowPlan& plan) {
  const int i = threadIdx.x, totals = N * plan.tile;
  const int stride = static_cast<int>(blockDim.x) + plan.tile;  // no two of a warp in a bank
  __syncthreads();
#pragma unroll
  for (int k = 0; k < N; ++k) shared[k * stride + i] = v[k];
  __syncthreads();
  const int most = static_cast<int>(blockDim.x) / totals;
  const int teams = most < 16 ? most : 16;
  const int team = i / totals, total = i - team * totals;
  A sum = 0;
  if (team < teams) {
    const int k = total / plan.tile, column = total - k * plan.tile;
    const A* from = shared + k * stride + column;
    for (int line = team; line < plan.height; line += teams) sum += from[line * plan.tile];
  }
  __syncthreads();
  shared[i] = sum;
  __syncthreads();
  if (i < totals) {
    for (int t = 1; t < teams; ++t) sum += shared[t * totals + i];
  }
  return sum;
}

// f(channel, total number) in each thread that has a total of row_total.
template <int N, typename F>
__device__ void for_my_total(const RowPlan& plan, const F& f) {
  const int i = threadIdx.x, k = i / plan.tile;
  const int64_t vector = int64_t{blockIdx.y} * plan.tile + i - k * plan.tile;
  if (k < N && vector < plan.vectors) f(vector * N + k);
}

template <typename T, int N>
__global__ void __launch_bounds__(kMostRowThreads)
    row_moments_kernel(const T* __restrict__ x, RowPlan plan, MomentsPartial* __restrict__ partials,
                       int64_t* batches) {
  using A = acc_t<T>;
  __shared__ RowTotals<A, N> shared;
  if (batches && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) ++*batches;
  const RowWorker<N> me(plan, blockIdx.x);
  const int64_t step = plan.vectors * N, end = me.works ? me.rows : 0;
  const T* base = x + me.begin * step + me.channel;
  A center[N] = {}, sum[N] = {}, squares[N] = {};
  if (me.line < end) {
    const Vec<T, N> v = load_vec<N>(base + me.line * step);
#pragma unroll
    for (int k = 0; k < N; ++k) center[k] = convert<A>(v.v[k]);
  }
  // Sums about the mean of the block's first rows; see plane_moments_kernel.
  const A first_rows = static_cast<A>(me.rows < plan.height ? me.rows : plan.height);
  const A mine = row_total(center, shared, plan) / first_rows;
  __syncthreads();
  if (threadIdx.x < N * plan.tile) shared[threadIdx.x] = mine;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < N; ++k) center[k] = shared[k * plan.tile + me.column];
  for (int64_t row = me.line; row < end; row += int64_t{plan.height} * kRowLoads) {
    Packed<T, N> v[kRowLoads];
#pragma unroll
    for (int u = 0; u < kRowLoads; ++u) {
      const int64_t r = row + u * plan.height;
      if (r < end) v[u].load(base + r * step);
    }
#pragma unroll
    for (int u = 0; u < kRowLoads; ++u) {
      if (row + u * plan.height >= end) break;
      const Vec<T, N> element = v[u].unpacked();
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A d = convert<A>(element.v[k]) - center[k];
        sum[k] += d;
        squares[k] += d * d;
      }
    }
  }
  const A total = row_total(sum, shared, plan), total_squares = row_total(squares, shared, plan);
  for_my_total<N>(plan, [&](int64_t channel) {
    const double count = static_cast<double>(me.rows);
    const double offset = static_cast<double>(total) / count;
    partials[channel * plan.parts + blockIdx.x] = {
        static_cast<double>(mine) + offset,
        static_cast<double>(total_squares) - offset * static_cast<double>(total), count};
  });
}

template <typename T, int N, ActivationCode kCode>
__global__ void __launch_bounds__(kMostRowThreads)
    row_apply_kernel(ApplyArgs<T> args, RowPlan plan) {
  wait_for_earlier_kernels();
  constexpr int U = kRowLoads;
  const BackwardRowWorker<N> me(plan);
  if (!me.works) return;
  using Coefficients = PerElement<acc_t<T>, N, false>;
  const Coefficients center(args.statistics.mean, me.channel);
  const Coefficients scale(args.statistics.scale, me.channel);
  const Coefficients shift(args.statistics.shift, me.channel);
  for (int64_t row = me.line; row < me.rows; row += int64_t{plan.height} * U) {
    Packed<T, N> x[U], residual[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * plan.height;
      if (r < me.rows) {
        x[u].load(args.x + me.offset(r));
        if (args.residual) residual[u].load(args.residual + me.offset(r));
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * plan.height;
      if (r >= me.rows) break;
      apply_vector<kCode>(args, me.offset(r), x[u], residual[u], center, scale, shift);
    }
  }
}

template <typename T, int N, ActivationCode kCode>
__global__ void __launch_bounds__(kMostRowThreads)
    row_grad_sums_kernel(GradSumsArgs<T> args, RowPlan plan,
                         GradPartial<acc_t<T>>* __restrict__ partials) {
  using A = acc_t<T>;
  constexpr int U = kRowLoads / 2;
  __shared__ RowTotals<A, N> shared;
  const RowWorker<N> me(plan, blockIdx.x);
  const int64_t step = plan.vectors * N, first = me.begin * step + me.channel;
  A sum[N] = {}, dot[N] = {};
  if (me.works) {
    using Coefficients = PerElement<A, N, false>;
    const Coefficients center(args.statistics.mean, me.channel);
    const Coefficients scale(args.statistics.scale, me.channel);
    const Coefficients shift(args.statistics.shift, me.channel);
    for (int64_t row = me.line; row < me.rows; row += int64_t{plan.height} * U) {
      Packed<T, N> dy[U], x[U], residual[U];
      uint8_t open[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t r = row + u * plan.height, offset = first + r * step;
        if (r < me.rows) {
          dy[u].load(args.dy + offset);
          x[u].load(args.x + offset);
          if (args.residual) residual[u].load(args.residual + offset);
          if (args.mask) open[u] = args.mask[offset / N];
        }
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t r = row + u * plan.height;
        if (r >= me.rows) break;
        sum_vector<kCode>(args, first + r * step, dy[u], x[u], residual[u], open[u], center, scale,
                          shift, [&](int k, A g, A product) {
                            sum[k] += g;
                            dot[k] += product;
                          });
      }
    }
  }
  const A total = row_total(sum, shared, plan), total_dot = row_total(dot, shared, plan);
  for_my_total<N>(plan, [&](int64_t channel) {
    partials[channel * plan.parts + blockIdx.x] = {total, total_dot};
  });
}

template <typename T, int N, ActivationCode kCode>
__global__ void __launch_bounds__(kMostRowThreads)
    row_input_grad_kernel(InputGradArgs<T> args, RowPlan plan) {
  wait_for_earlier_kernels();
  constexpr int U = kRowLoads / 2;
  const BackwardRowWorker<N> me(plan);
  if (!me.works) return;
  using Coefficients = PerElement<acc_t<T>, N, false>;
  const Coefficients center(args.statistics.mean, me.channel);
  const Coefficients by_grad(args.coefficients.by_grad, me.channel);
  const Coefficients shift(args.statistics.shift, me.channel);
  const Coefficients by_input(args.coefficients.by_input, me.channel);
  const Coefficients constant(args.coefficients.offset, me.channel);
  for (int64_t row = me.line; row < me.rows; row += int64_t{plan.height} * U) {
    Packed<T, N> dy[U], x[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * plan.height;
      if (r < me.rows) {
        dy[u].load(args.dy + me.offset(r));
        if (args.x) x[u].load(args.x + me.offset(r));
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * plan.height;
      if (r >= me.rows) break;
      input_grad_vector<kCode>(args, me.offset(r), dy[u], x[u], center, by_grad, shift, by_input,
                               constant);
    }
  }
}

}  // namespace braze::cuda
