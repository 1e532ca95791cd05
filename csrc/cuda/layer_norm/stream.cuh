// Forward passes over rows that stay in shared memory, of a block or a cluster of blocks, from
// their first read to their last write: those that threads cannot hold in registers.
#pragma once

#include "ahead.cuh"
#include "cuda/common/cluster.cuh"
#include "norm_args.cuh"

namespace braze::cuda {

// How a row, or a block's slice of one, is shared out among a block's threads where it stays in
// shared memory, chunk by chunk of kChunk vectors a thread, until it is finished.
struct StreamPlan {
  int threads = 0;  // 0: too long
  int chunks = 0;   // of a slice
  int cluster = 0;  // blocks that have a row together, a slice each
  int slice = 0;    // elements
  int bytes = 0;    // of shared memory
  int blocks = 0;   // of a multiprocessor
};

constexpr int kChunk = 2;
constexpr int kStreamThreads = 384;     // at most
constexpr int kStreamSmThreads = 1152;  // of a multiprocessor's blocks, at most

// Where a cluster's warps put what they have summed up, in each of its blocks.
template <typename A, int kWarps>
struct StreamMoments {
  A pivot[kWarps], count[kWarps], sum[kWarps], squares[kWarps];
};

// A row's pivot, and the sums of its elements' deviations from it and of their squares, of what the
// lanes have summed up about their warp's pivot, which has `count` elements of the row. There is
// one barrier, since the results of one row and the next lie apart: `turn` is 0 at first.
template <bool kCluster, typename A>
__device__ __forceinline__ Pair<A> stream_moments(const OwnMoments<A>& own, A count, int cluster,
                                                  int part, int& turn, A& pivot) {
  constexpr int kWarps = kStreamThreads / 32 * (kCluster ? kMaxCluster : 1);
  __shared__ StreamMoments<A, kWarps> results[2];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  A sums[2] = {own.sum, own.squares};
  exchange_halves(sums_in_halves(sums), sums);
  if (kCluster ? lane < cluster : lane == 0) {
    const int at = part * warps + static_cast<int>(threadIdx.x) / 32;
    const auto tell = [&](A& mine, A v) {
      *(kCluster ? const_cast<A*>(in_cluster(&mine, lane)) : &mine) = v;
    };
    tell(results[turn].pivot[at], own.pivot);
    tell(results[turn].count[at], count);
    tell(results[turn].sum[at], sums[0]);
    tell(results[turn].squares[at], sums[1]);
  }
  if constexpr (kCluster) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  const StreamMoments<A, kWarps>& of = results[turn];
  pivot = of.pivot[0];
  sums[0] = sums[1] = 0;
  for (int w = lane; w < warps * cluster; w += 32) {
    A about[2];
    OwnMoments<A>{of.pivot[w], of.count[w], of.sum[w], of.squares[w]}.about(pivot, about);
    sums[0] += about[0], sums[1] += about[1];
  }
  exchange_halves(sums_in_halves(sums), sums);
  turn ^= 1;
  return {sums[0], sums[1]};
}

// A thread works on vectors that it has copied to shared memory itself. Where it has stored a chunk
// of a row's result it asks for the next row's in that place, so that reads and writes are on their
// way at once.
template <bool kCluster, int N, typename T, typename P>
__global__ void __launch_bounds__(kStreamThreads, kStreamSmThreads / kStreamThreads)
    stream_row_kernel(RowShape shape, StreamPlan plan, NormArgs<T> args, P parameters) {
  using A = acc_t<T>;
  using X = Slots<T, N, kChunk>;
  constexpr int kStep = 32 * N;
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int lot = static_cast<int>(blockDim.x) * kChunk * N;  // elements of a chunk
  const int slot_bytes = static_cast<int>(blockDim.x) / 32 * X::kBytes;
  const int cluster = kCluster ? plan.cluster : 1;
  const int part = kCluster ? static_cast<int>(blockIdx.x) % cluster : 0;
  const int own = (warp * kChunk * 32 + lane) * N;  // of a chunk
  const int column = part * plan.slice + own;
  const int mine = plan.slice - own;  // of the block's elements, those from `column` on
  unsigned char* const slots = shared + warp * X::kBytes;
  const int64_t stride = gridDim.x / cluster;
  wait_for_earlier_kernels();
  const auto ask = [&](int64_t row, int chunk) {
    const int left = mine - chunk * lot;
    const T* const from = args.x + (left > 0 ? row * shape.size + column + chunk * lot : 0);
    const X x(slots + chunk * slot_bytes);
#pragma unroll
    for (int u = 0; u < kChunk; ++u) x.ask(u, from + u * kStep, u * kStep < left);
    cp_async_commit();
  };
  int64_t row = blockIdx.x / cluster;
  if (row < shape.outer) {
#pragma unroll 1
    for (int j = 0; j < plan.chunks; ++j) ask(row, j);
  }
  if constexpr (kCluster) cluster_meet();
  const A by_size = A(1) / static_cast<A>(shape.size);
  // The warp's elements of a row: all chunks but the last are full.
  constexpr int kOfWarp = kChunk * 32 * N;
  const int full = plan.chunks - 1;
  const A count = static_cast<A>(full * kOfWarp +
                                 min(max(plan.slice - full * lot - warp * kOfWarp, 0), kOfWarp));
  int turn = 0;
  for (; row < shape.outer; row += stride) {
    OwnMoments<A> moments;
    cp_async_wait_for_all_but(plan.chunks - 1);
    moments.pivot = pivot_of<A, N>(
        [&](int u, A(&v)[N]) {
          if (u == kChunk) cp_async_wait_for_all_but(plan.chunks - 2);
          unpack(X(slots + u / kChunk * slot_bytes)[u % kChunk], v);
        },
        [&](int u) {
          return u / kChunk < plan.chunks && u % kChunk * kStep < mine - u / kChunk * lot;
        });
    moments.pivot = __shfl_sync(0xffffffffu, moments.pivot, 0);
#pragma unroll 1
    for (int j = 0; j < plan.chunks; ++j) {
      cp_async_wait_for_all_but(plan.chunks - 1 - j);
      const X x(slots + j * slot_bytes);
      const int left = mine - j * lot;
#pragma unroll
      for (int u = 0; u < kChunk; ++u) {
        A v[N];
        unpack(x[u], v);
        if (u * kStep < left) moments.add(v);
      }
    }
    A pivot;
    const Pair<A> deviations = stream_moments<kCluster>(moments, count, cluster, part, turn, pivot);
    const NormRow<A> norm =
        args.finish(threadIdx.x == 0 && part == 0, row, pivot, deviations, by_size);
    const int64_t first = parameters.first(row);
#pragma unroll 1
    for (int j = 0; j < plan.chunks; ++j) {
      const X x(slots + j * slot_bytes);
      const int left = mine - j * lot, c = column + j * lot;
      typename P::template Held<N> held[kChunk];
#pragma unroll
      for (int u = 0; u < kChunk; ++u) {
        held[u] = {};
        if (u * kStep < left) parameters.hold(first, c + u * kStep, held[u]);
      }
#pragma unroll
      for (int u = 0; u < kChunk; ++u) {
        A v[N], w[N], b[N];
        unpack(x[u], v);
        P::get(held[u], w, b);
        if (u * kStep < left) args.store(norm, w, b, row * shape.size + c + u * kStep, v);
      }
      if (row + stride < shape.outer) ask(row + stride, j);
    }
  }
  cp_async_wait<0>();
  if constexpr (kCluster) cluster_sync();  // other blocks still write results here
}

// The fewest blocks of a cluster with which a multiprocessor has two blocks, or else one; of a
// block, the threads that leave few slots idle and of which a multiprocessor has many.
template <int N, typename T>
StreamPlan plan_stream(int64_t size) {
  // Beside the dynamic shared memory there are the sums of the warps, and the system's.
  constexpr int kBeside = 8 << 10;
  const int64_t all = most_shared_memory(), most = all - kBeside;
  StreamPlan best;
  for (int cluster = 1; cluster <= (N > 1 && runs_sm90_code() ? kMaxCluster : 1); cluster *= 2) {
    if (size % (cluster * N) != 0) break;
    const int64_t slice = size / cluster, vectors = slice / N;
    StreamPlan plan;
    double best_share = 0;
    for (int threads = 128; threads <= kStreamThreads; threads += 32) {
      const int64_t chunks = ceil_div(vectors, threads * kChunk);
      const int64_t bytes = chunks * threads * kChunk * N * sizeof(T);
      const int64_t blocks =
          std::min<int64_t>(all / (bytes + kBeside / 2), kStreamSmThreads / threads);
      const double used = static_cast<double>(vectors) / (chunks * threads * kChunk);
      const double busy = std::min(1.0, threads * blocks / 1024.0);
      const double share = used * (3 + busy) / 4;
      if (bytes > most || share <= best_share) continue;
      best_share = share;
      plan = {threads,
              static_cast<int>(chunks),
              cluster,
              static_cast<int>(slice),
              static_cast<int>(bytes),
              static_cast<int>(blocks)};
    }
    if (plan.threads > 0 && (best.threads == 0 || plan.blocks > best.blocks)) best = plan;
    if (best.blocks > 1) break;
  }
  return best;
}

template <int N, typename T, typename P>
void launch_stream(cudaStream_t stream, int64_t rows, int64_t size, const StreamPlan& plan,
                   const NormArgs<T>& args, const P& parameters) {
  const auto launch = [&](auto cluster) {
    const auto kernel = stream_row_kernel<decltype(cluster)::value, N, T, P>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.bytes);
    const int64_t at_once = plan.cluster > 1 ? clusters_at_once(plan.cluster, plan.blocks)
                                             : int64_t{sm_count()} * plan.blocks;
    const int64_t rounds = ceil_div(rows, std::max<int64_t>(at_once, 1));
    const auto blocks = static_cast<unsigned>(ceil_div(rows, rounds) * plan.cluster);
    launch_early_in_clusters(kernel, blocks, plan.threads, plan.bytes, stream, plan.cluster,
                             RowShape{rows, size, 1}, plan, args, parameters);
  };
  if constexpr (N > 1) {
    if (plan.cluster > 1) return launch(std::true_type{});
  }
  launch(std::false_type{});
}

}  // namespace braze::cuda
