// Teams of threads that work on one row each, for kernels that reduce along rows. These shapes of
// team cover every layout with coalesced accesses:
//   kLanes   2^k <= 32 neighbouring lanes of a warp; short rows that are contiguous in memory
//   kBlock   a whole block; long contiguous rows
//   kColumn  blockDim.y threads, one under the other; rows strided by `inner`, so that the block's
//            x direction, not the row, runs along memory
#pragma once

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "launchers/common/row_shape.h"

namespace braze::cuda {

enum class Team { kLanes, kBlock, kColumn };

constexpr int kMaxTeamThreads = 512;

template <typename A>
struct Pair {
  A first, second;
};

struct AddPairs {
  template <typename A>
  __device__ Pair<A> operator()(Pair<A> a, Pair<A> b) const {
    return {a.first + b.first, a.second + b.second};
  }
};

// Waits for the `width` threads, whole warps, of team number `team` of the block. A block has 16
// barriers, of which 0 is __syncthreads'.
__device__ __forceinline__ void team_barrier(int team, int width) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(width) : "memory");
}

// A value that every thread of the team calls with and gets the reduction of.
template <Team kTeam, typename A, typename Combine>
__device__ Pair<A> team_reduce(Pair<A> v, int width, Combine combine) {
  const auto shuffle = [&](int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      v = combine(v, Pair<A>{__shfl_xor_sync(0xffffffffu, v.first, offset),
                             __shfl_xor_sync(0xffffffffu, v.second, offset)});
    }
  };
  if constexpr (kTeam == Team::kLanes) {
    shuffle(width);
  } else if constexpr (kTeam == Team::kBlock) {
    __shared__ Pair<A> warp_results[kMaxTeamThreads / 32];
    shuffle(32);
    if (threadIdx.x % 32 == 0) warp_results[threadIdx.x / 32] = v;
    __syncthreads();
    v = warp_results[0];
    for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) v = combine(v, warp_results[w]);
    __syncthreads();  // the next reduction writes warp_results again
  } else {
    __shared__ Pair<A> thread_results[kMaxTeamThreads];
    thread_results[threadIdx.y * blockDim.x + threadIdx.x] = v;
    __syncthreads();
    v = thread_results[threadIdx.x];
    for (int y = 1; y < static_cast<int>(blockDim.y); ++y) {
      v = combine(v, thread_results[y * blockDim.x + threadIdx.x]);
    }
    __syncthreads();
  }
  return v;
}

// One thread's part of a row.
struct RowPart {
  int64_t row;     // in (outer, inner) order
  int64_t base;    // offset of the row's first element
  int64_t stride;  // between elements of the row
  int64_t size;    // elements of the row; 0 past the last row, where the thread only keeps in step
  int rank;        // of the thread in its team
  int width;       // threads in the team

  // f(c, offset of element c) for this thread's share, N neighbouring elements at a time.
  template <int N, typename F>
  __device__ void for_each(F f) const {
    for (int64_t c = int64_t{rank} * N; c < size; c += int64_t{width} * N) f(c, base + c * stride);
  }
};

// Of teams of `lanes` lanes: this thread's part of the row that its team has where the block's
// first team has row `first`.
__device__ __forceinline__ RowPart team_part(const RowShape& shape, int lanes, int64_t first) {
  const int64_t row = first + threadIdx.x / lanes;
  return {row,
          row * shape.size,
          1,
          row < shape.rows() ? shape.size : 0,
          static_cast<int>(threadIdx.x) % lanes,
          lanes};
}

// Calls f(part) for every row; all threads of a block make the same number of calls, so that f may
// synchronise the block. `lanes` is the team's width for kLanes.
template <Team kTeam, typename F>
__device__ void for_each_row(const RowShape& shape, int lanes, F f) {
  const int64_t rows = shape.outer * shape.inner;
  if constexpr (kTeam == Team::kLanes) {
    const int teams = blockDim.x / lanes;
    for (int64_t first = int64_t{blockIdx.x} * teams; first < rows;
         first += int64_t{gridDim.x} * teams) {
      f(team_part(shape, lanes, first));
    }
  } else if constexpr (kTeam == Team::kBlock) {
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
      f(RowPart{row, row * shape.size, 1, shape.size, static_cast<int>(threadIdx.x),
                static_cast<int>(blockDim.x)});
    }
  } else {
    for (int64_t first = int64_t{blockIdx.x} * blockDim.x; first < rows;
         first += int64_t{gridDim.x} * blockDim.x) {
      const int64_t row = first + threadIdx.x;
      const int64_t outer = row / shape.inner;
      f(RowPart{row, (outer * shape.size - outer) * shape.inner + row, shape.inner,
                row < rows ? shape.size : 0, static_cast<int>(threadIdx.y),
                static_cast<int>(blockDim.y)});
    }
  }
}

