// The arithmetic behind a row's statistics, and rows that are too long for a team to hold: a block
// reads them twice. The 50 MB of an H200's L2 cache keep what 132 blocks of rows up to 300 KB have
// read.
#pragma once

#include "row.cuh"

namespace braze::cuda {

// What a row is normalised with: (x - pivot - rest) * rstd.
template <typename A>
struct NormRow {
  A pivot, rest, rstd;
};

template <typename T>
struct NormArgs {
  using A = acc_t<T>;

  const void* weight;
  const void* bias;
  bool wide_parameters;  // float32 beside a 16-bit T
  void* y;
  bool wide_result;
  A eps;
  A* mean;
  A* rstd;

  // sums: of the deviations from the pivot, and of their squares.
  __device__ __forceinline__ NormRow<A> finish(const RowPart& part, A pivot, Pair<A> sums,
                                               A count) const {
    const A offset = sums.first / count;
    A variance = sums.second / count - offset * offset;
    variance = variance < A(0) ? A(0) : variance;  // NaN stays
    const A deviation = A(1) / sqrt(variance + eps);
    if (part.rank == 0 && part.size > 0) {
      mean[part.row] = pivot + offset;
      rstd[part.row] = deviation;
    }
    return {pivot, offset, deviation};
  }

  // y of N elements v, those from c on of a row that begins at `base`.
  template <int N>
  __device__ __forceinline__ void store(const NormRow<A>& row, int64_t base, int64_t c,
                                        A (&v)[N]) const {
    A w[N], b[N];
    load_parameters<N, T>(weight, wide_parameters, c, A(1), w);
    load_parameters<N, T>(bias, wide_parameters, c, A(0), b);
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = ((v[k] - row.pivot) - row.rest) * row.rstd * w[k] + b[k];
    if (sizeof(T) == 2 && wide_result) {
      store_acc<N>(static_cast<A*>(y) + base + c, v);
    } else {
      store_acc<N>(static_cast<T*>(y) + base + c, v);
    }
  }
};

// Deviations are from the mean of the row's first elements: close to the mean of all, or, where it
// is far off, so are the first elements, and the sum of squares is large enough to hide the
// cancellation.
template <int N, typename T>
__global__ void __launch_bounds__(kMaxTeamThreads)
    long_row_kernel(RowShape shape, const T* x, NormArgs<T> args) {
  using A = acc_t<T>;
  for_each_row<Team::kBlock>(shape, 1, [&](const RowPart& part) {
    A v[N];
    Pair<A> total{0, 0};
    load_acc<N>(x + part.base + int64_t{part.rank} * N, v);
#pragma unroll
    for (int k = 0; k < N; ++k) total.first += v[k];
    const A first_count = static_cast<A>(part.width * N);
    const A pivot = team_reduce<Team::kBlock>(total, part.width, AddPairs{}).first / first_count;
    total = {0, 0};
    part.template for_each<N>([&](int64_t, int64_t offset) {
      load_acc<N>(x + offset, v);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A d = v[k] - pivot;
        total.first += d;
        total.second += d * d;
      }
    });
    total = team_reduce<Team::kBlock>(total, part.width, AddPairs{});
    const NormRow<A> row = args.finish(part, pivot, total, static_cast<A>(part.size));
    part.template for_each<N>([&](int64_t c, int64_t offset) {
      load_acc<N>(x + offset, v);
      args.template store<N>(row, part.base, c, v);
    });
  });
}

}  // namespace braze::cuda
