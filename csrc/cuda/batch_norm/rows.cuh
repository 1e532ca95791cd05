// Batch norm over [rows, c]: channels_last, and [n, c]. A thread keeps to one vector of N channels,
// whose coefficients are in registers, and walks down the rows; a block takes part of the rows for
// a tile of vectors of channels. Lines of threads are exactly as long as the tile, so that a block
// reads memory without gaps for any number of channels.
#pragma once

#include "cuda/common/own_moments.cuh"
#include "pass.cuh"

namespace braze::cuda {

constexpr int kMostRowThreads = 512;  // of a multiprocessor: 128 registers each, without spills
// Vectors of a tensor that a thread has in flight: 64 bytes, of two tensors half as much; twice
// that in passes that only read, whose blocks are too few to wait for memory in turns.
constexpr int kRowLoads = 4, kSumLoads = 8;

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
  int part;    // of the rows, the block's
  int line, column;
  int64_t channel;      // of its vector's first element
  int64_t begin, rows;  // of the block

  __device__ explicit RowWorker(const RowPlan& plan, int64_t part) : part(static_cast<int>(part)) {
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

// The rows of a block that are the thread's line's, backwards, U at a time: load(u, offset) of all
// of them, then f(u, offset). offset: of the thread's vector.
template <int U, int N, typename Load, typename F>
__device__ __forceinline__ void each_row_backwards(const RowPlan& plan,
                                                   const BackwardRowWorker<N>& me, const Load& load,
                                                   const F& f) {
  for (int64_t row = me.line; row < me.rows; row += int64_t{plan.height} * U) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * plan.height;
      if (r < me.rows) load(u, me.offset(r));
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * plan.height;
      if (r >= me.rows) break;
      f(u, me.offset(r));
    }
  }
}
// The same forwards.
template <int U, int N, typename Load, typename F>
__device__ __forceinline__ void each_row_forwards(const RowPlan& plan, const RowWorker<N>& me,
                                                  const Load& load, const F& f) {
  const int64_t step = plan.vectors * N, first = me.begin * step + me.channel;
  for (int64_t row = me.line; row < me.rows; row += int64_t{plan.height} * U) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * plan.height;
      if (r < me.rows) load(u, first + r * step);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * plan.height;
      if (r >= me.rows) break;
      f(u, first + r * step);
    }
  }
}

// Shared memory of row_totals.
template <typename A, int kSums, int N>
using RowTotals = A[kSums][N * (kMostRowThreads + 32)];

// The sums of each v[j] over the block's lines, for a channel a thread: those of element i / tile
// of column i % tile in thread i < N * tile. First `teams` of threads sum some of the lines each.
// The order is fixed.
template <typename A, int kSums, int N>
__device__ void row_totals(const A (&v)[kSums][N], A (&sums)[kSums], RowTotals<A, kSums, N>& shared,
                           const RowPlan& plan) {
  const int i = threadIdx.x, totals = N * plan.tile;
  const int stride = static_cast<int>(blockDim.x) + plan.tile;  // no two of a warp in a bank
#pragma unroll
  for (int j = 0; j < kSums; ++j) {
#pragma unroll
    for (int k = 0; k < N; ++k) shared[j][k * stride + i] = v[j][k];
  }
  __syncthreads();
  const int most = static_cast<int>(blockDim.x) / totals;
  const int teams = most < 16 ? most : 16;
  const int team = i / totals, total = i - team * totals;
#pragma unroll
  for (int j = 0; j < kSums; ++j) sums[j] = 0;
  if (team < teams) {
    const int k = total / plan.tile, column = total - k * plan.tile, from = k * stride + column;
    for (int line = team; line < plan.height; line += teams) {
#pragma unroll
      for (int j = 0; j < kSums; ++j) sums[j] += shared[j][from + line * plan.tile];
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kSums; ++j) shared[j][i] = sums[j];
  __syncthreads();
  if (i >= totals) return;
  for (int t = 1; t < teams; ++t) {
#pragma unroll
    for (int j = 0; j < kSums; ++j) sums[j] += shared[j][t * totals + i];
  }
}

// f(channel, total number) in each thread that has totals of row_totals.
template <int N, typename F>
__device__ void for_my_total(const RowPlan& plan, const F& f) {
  const int i = threadIdx.x, k = i / plan.tile;
  const int64_t vector = int64_t{blockIdx.y} * plan.tile + i - k * plan.tile;
  if (k < N && vector < plan.vectors) f(vector * N + k);
}

// Sums of deviations from a pivot, and of their squares, for a thread's channels.
template <typename T, int N>
struct RowMoments {
  using A = acc_t<T>;
  A pivot[N] = {}, v[2 * N] = {};

  // A median: a far-off element would spoil a mean, from which the others' deviations would have to
  // cancel. x: the column's first vector of `rows` rows.
  __device__ __forceinline__ void start(const T* x, int rows, int64_t pitch) {
    const Vec<T, N> a = load_vec<N>(x), b = load_vec<N>(x + rows / 2 * pitch),
                    c = load_vec<N>(x + (rows - 1) * pitch);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const A first = convert<A>(a.v[k]);
      pivot[k] = rows < 3 ? first : median(first, convert<A>(b.v[k]), convert<A>(c.v[k]));
    }
  }
  __device__ __forceinline__ void add(const Packed<T, N>& packed) {
    A element[N];
    unpack(packed, element);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const A d = element[k] - pivot[k];
      v[k] += d;
      v[N + k] += d * d;
    }
  }
};

