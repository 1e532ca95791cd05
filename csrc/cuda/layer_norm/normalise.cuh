// Forward passes over rows, for layer norm and group norm, whose parameters belong to other
// elements: one read of x, one write of y.
//
// P, the parameters, has `template <int N> void load(int64_t row, int64_t c, A (&weight)[N],
// A (&bias)[N])`: those of the N elements from c on of a row.
#pragma once

#include "row.cuh"

namespace braze::cuda {

// What a row is normalised with: (x - pivot) * rstd + shift, where pivot is its mean as rounded to
// the type, from which the deviations are exact, and the shift what rounding took away: beside a
// deviation much smaller than the mean it counts.
template <typename A>
struct NormRow {
  A pivot, rstd, shift;
};

template <typename T>
struct NormArgs {
  using A = acc_t<T>;

  const T* x;
  void* y;
  DType result;  // of y: T's; float32 beside a 16-bit T; of 16 bits beside float32
  A eps;
  A* mean;
  A* rstd;

  // sums: of the deviations from the pivot, and of their squares.
  __device__ __forceinline__ NormRow<A> finish(const RowPart& part, A pivot, Pair<A> sums,
                                               A by_size) const {
    const A rest = sums.first * by_size;
    A variance = sums.second * by_size - rest * rest;
    variance = variance < A(0) ? A(0) : variance;  // NaN stays
    const A scale = rsqrt(variance + eps);
    if (part.rank == 0 && part.size > 0) {
      mean[part.row] = pivot + rest;
      rstd[part.row] = scale;
    }
    return {pivot, scale, -rest * scale};
  }

  // y of N elements v, those from c on of a row.
  template <int N, typename P>
  __device__ __forceinline__ void store(const P& parameters, const NormRow<A>& norm,
                                        const RowPart& part, int64_t c, A (&v)[N]) const {
    A w[N], b[N];
    parameters.load(part.row, c, w, b);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      v[k] = ((v[k] - norm.pivot) * norm.rstd + norm.shift) * w[k] + b[k];
    }
    const int64_t at = part.base + c;
    if constexpr (sizeof(T) == 2) {
      if (result == DType::kFloat32) return store_acc<N>(static_cast<A*>(y) + at, v);
    } else if constexpr (sizeof(T) == 4) {
      if (result == DType::kBFloat16) return store_acc<N>(static_cast<__nv_bfloat16*>(y) + at, v);
      if (result == DType::kFloat16) return store_acc<N>(static_cast<__half*>(y) + at, v);
    }
    store_acc<N>(static_cast<T*>(y) + at, v);
  }
};

template <typename A, int N>
__device__ __forceinline__ void add_deviations(Pair<A>& sums, const A (&v)[N], A pivot) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const A d = v[k] - pivot;
    sums.first += d;
    sums.second += d * d;
  }
}

constexpr int kLaneThreads = 256;  // of a block of teams of lanes
// Vectors that a thread may hold while it waits for as many of the next row.
constexpr int kMostAhead = 8;

template <Team kTeam, int N, int kHeld, typename T, typename P>
__global__ void __launch_bounds__(kTeam == Team::kLanes ? kLaneThreads : kMaxTeamThreads)
    held_row_kernel(RowShape shape, int width, NormArgs<T> args, P parameters) {
  using A = acc_t<T>;
  constexpr bool kAhead = kHeld <= kMostAhead;
  const A by_size = A(1) / static_cast<A>(shape.size);
  wait_for_earlier_kernels();
  Packed<T, N> ahead[kAhead ? kHeld : 1];
  const auto ask = [&](const RowPart& part) {
    if constexpr (kAhead) {
      for_each_held<N, kHeld>(part, [&](int c, int u) { ahead[u].load(args.x + part.base + c); });
    }
  };
  for_each_row_ahead(shape, width, ask, [&](const RowPart& part, const RowPart& next) {
    Packed<T, N> held[kHeld];
    const auto each = [&](const auto& f) {
      for_each_held<N, kHeld>(part, [&](int c, int u) { f(c, held[u]); });
    };
    if constexpr (kAhead) {
#pragma unroll
      for (int u = 0; u < kHeld; ++u) held[u] = ahead[u];
      ask(next);
    } else {
      each([&](int c, Packed<T, N>& v) { v.load(args.x + part.base + c); });
    }
    Pair<A> total{0, 0};
    each([&](int, const Packed<T, N>& packed) {
      A v[N];
      unpack(packed, v);
#pragma unroll
      for (int k = 0; k < N; ++k) total.first += v[k];
    });
    // Divided: of equal elements it is their value, so that all deviations are 0.
    const A pivot =
        team_reduce<kTeam>(total, part.width, AddPairs{}).first / static_cast<A>(shape.size);
    total = {0, 0};
    each([&](int, const Packed<T, N>& packed) {
      A v[N];
      unpack(packed, v);
      add_deviations(total, v, pivot);
    });
    total = team_reduce<kTeam>(total, part.width, AddPairs{});
    const NormRow<A> norm = args.finish(part, pivot, total, by_size);
    each([&](int c, const Packed<T, N>& packed) {
      A v[N];
      unpack(packed, v);
      args.store(parameters, norm, part, c, v);
    });
  });
}

