// Rows that are on their way while one is worked on: each thread copies the vectors of its next
// rows into slots of its own in shared memory (cp.async), which nobody else reads, so that a team
// waits for its reductions only. Registers are left for what is computed.
//
// A team is `width` neighbouring threads, a power of two: lanes of a warp, or whole warps. Vector u
// of a thread lies kLanes vectors behind vector u - 1, so that a warp reads 512 bytes side by side,
// and all of a row's addresses are one and constants.
#pragma once

#include <initializer_list>

#include "cuda/common/cp_async.cuh"
#include "cuda/common/own_moments.cuh"
#include "row.cuh"

namespace braze::cuda {

constexpr int kWidestTeam = 512;
constexpr int kMostBlockWarps = 20;

// kWidth: 0, of teams of up to 32 lanes; 32, of warps; kTeamOfWarps, of two or more warps.
constexpr int kTeamOfWarps = 64;

template <int kWidth>
struct TeamPlace {
  int width, lanes;  // lanes: that share a run of vectors

  __device__ __forceinline__ explicit TeamPlace(int width)
      : width(kWidth == 32 ? 32 : width), lanes(kWidth > 0 ? 32 : width) {}

  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x) / 32; }
  __device__ __forceinline__ int team() const { return static_cast<int>(threadIdx.x) / width; }
  __device__ __forceinline__ int teams() const { return static_cast<int>(blockDim.x) / width; }
  // The first of this thread's vectors of a row, each of which has kVectors in a thread.
  template <int kVectors>
  __device__ __forceinline__ int first_vector() const {
    const int in_team = kWidth > 32 ? warp() & (width / 32 - 1) : 0;
    return in_team * kVectors * 32 + lane() % lanes;
  }
};

// sum / size: exact where the quotient is, and without the call that a division may make.
template <typename A>
__device__ __forceinline__ A quotient(A sum, A size, A by_size) {
  const A q = sum * by_size;
  return fma(fma(-q, size, sum), by_size, q);
}

// Hides from the compiler where a vector comes from: it would convert its elements before a loop
// and keep them in twice as many registers.
template <typename T, int N>
__device__ __forceinline__ void hide(Packed<T, N>& v) {
  if constexpr (sizeof(v.raw[0]) >= 4) {
    auto* const words = reinterpret_cast<uint32_t*>(v.raw);
#pragma unroll
    for (size_t i = 0; i < sizeof(v.raw) / 4; ++i) asm volatile("" : "+r"(words[i]));
  }
}

template <typename A>
__device__ __forceinline__ A other_lane(A v, int offset) {
  return __shfl_xor_sync(0xffffffffu, v, offset);
}

// What the lower and the upper half of a warp have, in this order, to all lanes.
template <typename A>
__device__ __forceinline__ void exchange_halves(A of_half, A (&v)[2]) {
  const A other = other_lane(of_half, 16);
  const bool upper = threadIdx.x % 32 >= 16;
  v[0] = upper ? other : of_half;
  v[1] = upper ? of_half : other;
}

// The warp's sums of v, the first in the lower half and the second in the upper.
template <typename A>
__device__ __forceinline__ A sums_in_halves(const A (&v)[2]) {
  const bool upper = threadIdx.x % 32 >= 16;
  A sum = (upper ? v[1] : v[0]) + other_lane(upper ? v[0] : v[1], 16);
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) sum += other_lane(sum, offset);
  return sum;
}

// The sums of one or two values over a team. There is one barrier, since the halves of the warps'
// results are used in turn: `turn` is 0 at first.
template <int kWidth, int kValues, typename A>
__device__ __forceinline__ void team_sums(A (&v)[kValues], const TeamPlace<kWidth>& place,
                                          int& turn) {
  static_assert(kValues <= 2);
  if constexpr (kWidth == 0) {
    for (int offset = place.width / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) v[i] += other_lane(v[i], offset);
    }
    return;
  }
  A sum = v[0];
  if constexpr (kValues == 2) {
    sum = sums_in_halves(v);
  } else {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += other_lane(sum, offset);
  }
  if constexpr (kWidth > 32) {
    static_assert(kWidestTeam / 32 <= 16);  // warps, whose results half of a warp adds up
    constexpr int kLanes = 32 / kValues;
    __shared__ A results[2][kValues][kMostBlockWarps];
    const int warps = place.width / 32, first = place.warp() & -warps;
    A* const of_value = results[turn][place.lane() / kLanes];
    if (place.lane() % kLanes == 0) of_value[place.warp()] = sum;
    team_barrier(place.team(), place.width);
    sum = of_value[first + (place.lane() & warps - 1)];
    for (int offset = warps / 2; offset > 0; offset /= 2) sum += other_lane(sum, offset);
    turn ^= 1;
  }
  if constexpr (kValues == 2) {
    exchange_halves(sum, v);
  } else {
    v[0] = sum;
  }
}

