// Rung 4: the maximum and the sum in one pass: Milakov and Gimelshein, Online normalizer
// calculation for softmax (2018).
//
// A thread keeps the largest value so far and the sum of exp(x - that value). Where a larger one
// comes, the sum is multiplied by exp(old - new), which turns every term into what it should have
// been. Two such pairs merge in the same way, so that lanes still meet by shuffles. Three reads of
// a row become two. That pays where rows do not stay in a cache between the passes; in exchange an
// element costs two exponentials here instead of one, and the next waits for them.
#pragma once

#include "rung.cuh"

namespace braze::cuda::softmax_ladder {

// Rungs 4 and 5. N: how many neighbouring elements a lane takes at a time.
template <int N, typename T>
__global__ void online_kernel(Rows<T> m) {
  using A = acc_t<T>;
  const int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (row >= m.rows) return;
  const int lane = threadIdx.x % 32;
  const T* const x = m.x + row * m.size;
  T* const y = m.y + row * m.size;
  Pair<A> state = OnlineSum<A>::identity();  // (maximum, sum)
  for (int64_t c = lane * N; c < m.size; c += 32 * N) {
    A v[N];
    load_acc<N>(x + c, v);
    OnlineSum<A>::add(state, v);
  }
  state = team_reduce<Team::kLanes>(state, 32, OnlineSum<A>{});
  const A scale = 1 / state.second;
  for (int64_t c = lane * N; c < m.size; c += 32 * N) {
    A v[N];
    load_acc<N>(x + c, v);
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = exp(v[k] - state.first) * scale;
    store_acc<N>(y + c, v);
  }
}

template <int N, typename T>
void run_online_by(Stream stream, const Rows<T>& m) {
  online_kernel<N><<<blocks_of(m, kWarps), kThreads, 0, as_cuda(stream)>>>(m);
}

template <typename T>
void run_online(Stream stream, const Rows<T>& m) {
  run_online_by<1>(stream, m);
}

}  // namespace braze::cuda::softmax_ladder