// The sums of a row's deviations from `pivot`, which is made the mean of its first elements: close
// to the mean of all, or, where it is far off, so are the first elements, and the sum of squares is
// large enough to hide the cancellation. Every thread of the team calls it and gets them.
template <Team kTeam, int N, typename T>
__device__ Pair<acc_t<T>> sum_about_first(const RowPart& part, const T* x, acc_t<T>& pivot) {
  using A = acc_t<T>;
  A v[N];
  Pair<A> total{0, 0};
  if (part.rank * N < part.size) {
    load_acc<N>(x + part.base + part.rank * N, v);
#pragma unroll
    for (int k = 0; k < N; ++k) total.first += v[k];
    total.second = N;
  }
  total = team_reduce<kTeam>(total, part.width, AddPairs{});
  pivot = total.first / total.second;
  total = {0, 0};
  part.template for_each<N>([&](int64_t, int64_t offset) {
    load_acc<N>(x + offset, v);
    add_deviations(total, v, pivot);
  });
  return team_reduce<kTeam>(total, part.width, AddPairs{});
}

// Rows that are too long for a team to hold: a block reads them twice. The 50 MB of an H200's L2
// cache keep what 132 blocks of rows up to 300 KB have read.
template <int N, typename T, typename P>
__global__ void __launch_bounds__(kMaxTeamThreads)
    long_row_kernel(RowShape shape, NormArgs<T> args, P parameters) {
  using A = acc_t<T>;
  const A by_size = A(1) / static_cast<A>(shape.size);
  for_each_row<Team::kBlock>(shape, 1, [&](const RowPart& part) {
    A pivot;
    const Pair<A> total = sum_about_first<Team::kBlock, N>(part, args.x, pivot);
    const NormRow<A> norm = args.finish(part, pivot, total, by_size);
    part.template for_each<N>([&](int64_t c, int64_t offset) {
      A v[N];
      load_acc<N>(args.x + offset, v);
      args.store(parameters, norm, part, c, v);
    });
  });
}

// Vectors that a thread of a team of warps holds at most.
template <typename T>
constexpr int kMostHeld = sizeof(T) == 4 ? 16 : 8;

constexpr int kWarpsThreads = 128;  // of a block of teams of warps that are no wider
constexpr int kBlocksPerSm = 32;    // at most, so that a block's start is paid for by several rows
// What a multiprocessor's blocks ask for ahead: the fastest of 2 to 16 blocks for nearly all of the
// rows of 96 to 32768 bfloat16 elements that were tried on an H200.
constexpr int kBytesAhead = 32 << 10;

// Blocks of teams that hold rows, at most.
template <int N, typename T>
int64_t most_held_blocks(const HeldRowPlan& plan, int threads) {
  if (plan.held > kMostAhead) return int64_t{sm_count()} * kBlocksPerSm;
  const int bytes = threads * plan.held * N * static_cast<int>(sizeof(T));
  return int64_t{sm_count()} * std::clamp<int64_t>(ceil_div(kBytesAhead, bytes), 2, kBlocksPerSm);
}

template <int N, typename T>
HeldRowPlan plan_row(int64_t size) {
  constexpr int kLane = N == 1 ? kMostScalars : kMostVectors;
  constexpr int kMost = N == 1 ? kMostScalars : kMostHeld<T>;
  // Twice as many vectors for half as many threads: their reductions are shorter.
  return plan_held_row(size / N, kLane, kLane, kMost, [](int held) {
    return held == kMostVectors && held < kMost ? kMaxTeamThreads / 2 : kMaxTeamThreads;
  });
}

template <int N, typename T, typename P>
void launch_rows(cudaStream_t stream, int64_t rows, int64_t size, const NormArgs<T>& args,
                 const P& parameters) {
  const RowShape shape{rows, size, 1};
  const HeldRowPlan plan = plan_row<N, T>(size);
  if (plan.team == Team::kBlock) {
    const int grid = static_cast<int>(std::min(rows, int64_t{sm_count()} * kBlocksPerSm));
    long_row_kernel<N><<<grid, kMaxTeamThreads, 0, stream>>>(shape, args, parameters);
    return;
  }
  const int threads = plan.team == Team::kLanes
                          ? kLaneThreads
                          : plan.width * std::max(kWarpsThreads / plan.width, 1);
  const int grid = static_cast<int>(
      std::min(ceil_div(rows, threads / plan.width), most_held_blocks<N, T>(plan, threads)));
  dispatch_held<N, kMostHeld<T>>(plan, [&](auto team, auto held) {
    launch_early(held_row_kernel<decltype(team)::value, N, decltype(held)::value, T, P>, grid,
                 threads, 0, stream, shape, plan.width, args, parameters);
  });
}

}  // namespace braze::cuda