struct TeamLaunch {
  Team team;
  dim3 block;
  int grid;
  int lanes;
};

inline int64_t next_power_of_two(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

// Which team serves the shape best, with vectors of `vector` elements.
inline TeamLaunch choose_team(const RowShape& shape, int vector) {
  constexpr int kThreads = 256;
  constexpr int64_t kLongestLaneRow = 1024;
  TeamLaunch launch{};
  launch.lanes = 1;
  int64_t blocks;
  if (shape.inner > 1) {
    // As many threads along the row as leave each about eight elements.
    const int64_t depth = std::min<int64_t>(16, next_power_of_two(ceil_div(shape.size, 8)));
    launch.team = Team::kColumn;
    launch.block = dim3(depth > 8 ? 32 : kThreads / depth, depth);
    blocks = ceil_div(shape.rows(), launch.block.x);
  } else if (shape.size > kLongestLaneRow) {
    launch.team = Team::kBlock;
    launch.block = dim3(shape.size > 8 * kLongestLaneRow ? kMaxTeamThreads : kThreads);
    blocks = shape.rows();
  } else {
    launch.team = Team::kLanes;
    launch.lanes = static_cast<int>(
        std::min<int64_t>(32, next_power_of_two(ceil_div(shape.size, 2 * int64_t{vector}))));
    launch.block = dim3(kThreads);
    blocks = ceil_div(shape.rows(), kThreads / launch.lanes);
  }
  launch.grid = static_cast<int>(std::min<int64_t>(blocks, int64_t{sm_count()} * 16));
  return launch;
}

// Calls f(std::integral_constant<Team, team>{}) for a team that choose_team() chose.
template <typename F>
void dispatch_team(Team team, F&& f) {
  switch (team) {
    case Team::kLanes: return f(std::integral_constant<Team, Team::kLanes>{});
    case Team::kBlock: return f(std::integral_constant<Team, Team::kBlock>{});
    case Team::kColumn: return f(std::integral_constant<Team, Team::kColumn>{});
  }
}

// The running maximum of a row and the sum of exp(x - maximum), found in one pass over x:
// Milakov and Gimelshein, Online normalizer calculation for softmax (2018).
template <typename A>
struct OnlineSum {
  // -inf while nothing but -inf has been seen; such elements add nothing to the sum.
  __device__ static A reference(A maximum) {
    return isinf(maximum) && maximum < 0 ? A(0) : maximum;
  }

  __device__ static Pair<A> identity() { return {-A(INFINITY), A(0)}; }

  template <int N>
  __device__ static void add(Pair<A>& state, const A (&x)[N]) {
    A maximum = state.first;
#pragma unroll
    for (int k = 0; k < N; ++k) maximum = max(maximum, x[k]);
    const A ref = reference(maximum);
    A sum = state.second * exp(state.first - ref);
#pragma unroll
    for (int k = 0; k < N; ++k) sum += exp(x[k] - ref);
    state = {maximum, sum};
  }

  __device__ Pair<A> operator()(Pair<A> a, Pair<A> b) const {
    // The larger first: a fused multiply-add is not symmetric, and all threads of a team have to
    // get the same bits.
    const bool in_order = a.first >= b.first;
    const Pair<A> high = in_order ? a : b, low = in_order ? b : a;
    const A ref = reference(high.first);
    return {high.first, low.second * exp(low.first - ref) + high.second * exp(high.first - ref)};
  }
};

// N elements at p as accumulation values.
template <int N, typename T>
__device__ __forceinline__ void load_acc(const T* p, acc_t<T> (&out)[N]) {
  Packed<T, N> v;
  v.load(p);
  unpack(v, out);
}

template <int N, typename T>
__device__ __forceinline__ void store_acc(T* p, const acc_t<T> (&values)[N]) {
  Vec<T, N> v;
#pragma unroll
  for (int k = 0; k < N; ++k) v.v[k] = convert<T>(values[k]);
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

}  // namespace braze::cuda