// What the first of the team's lanes in this warp has.
template <int kWidth, typename A>
__device__ __forceinline__ A first_of_team(A v, const TeamPlace<kWidth>& place) {
  return __shfl_sync(0xffffffffu, v, place.lane() & -place.lanes);
}

// v: a thread's sums of deviations from its warp's pivot, and of their squares. They become the
// team's about one pivot. kOfWarp: of a row's `size` elements a warp's, those of the first warp
// first. One barrier, as in team_sums().
template <int kOfWarp, int kWidth, typename A>
__device__ __forceinline__ void team_moments(A& pivot, A (&v)[2], int size,
                                             const TeamPlace<kWidth>& place, int& turn) {
  if constexpr (kWidth <= 32) {
    team_sums(v, place, turn);
  } else {
    __shared__ A sums[2][2][kMostBlockWarps], pivots[2][kMostBlockWarps];
    const int warps = place.width / 32, first = place.warp() & -warps;
    const A sum = sums_in_halves(v);
    if (place.lane() % 16 == 0) {
      sums[turn][place.lane() / 16][place.warp()] = sum;
      pivots[turn][place.warp()] = pivot;
    }
    team_barrier(place.team(), place.width);
    const int in_team = place.lane() & warps - 1, warp = first + in_team;
    pivot = pivots[turn][first];
    const A count = static_cast<A>(min(max(size - in_team * kOfWarp, 0), kOfWarp));
    const OwnMoments<A> of_warp{pivots[turn][warp], count, sums[turn][0][warp],
                                sums[turn][1][warp]};
    of_warp.about(pivot, v);
    for (int offset = warps / 2; offset > 0; offset /= 2) {
      v[0] += other_lane(v[0], offset);
      v[1] += other_lane(v[1], offset);
    }
    turn ^= 1;
  }
}

// kVectors slots of a lane, for vectors of N elements; as many for each lane of a warp lie between
// the pieces of a vector, so that lanes read from different banks.
template <typename T, int N, int kVectors>
class Slots {
 public:
  using V = Packed<T, N>;
  static constexpr int kPieces = V::kCount * kVectors;
  static constexpr int kBytes = kPieces * 32 * static_cast<int>(sizeof(typename V::Raw));  // a warp

  // of: a warp's
  __device__ __forceinline__ explicit Slots(unsigned char* of)
      : pieces_(reinterpret_cast<Raw*>(of) + threadIdx.x % 32) {}

  // Copies the vector at `from` to slot u, or zeros where it is not `valid`; then it is not read.
  __device__ __forceinline__ void ask(int u, const T* from, bool valid) const {
#pragma unroll
    for (int i = 0; i < V::kCount; ++i) {
      Raw* const to = pieces_ + (u * V::kCount + i) * 32;
      const Raw* const piece = reinterpret_cast<const Raw*>(from) + i;
      if constexpr (sizeof(Raw) >= 4) {
        cp_async<static_cast<int>(sizeof(Raw))>(to, piece, valid);
      } else {
        *to = valid ? *piece : Raw{};  // single elements of 16 bits, which nothing copies
      }
    }
  }
  __device__ __forceinline__ V operator[](int u) const {
    V v;
#pragma unroll
    for (int i = 0; i < V::kCount; ++i) v.raw[i] = pieces_[(u * V::kCount + i) * 32];
    return v;
  }
  // The same, but not kept in registers from an earlier time on.
  __device__ __forceinline__ V again(int u) const {
    V v;
#pragma unroll
    for (int i = 0; i < V::kCount; ++i) {
      v.raw[i] = load_shared_again(pieces_ + (u * V::kCount + i) * 32);
    }
    return v;
  }

