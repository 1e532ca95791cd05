// Rung 6: each row is read once and stays in registers until its results are stored.
//
// With the row at hand nothing has to be online: the maximum, then the sum, from registers, and an
// exponential for each element, which is kept too. Memory sees each byte once in each direction
// whatever the caches do, and all loads of a thread are in flight together. The team that shares a
// row fits it, so that threads have work: up to two vectors for each of 1 to 32 lanes, several
// short rows in a warp; then 128 bytes for each lane of a warp; then 256 for each thread of a
// block, of whatever precision is computed in. That is the limit: 512 such threads are all of a
// multiprocessor's registers, with what else they need, and a longer row has to be read twice.
#pragma once

#include "05_vectorized.cuh"

namespace braze::cuda::softmax_ladder {

// kVectors: vectors of N elements that a thread holds at most. `lanes`: the team's width within a
// warp; a block is one team.
template <Team kTeam, int N, int kVectors, typename T>
__global__ void __launch_bounds__(kTeam == Team::kBlock ? kMaxTeamThreads : kThreads)
    registers_kernel(Rows<T> m, int lanes) {
  using A = acc_t<T>;
  for_each_row<kTeam>(RowShape{m.rows, m.size, 1}, lanes, [&](const RowPart& part) {
    Vec<T, N> held[kVectors];
    const auto for_each_held = [&](auto f) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int64_t c = (int64_t{i} * part.width + part.rank) * N;
        if (c < part.size) f(held[i], part.base + c);
      }
    };
    for_each_held([&](Vec<T, N>& v, int64_t at) { v = load_vec<N>(m.x + at); });
    Pair<A> state{-A(INFINITY), A(0)};  // (maximum, sum)
    for_each_held([&](Vec<T, N>& v, int64_t) {
#pragma unroll
      for (int k = 0; k < N; ++k) state.first = max(state.first, convert<A>(v.v[k]));
    });
    state = team_reduce<kTeam>(state, part.width, [](Pair<A> a, Pair<A> b) {
      return Pair<A>{max(a.first, b.first), A(0)};
    });
    const A maximum = state.first;
    for_each_held([&](Vec<T, N>& v, int64_t) {
#pragma unroll
      for (int k = 0; k < N; ++k) state.second += exp(convert<A>(v.v[k]) - maximum);
    });
    const A scale = 1 / team_reduce<kTeam>(state, part.width, AddPairs{}).second;
    for_each_held([&](Vec<T, N>& v, int64_t at) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        v.v[k] = convert<T>(exp(convert<A>(v.v[k]) - maximum) * scale);
      }
      store_vec(m.y + at, v);
    });
  });
}

template <int N, typename T>
void run_registers_by(Stream stream, const Rows<T>& m) {
  // Elements. Of single ones a thread holds half as many: the compiler unrolls no more of them.
  constexpr int kOfLane = 128 / sizeof(acc_t<T>), kOfThread = (N > 1 ? 2 : 1) * kOfLane;
  constexpr int kLongest = kOfThread * kMaxTeamThreads;
  const cudaStream_t s = as_cuda(stream);
  if (m.size <= 2 * N * 32) {
    const int lanes = static_cast<int>(next_power_of_two(ceil_div(m.size, 2 * N)));
    const unsigned blocks = blocks_of(m, kThreads / lanes);
    registers_kernel<Team::kLanes, N, 2><<<blocks, kThreads, 0, s>>>(m, lanes);
  } else if (m.size <= kOfLane * 32) {
    const unsigned blocks = blocks_of(m, kWarps);
    registers_kernel<Team::kLanes, N, kOfLane / N><<<blocks, kThreads, 0, s>>>(m, 32);
  } else if (m.size <= kLongest) {
    const int threads = static_cast<int>(ceil_div(m.size, kOfThread * 32)) * 32;
    registers_kernel<Team::kBlock, N, kOfThread / N><<<blocks_of(m, 1), threads, 0, s>>>(m, 0);
  } else {
    refuse("06_registers",
           "rows of up to " + std::to_string(kLongest) + " elements of this dtype and alignment");
  }
}

template <typename T>
void run_registers(Stream stream, const Rows<T>& m) {
  if (takes_vectors(m)) {
    run_registers_by<kVecWidth<T>>(stream, m);
  } else {
    run_registers_by<1>(stream, m);
  }
}

}  // namespace braze::cuda::softmax_ladder
