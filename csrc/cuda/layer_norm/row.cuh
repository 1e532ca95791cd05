// What the layer norm kernels share: how a row is spread over the threads of a team, each of which
// holds its part of the row in registers, so that memory is read once; and parameters.
//
// Bytes of an op on rows of 16-bit elements, for each element, parameters aside:
//   forward    4: x, y                (6 where y is float32, under autocast)
//   backward   6: dy, x, dx           (8 where dy is float32), and for the parameters' gradients
//              partial sums, 8 bytes for each column and block, at most one block a multiprocessor
// Rows too long for registers are read twice, the second time through the L2 cache (normalise.cuh).
//
// By length of a row in vectors of 16 bytes (in elements where 16 bytes do not divide the row or
// its address):
//   up to 128 (256), backward 96   a team of lanes of one warp; several rows a warp where they are
//                                  short
//   up to 2048 (4096)              a team of warps, which alone waits for its reductions
//   beyond                         a block; the row is read again
// Forward, in teams of warps a thread holds up to 8 vectors, 16 of float32: rows of up to 32768
// elements (8192 of float64). Backward, rows of 16-bit elements end at 1536 vectors, 12288
// elements.
//
// A team asks for its next row before it works on the one that it holds: reductions wait for the
// slowest warp, and other teams alone do not make up for that. Not where registers hold only one.
#pragma once

#include "cuda/softmax/row_team.cuh"
#include "launchers/layer_norm.h"

namespace braze::cuda {

constexpr int kMostVectors = 4;  // held by a lane, and by threads of the backward pass
constexpr int kMostScalars = 8;  // the same, where vectors have one element

// A team's threads, and how many vectors each holds.
struct HeldRowPlan {
  Team team;  // kBlock: the row is too long to be held
  int width;
  int held;
};

// lane_most: vectors that a lane holds at most; of rows beyond 32 such lanes, threads of teams of
// warps hold warps_least to `most`, and there are at most widest(held) of them.
template <typename Widest>
HeldRowPlan plan_held_row(int64_t vectors, int lane_most, int warps_least, int most,
                          const Widest& widest) {
  // The fewest idle slots; among equals the most vectors a thread, in flight together, as long as
  // four lanes still read a segment of memory side by side.
  HeldRowPlan best{Team::kBlock, kMaxTeamThreads, 0};
  int64_t best_slots = INT64_MAX;
  const auto offer = [&](Team team, int64_t width, int held) {
    const int64_t slots = width * held;
    if (slots < best_slots || (slots == best_slots && width >= 4)) {
      best = {team, static_cast<int>(width), held};
      best_slots = slots;
    }
  };
  if (vectors <= 32 * lane_most) {
    const bool scalars = lane_most == kMostScalars;
    for (int held = 2; held <= lane_most; held = scalars ? 4 * held : held + 1) {
      const int64_t width = next_power_of_two(ceil_div(vectors, held));
      if (width <= 32) offer(Team::kLanes, width, held);
    }
    return best;
  }
  for (int held = warps_least; held <= most && best.held == 0; held *= 2) {
    for (const int count : {held == kMostVectors ? 3 : held, held}) {
      const int64_t width = ceil_div(ceil_div(vectors, count), 32) * 32;
      if (width <= widest(held)) offer(Team::kWarps, width, count);
    }
  }
  return best;
}

// f(c, u) for the kHeld vectors of N elements that a thread holds of its row, from elements c on.
template <int N, int kHeld, typename F>
__device__ __forceinline__ void for_each_held(const RowPart& part, const F& f) {
  const int size = static_cast<int>(part.size);
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    const int c = (u * part.width + part.rank) * N;
    if (c < size) f(c, u);
  }
}

// N parameters from element c on, of the elements' own type T or, where `wide`, of acc_t<T>;
// `absent` where there are none.
template <int N, typename T>
__device__ __forceinline__ void load_parameters(const void* values, bool wide, int64_t c,
                                                acc_t<T> absent, acc_t<T> (&out)[N]) {
  if (!values) {
#pragma unroll
    for (int k = 0; k < N; ++k) out[k] = absent;
  } else if (sizeof(T) == 2 && wide) {
    load_acc<N>(static_cast<const acc_t<T>*>(values) + c, out);
  } else {
    load_acc<N>(static_cast<const T*>(values) + c, out);
  }
}

// N elements of a Packed as accumulation values.
template <typename T, int N>
__device__ __forceinline__ void unpack(const Packed<T, N>& packed, acc_t<T> (&out)[N]) {
  const Vec<T, N> v = packed.unpacked();
#pragma unroll
  for (int k = 0; k < N; ++k) out[k] = convert<acc_t<T>>(v.v[k]);
}

// Calls f(std::integral_constant<Team>, std::integral_constant<int, held>) for what plan_held_row
// chose. kMost: as there.
template <int N, int kMost, typename F>
void dispatch_held(const HeldRowPlan& plan, const F& f) {
  using Lanes = std::integral_constant<Team, Team::kLanes>;
  using Warps = std::integral_constant<Team, Team::kWarps>;
  const auto held = [&](auto team, auto count) { f(team, count); };
  if constexpr (N == 1) {
    if (plan.team == Team::kWarps) return held(Warps{}, std::integral_constant<int, 8>{});
    if (plan.held == 2) return held(Lanes{}, std::integral_constant<int, 2>{});
    return held(Lanes{}, std::integral_constant<int, 8>{});
  } else {
    if (plan.team == Team::kLanes) {
      if (plan.held == 2) return held(Lanes{}, std::integral_constant<int, 2>{});
      if constexpr (kMost > kMostVectors) {
        if (plan.held == 4) return held(Lanes{}, std::integral_constant<int, 4>{});
      }
      return held(Lanes{}, std::integral_constant<int, 3>{});
    }
    if constexpr (kMost <= kMostVectors) {
      if (plan.held == 2) return held(Warps{}, std::integral_constant<int, 2>{});
    }
    if (plan.held == 3) return held(Warps{}, std::integral_constant<int, 3>{});
    if (plan.held == 4) return held(Warps{}, std::integral_constant<int, 4>{});
    if constexpr (kMost >= 8) {
      if (plan.held == 8) return held(Warps{}, std::integral_constant<int, 8>{});
    }
    if constexpr (kMost >= 16) {
      if (plan.held == 16) return held(Warps{}, std::integral_constant<int, 16>{});
    }
  }
}

// The widest vectors that the row's length and the addresses allow: f(integral constant N).
template <typename T, typename F>
void with_row_vectors(int64_t size, bool aligned, const F& f) {
  constexpr int kWidth = kVecWidth<T>;
  if (aligned && size % kWidth == 0) return f(std::integral_constant<int, kWidth>{});
  f(std::integral_constant<int, 1>{});
}

}  // namespace braze::cuda