 private:
  using Raw = typename V::Raw;
  Raw* pieces_;
};

// Steps through the rows of a team: f(row, stage), where stage is the number of the row's slots of
// kAhead + 1, after ask(row, stage) for the row that is kAhead steps further on. Rows may lie past
// the last one, where other teams of the block still have some. start() is called while the first
// rows are on their way.
template <int kAhead, typename Ask, typename Start, typename F>
__device__ __forceinline__ void for_each_row_in_slots(int64_t rows, int64_t first, int64_t stride,
                                                      int team, const Ask& ask, const Start& start,
                                                      const F& f) {
  int64_t ahead = first + team;
#pragma unroll
  for (int s = 0; s < kAhead; ++s) {
    ask(ahead, s);
    cp_async_commit();
    ahead += stride;
  }
  start();
  int here = 0, there = kAhead;
#pragma unroll 1
  for (; first < rows; first += stride) {
    ask(ahead, there);
    cp_async_commit();
    ahead += stride;
    cp_async_wait<kAhead>();
    f(first + team, here);
    here = here == kAhead ? 0 : here + 1;
    there = there == kAhead ? 0 : there + 1;
  }
  cp_async_wait<0>();
}

// Vectors of N elements that a thread has of a row are kVectorScale times as many as it has of 8
// elements of 16 bits: as many elements of 16 bits as of 32, half as many of 64. Of single elements
// there are 8.
template <int N>
constexpr int kVectorScale = N == 1   ? 2
                             : N >= 8 ? 1
                                      : 2;

// Of elements of 32 and 64 bits and of single ones there are fewer kernels, for the code's size.
template <int N>
constexpr bool thread_can_have(int held) {
  return N > 4 || (N > 1 ? held != 3 : held == 4);
}

struct AheadPlan {
  int width = 0;  // of a team; 0: no team has the row
  int vectors;    // of a thread
  int threads;    // of a block
  int bytes;      // of dynamic shared memory
};

// The fewest idle slots, of teams of up to `widest` threads with as many vectors each as `held`
// lists, before scaling. bytes(width, vectors, threads): of shared memory, which is `most` at most.
// block_threads(vectors): of a block, at most.
template <int N, typename Threads, typename Bytes>
AheadPlan plan_ahead(int64_t vectors, int widest, std::initializer_list<int> held, int64_t most,
                     const Threads& block_threads, const Bytes& bytes) {
  AheadPlan best;
  int64_t best_slots = INT64_MAX;
  for (const int h : held) {
    if (!thread_can_have<N>(h)) continue;
    const int of_thread = h * kVectorScale<N>;
    const int64_t width = next_power_of_two(ceil_div(vectors, of_thread));
    if (width > widest || width * of_thread >= best_slots) continue;
    const int step = static_cast<int>(std::max<int64_t>(width, 32));
    const int most_threads = block_threads(of_thread);
    for (int threads = std::max(most_threads / step, 1) * step; threads > 0; threads -= step) {
      const int64_t shared = bytes(static_cast<int>(width), of_thread, threads);
      if (shared > most) continue;
      best = {static_cast<int>(width), of_thread, threads, static_cast<int>(shared)};
      best_slots = width * of_thread;
      break;
    }
  }
  return best;
}

// f(integral constant kWidth, integral constant vectors) for a plan that has a width, of teams of
// up to kWidest, and kHeld... vectors, before scaling.
template <int N, int kWidest, int... kHeld, typename F>
void dispatch_ahead(const AheadPlan& plan, const F& f) {
  const auto with_width = [&](auto width) {
    const auto try_one = [&](auto held) {
      if constexpr (thread_can_have<N>(decltype(held)::value)) {
        constexpr int kVectors = decltype(held)::value * kVectorScale<N>;
        if (plan.vectors == kVectors) f(width, std::integral_constant<int, kVectors>{});
      }
    };
    (try_one(std::integral_constant<int, kHeld>{}), ...);
  };
  if constexpr (kWidest > 32) {
    if (plan.width > 32) return with_width(std::integral_constant<int, kTeamOfWarps>{});
  }
  if constexpr (N > 4 && kWidest > 32) {
    if (plan.width == 32) return with_width(std::integral_constant<int, 32>{});
  }
  with_width(std::integral_constant<int, 0>{});
}

}  // namespace braze::cuda