// Each thread sums deviations from a value of its own, whose squares do not cancel: the median of
// its first three elements. Then all of a channel's are made deviations from one value, the median
// of three lines'. A far-off element would spoil a mean: the many others' deviations from it would
// have to cancel.
template <typename T, int N>
__global__ void __launch_bounds__(kMostRowThreads)
    row_moments_kernel(const T* __restrict__ x, RowPlan plan, MomentsPartial* __restrict__ partials,
                       int64_t* batches) {
  using A = acc_t<T>;
  constexpr int U = kSumLoads;
  __shared__ RowTotals<A, 2, N> shared;
  if (batches && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) ++*batches;
  const RowWorker<N> me(plan, blockIdx.x);
  const int64_t step = plan.vectors * N, end = me.works ? me.rows : 0;
  const T* base = x + me.begin * step + me.channel;
  A center[N] = {}, v[2][N] = {};  // v: sums of deviations and of their squares
  int count = 0;
  for (int64_t row = me.line; row < end; row += int64_t{plan.height} * U) {
    Packed<T, N> packed[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * plan.height;
      if (r < end) packed[u].load(base + r * step);
    }
    if (count == 0) {
      const Vec<T, N> first = packed[0].unpacked();
      const bool three = row + 2 * plan.height < end;
      const Vec<T, N> second = packed[1].unpacked(), third = packed[2].unpacked();
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A value = convert<A>(first.v[k]);
        center[k] = three ? median(value, convert<A>(second.v[k]), convert<A>(third.v[k])) : value;
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (row + u * plan.height >= end) break;
      A element[N];
      unpack(packed[u], element);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A d = element[k] - center[k];
        v[0][k] += d;
        v[1][k] += d * d;
      }
      ++count;
    }
  }
  A* const centers = shared[0];
#pragma unroll
  for (int k = 0; k < N; ++k) centers[k * static_cast<int>(blockDim.x) + threadIdx.x] = center[k];
  __syncthreads();
  const int lines = static_cast<int>(min(me.rows, int64_t{plan.height}));
  const auto common = [&](int k, int column) {
    const A* const from = centers + k * static_cast<int>(blockDim.x) + column;
    if (lines < 3) return from[0];
    return median(from[0], from[lines / 2 * plan.tile], from[(lines - 1) * plan.tile]);
  };
  if (count > 0) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const A change = center[k] - common(k, me.column), moved = static_cast<A>(count) * change;
      v[1][k] += change * (2 * v[0][k] + moved);
      v[0][k] += moved;
    }
  }
  const int own = static_cast<int>(threadIdx.x) / plan.tile;  // as for_my_total has it
  const A pivot = own < N ? common(own, static_cast<int>(threadIdx.x) - own * plan.tile) : A(0);
  __syncthreads();
  A totals[2];
  row_totals(v, totals, shared, plan);
  for_my_total<N>(plan, [&](int64_t channel) {
    const double rows = static_cast<double>(me.rows);
    const double offset = static_cast<double>(totals[0]) / rows;
    partials[channel * plan.parts + blockIdx.x] = {
        static_cast<double>(pivot) + offset,
        static_cast<double>(totals[1]) - offset * static_cast<double>(totals[0]), rows};
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
  Packed<T, N> x[U], residual[U];
  each_row_backwards<U>(
      plan, me,
      [&](int u, int64_t offset) {
        x[u].load(args.x + offset);
        if (args.residual) residual[u].load(args.residual + offset);
      },
      [&](int u, int64_t offset) {
        apply_vector<kCode>(args, offset, x[u], residual[u], center, scale, shift);
      });
}

template <typename T, int N, ActivationCode kCode>
__global__ void __launch_bounds__(kMostRowThreads)
    row_grad_sums_kernel(GradSumsArgs<T> args, RowPlan plan,
                         GradPartial<acc_t<T>>* __restrict__ partials) {
  using A = acc_t<T>;
  constexpr int U = N == 8 ? 3 : kSumLoads / 2;  // as many as registers hold
  __shared__ RowTotals<A, 2, N> shared;
  const RowWorker<N> me(plan, blockIdx.x);
  A v[2][N] = {};  // sums of the gradient, and of it times deviations
  if (me.works) {
    using Coefficients = PerElement<A, N, false>;
    const Coefficients center(args.statistics.mean, me.channel);
    const Coefficients scale(args.statistics.scale, me.channel);
    const Coefficients shift(args.statistics.shift, me.channel);
    Packed<T, N> dy[U], x[U], residual[U];
    uint8_t open[U];
    each_row_forwards<U>(
        plan, me,
        [&](int u, int64_t offset) {
          dy[u].load(args.dy + offset);
          x[u].load(args.x + offset);
          if (args.residual) residual[u].load(args.residual + offset);
          if (args.mask) open[u] = args.mask[offset / N];
        },
        [&](int u, int64_t offset) {
          sum_vector<kCode>(
              args, dy[u], x[u], residual[u], open[u], center, scale, shift,
              [&](const Vec<T, N>& kept) { store_vec(args.dresidual + offset, kept); },
              [&](int k, A g, A product) {
                v[0][k] += g;
                v[1][k] += product;
              });
        });
  }
  A totals[2];
  row_totals(v, totals, shared, plan);
  for_my_total<N>(plan, [&](int64_t channel) {
    partials[channel * plan.parts + blockIdx.x] = {totals[0], totals[1]};
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
  Packed<T, N> dy[U], x[U];
  each_row_backwards<U>(
      plan, me,
      [&](int u, int64_t offset) {
        dy[u].load(args.dy + offset);
        if (args.x) x[u].load(args.x + offset);
      },
      [&](int u, int64_t offset) {
        input_grad_vector<kCode>(args, offset, dy[u], x[u], center, by_grad, shift, by_input,
                                 constant);
      });
}

}  // namespace braze::cuda
