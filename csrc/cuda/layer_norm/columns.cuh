// Layer norm's forward pass over the channels of contiguous images, whose result has the channels
// last: x is [outer, size, inner] in memory, y [outer, inner, size]. A block brings the rows of
// neighbouring positions, 128 bytes of each channel, into shared memory, transposed; then a warp
// makes a row of the result from there. One read of x, one write of y.
#pragma once

#include "normalise.cuh"

namespace braze::cuda {

constexpr int kColumnBytes = 128;  // of a channel, that a block takes
constexpr int kColumnThreads = 256;

template <typename T>
constexpr int kPositions = kColumnBytes / static_cast<int>(sizeof(T));

// Elements from row to row in shared memory: an odd number, so that neighbouring positions of a
// channel lie in different banks.
inline int64_t column_pitch(int64_t size) { return size | 1; }

inline int64_t column_shared_bytes(int64_t size) { return column_pitch(size) * kColumnBytes; }

template <int N, typename T, typename P>
__global__ void __launch_bounds__(kColumnThreads)
    column_kernel(RowShape shape, int pitch, NormArgs<T> args, P parameters) {
  using A = acc_t<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const rows = reinterpret_cast<T*>(shared);
  constexpr int kVectors = kPositions<T> / N;  // of a channel
  const int segments = static_cast<int>(ceil_div(shape.inner, kPositions<T>));
  const int64_t outer = blockIdx.x / segments;
  const int64_t first = int64_t{blockIdx.x % segments} * kPositions<T>;
  const int size = static_cast<int>(shape.size);
  const int position = static_cast<int>(threadIdx.x) % kVectors * N;
  if (first + position < shape.inner) {
    const T* const from = args.x + outer * shape.size * shape.inner + first + position;
#pragma unroll 4
    for (int c = static_cast<int>(threadIdx.x) / kVectors; c < size;
         c += kColumnThreads / kVectors) {
      const Vec<T, N> v = load_vec<N>(from + c * shape.inner);
#pragma unroll
      for (int k = 0; k < N; ++k) rows[(position + k) * pitch + c] = v.v[k];
    }
  }
  __syncthreads();
  const A by_size = A(1) / static_cast<A>(shape.size);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int p = static_cast<int>(threadIdx.x) / 32; p < kPositions<T> && first + p < shape.inner;
       p += kColumnThreads / 32) {
    const int64_t row = outer * shape.inner + first + p;
    const auto each = [&](const auto& f) {
#pragma unroll 4
      for (int c = lane; c < size; c += 32) {
        A v[1] = {convert<A>(rows[p * pitch + c])};
        f(c, v);
      }
    };
    Pair<A> total{0, 0};
    each([&](int, const A(&v)[1]) { total.first += v[0]; });
    const A pivot = quotient(team_reduce<Team::kLanes>(total, 32, AddPairs{}).first,
                             static_cast<A>(size), by_size);
    total = {0, 0};
    each([&](int, const A(&v)[1]) { add_deviations(total.first, total.second, v, pivot); });
    total = team_reduce<Team::kLanes>(total, 32, AddPairs{});
    const NormRow<A> norm = args.finish(lane == 0, row, pivot, total, by_size);
    each([&](int c, A(&v)[1]) {
      typename P::template Held<1> held;
      A w[1], b[1];
      parameters.hold(0, c, held);
      P::get(held, w, b);
      args.store(norm, w, b, row * shape.size + c, v);
    });
  }
}

template <int N, typename T, typename P>
void launch_columns(cudaStream_t stream, const RowShape& shape, const NormArgs<T>& args,
                    const P& parameters) {
  const auto bytes = static_cast<int>(column_shared_bytes(shape.size));
  const auto kernel = column_kernel<N, T, P>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  const int64_t blocks = shape.outer * ceil_div(shape.inner, kPositions<T>);
  kernel<<<static_cast<unsigned>(blocks), kColumnThreads, bytes, stream>>>(
      shape, static_cast<int>(column_pitch(shape.size)), args, parameters);
}

}  // namespace braze::cuda
