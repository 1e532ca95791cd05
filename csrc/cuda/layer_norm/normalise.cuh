// Forward passes over rows, for layer norm and group norm, whose parameters belong to other
// elements: one read of x, one write of y.
//
// P, the parameters, has
//   int64_t first(int64_t row)                where those of a row begin
//   template <int N> Held                     what is kept of those of N elements
//   hold(int64_t first, int64_t c, Held<N>&)  those from c on of a row
//   get(Held<N>&, A (&weight)[N], A (&bias)[N])
//   kFixed                                    whether they are the same for all rows
//   kWidest                                   team for rows in registers; longer ones are streamed
//   kLong                                     whether a thread has room for those of 64 elements
#pragma once

#include "ahead.cuh"
#include "cuda/common/cluster.cuh"

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

  // sums: of the deviations from the pivot, and of their squares. `first`: the thread that keeps
  // the statistics.
  __device__ __forceinline__ NormRow<A> finish(bool first, int64_t row, A pivot, Pair<A> sums,
                                               A by_size) const {
    const A rest = sums.first * by_size;
    A variance = sums.second * by_size - rest * rest;
    variance = variance < A(0) ? A(0) : variance;  // NaN stays
    const A scale = rsqrt(variance + eps);
    if (first) {
      mean[row] = pivot + rest;
      rstd[row] = scale;
    }
    return {pivot, scale, -rest * scale};
  }

  // y of N elements v, those at `at`, with their weights and biases.
  template <int N>
  __device__ __forceinline__ void store(const NormRow<A>& norm, const A (&w)[N], const A (&b)[N],
                                        int64_t at, A (&v)[N]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      v[k] = ((v[k] - norm.pivot) * norm.rstd + norm.shift) * w[k] + b[k];
    }
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

// Of a block of teams of up to as many threads, and how many blocks a multiprocessor has.
constexpr int kHeldThreads = 256;
constexpr int kHeldBlocks = 2;
// Rows on their way to each team: 64 KB a multiprocessor.
constexpr int held_ahead(int bytes) { return bytes > 64 ? 1 : 2; }  // bytes: of a thread
constexpr int kLongVectors = 8;  // of the longest rows, which stay in shared memory

constexpr int held_threads(int width) { return width == kTeamOfWarps ? kWidestTeam : kHeldThreads; }

template <int kWidth, int N, int kVectors, typename T, typename P>
__global__ void __launch_bounds__(held_threads(kWidth),
                                  kHeldThreads* kHeldBlocks / held_threads(kWidth))
    held_row_kernel(RowShape shape, int width, NormArgs<T> args, P parameters) {
  using A = acc_t<T>;
  using X = Slots<T, N, kVectors>;
  constexpr int kAhead = held_ahead(kVectors * N * sizeof(T));
  constexpr bool kLong = kVectors * N > 32;
  extern __shared__ __align__(16) unsigned char shared[];
  const TeamPlace<kWidth> place(width);
  unsigned char* const slots = shared + place.warp() * (kAhead + 1) * X::kBytes;
  const int size = static_cast<int>(shape.size), step = place.lanes * N;
  const int column = place.template first_vector<kVectors>() * N;
  const A by_size = A(1) / static_cast<A>(size);
  wait_for_earlier_kernels();
  const auto ask = [&](int64_t row, int stage) {
    const int left = row < shape.outer ? size - column : 0;
    const T* const from = args.x + (left > 0 ? row * size + column : 0);
    const X x(slots + stage * X::kBytes);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) x.ask(u, from + u * step, u * step < left);
  };
  typename P::template Held<N> held[kVectors];
  const auto hold = [&](int64_t first) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      held[u] = {};
      if (column + u * step < size) parameters.hold(first, column + u * step, held[u]);
    }
  };
  const auto start = [&] {
    if constexpr (P::kFixed) hold(parameters.first(0));
  };
  int turn = 0;
  for_each_row_in_slots<kAhead>(
      shape.outer, int64_t{blockIdx.x} * place.teams(), int64_t{gridDim.x} * place.teams(),
      place.team(), ask, start, [&](int64_t row, int stage) {
        const int left = row < shape.outer ? size - column : 0;
        Packed<T, N> x[kLong ? 1 : kVectors];
        const X from(slots + stage * X::kBytes);
        const auto values = [&](int u, A(&v)[N]) {
          if constexpr (kLong) {
            unpack(from.again(u), v);
          } else {
            unpack(x[u], v);
          }
        };
        A total[1] = {};
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          if constexpr (!kLong) x[u] = from[u];  // zeros past the row's end
          A v[N];
          values(u, v);
#pragma unroll
          for (int k = 0; k < N; ++k) total[0] += v[k];
        }
        if constexpr (!P::kFixed) {
          if (left > 0) hold(parameters.first(row));
        }
        team_sums(total, place, turn);
        const A pivot = quotient(total[0], static_cast<A>(size), by_size);
        Pair<A> deviations{0, 0};
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          A v[N];
          values(u, v);
          if (column + u * step < size) add_deviations(deviations, v, pivot);
        }
        A sums[2] = {deviations.first, deviations.second};
        team_sums(sums, place, turn);
        const NormRow<A> norm =
            args.finish(left == size, row, pivot, Pair<A>{sums[0], sums[1]}, by_size);
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          A v[N], w[N], b[N];
          values(u, v);
          P::get(held[u], w, b);
          if (u * step < left) args.store(norm, w, b, row * size + column + u * step, v);
        }
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

// How a row, or a block's slice of one, is shared out among a block's threads where it stays in
// shared memory, chunk by chunk of kChunk vectors a thread, until it is finished.
struct StreamPlan {
  int threads = 0;  // 0: too long
  int chunks;       // of a slice
  int cluster;      // blocks that have a row together, a slice each
  int slice;        // elements
  int bytes;        // of shared memory
  int blocks;       // of a multiprocessor
};

constexpr int kChunk = 2;
constexpr int chunks_ahead(bool cluster) { return cluster ? 4 : 2; }
constexpr int kStreamThreads = 384;     // at most
constexpr int kStreamSmThreads = 1152;  // of a multiprocessor's blocks, at most

// The sums of kValues values over the blocks of a cluster, or over one block.
template <bool kCluster, int kValues, typename A>
__device__ __forceinline__ void stream_sums(A (&v)[kValues], int cluster, int part, int& turn) {
  constexpr int kWarps = kStreamThreads / 32;
  __shared__ A results[2][kValues][kWarps * (kCluster ? kMaxCluster : 1)];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const auto shuffle = [&] {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) v[i] += __shfl_xor_sync(0xffffffffu, v[i], offset);
    }
  };
  shuffle();
  if (kCluster ? lane < cluster : lane == 0) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      A* const mine = &results[turn][i][part * warps + warp];
      *(kCluster ? const_cast<A*>(in_cluster(mine, lane)) : mine) = v[i];
    }
  }
  if constexpr (kCluster) {
    cluster_sync();
  } else {
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    v[i] = 0;
    for (int w = lane; w < warps * cluster; w += 32) v[i] += results[turn][i][w];
  }
  shuffle();
  turn ^= 1;
}

// Rows in shared memory: a thread works on vectors that it has copied there itself, and asks for
// chunks_ahead() chunks beyond the one that it adds up, those of its next rows among them.
template <bool kCluster, int N, typename T, typename P>
__global__ void __launch_bounds__(kStreamThreads, kStreamSmThreads / kStreamThreads)
    stream_row_kernel(RowShape shape, StreamPlan plan, NormArgs<T> args, P parameters) {
  using A = acc_t<T>;
  using X = Slots<T, N, kChunk>;
  constexpr int kStep = 32 * N, kChunksAhead = chunks_ahead(kCluster);
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int lot = static_cast<int>(blockDim.x) * kChunk * N;  // elements of a chunk
  const int slot_bytes = static_cast<int>(blockDim.x) / 32 * X::kBytes;
  const int cluster = kCluster ? plan.cluster : 1;
  const int part = kCluster ? static_cast<int>(blockIdx.x) % cluster : 0;
  const int own = (warp * kChunk * 32 + lane) * N;  // of a chunk
  const int column = part * plan.slice + own;
  const int mine = plan.slice - own;  // of the block's elements, those from `column` on
  unsigned char* const ring = shared + warp * X::kBytes;
  unsigned char* const ring_end = ring + (plan.chunks + kChunksAhead) * slot_bytes;
  const auto following = [&](unsigned char* slot) {
    return slot + slot_bytes == ring_end ? ring : slot + slot_bytes;
  };
  const int64_t stride = gridDim.x / cluster;
  wait_for_earlier_kernels();
  int64_t row = blockIdx.x / cluster, asked_row = row;
  int asked = 0;  // chunks of that row
  unsigned char* to = ring;
  const auto ask = [&] {
    const int left = asked_row < shape.outer ? mine - asked * lot : 0;
    const T* const from = args.x + (left > 0 ? asked_row * shape.size + column + asked * lot : 0);
    const X x(to);
#pragma unroll
    for (int u = 0; u < kChunk; ++u) x.ask(u, from + u * kStep, u * kStep < left);
    cp_async_commit();
    to = following(to);
    if (++asked == plan.chunks) asked = 0, asked_row += stride;
  };
#pragma unroll 1
  for (int i = 0; i < kChunksAhead; ++i) ask();
  if constexpr (kCluster) cluster_meet();
  const A size = static_cast<A>(shape.size), by_size = A(1) / size;
  int turn = 0;
  unsigned char* start = ring;
  // f(slots, elements from the chunk's first one of this thread on to the slice's end)
  const auto each = [&](const auto& f) {
    unsigned char* at = start;
    int left = mine;
#pragma unroll 1
    for (int j = 0; j < plan.chunks; ++j) {
      f(X(at), left);
      left -= lot;
      at = following(at);
    }
    return at;
  };
  for (; row < shape.outer; row += stride) {
    A total[1] = {};
    each([&](const X& x, int) {
      ask();
      cp_async_wait<kChunksAhead>();
#pragma unroll
      for (int u = 0; u < kChunk; ++u) {
        A v[N];
        unpack(x[u], v);  // zeros past the row's end
#pragma unroll
        for (int k = 0; k < N; ++k) total[0] += v[k];
      }
    });
    stream_sums<kCluster>(total, cluster, part, turn);
    const A pivot = quotient(total[0], size, by_size);
    Pair<A> deviations{0, 0};
    each([&](const X& x, int left) {
#pragma unroll
      for (int u = 0; u < kChunk; ++u) {
        A v[N];
        unpack(x[u], v);
        if (u * kStep < left) add_deviations(deviations, v, pivot);
      }
    });
    A sums[2] = {deviations.first, deviations.second};
    stream_sums<kCluster>(sums, cluster, part, turn);
    const NormRow<A> norm =
        args.finish(threadIdx.x == 0 && part == 0, row, pivot, Pair<A>{sums[0], sums[1]}, by_size);
    const int64_t first = parameters.first(row);
    start = each([&](const X& x, int left) {
      typename P::template Held<N> held[kChunk];
      const int c = column + mine - left;
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
    });
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
      const int64_t bytes = (chunks + chunks_ahead(cluster > 1)) * threads * kChunk * N * sizeof(T);
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
    // How many clusters run at once is not known, so that each has one row.
    const int64_t most = plan.cluster > 1 ? rows : int64_t{sm_count()} * plan.blocks;
    const auto blocks = static_cast<unsigned>(std::min(rows, most) * plan.cluster);
    launch_early_in_clusters(kernel, blocks, plan.threads, plan.bytes, stream, plan.cluster,
                             RowShape{rows, size, 1}, plan, args, parameters);
  };
  if constexpr (N > 1) {
    if (plan.cluster > 1) return launch(std::true_type{});
  }
  launch(std::false_type{});
}

// Rows that shared memory does not hold: a block reads them twice, the second time as far as may be
// from the L2 cache.
template <int N, typename T, typename P>
__global__ void __launch_bounds__(kMaxTeamThreads)
    long_row_kernel(RowShape shape, NormArgs<T> args, P parameters) {
  using A = acc_t<T>;
  const A by_size = A(1) / static_cast<A>(shape.size);
  for_each_row<Team::kBlock>(shape, 1, [&](const RowPart& part) {
    A pivot;
    const Pair<A> total = sum_about_first<Team::kBlock, N>(part, args.x, pivot);
    const NormRow<A> norm = args.finish(part.rank == 0, part.row, pivot, total, by_size);
    const int64_t first = parameters.first(part.row);
    part.template for_each<N>([&](int64_t c, int64_t offset) {
      A v[N], w[N], b[N];
      load_acc<N>(args.x + offset, v);
      typename P::template Held<N> held;
      parameters.hold(first, c, held);
      P::get(held, w, b);
      args.store(norm, w, b, offset, v);
    });
  });
}

constexpr int kLongRowBlocks = 32;  // of a multiprocessor, at most

template <int N, typename T, typename P>
AheadPlan plan_held(int64_t size) {
  const auto plan = [&](std::initializer_list<int> held) {
    return plan_ahead<N>(
        size / N, P::kWidest, held, most_shared_memory() - 1024, [](int) { return kHeldThreads; },
        [](int, int vectors, int threads) {
          const int64_t bytes = int64_t{vectors} * N * sizeof(T);
          return bytes * threads * (held_ahead(static_cast<int>(bytes)) + 1);
        });
  };
  const AheadPlan result = plan({3, 4});
  if constexpr (P::kLong && N > 1) {
    if (result.width == 0) return plan({kLongVectors});
  }
  return result;
}

// long_parameters: the same, for rows that are not held in registers.
template <int N, typename T, typename P, typename Long>
void launch_rows(cudaStream_t stream, int64_t rows, int64_t size, const NormArgs<T>& args,
                 const P& parameters, const Long& long_parameters) {
  const RowShape shape{rows, size, 1};
  const AheadPlan plan = plan_held<N, T, P>(size);
  if (plan.width > 0) {
    const int64_t most = int64_t{sm_count()} * (plan.width > kHeldThreads ? 1 : kHeldBlocks);
    const auto grid =
        static_cast<unsigned>(std::min(ceil_div(rows, plan.threads / plan.width), most));
    return dispatch_ahead<N, P::kWidest, 3, 4, kLongVectors>(plan, [&](auto width, auto vectors) {
      constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
      constexpr bool kLong = kVectors == kLongVectors * kVectorScale<N>;
      if constexpr (!kLong || (P::kLong && kWidth == kTeamOfWarps)) {
        const auto kernel = held_row_kernel<kWidth, N, kVectors, T, P>;
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.bytes);
        launch_early(kernel, grid, plan.threads, plan.bytes, stream, shape, plan.width, args,
                     parameters);
      }
    });
  }
  const StreamPlan streamed = plan_stream<N, T>(size);
  if (streamed.threads > 0) {
    return launch_stream<N>(stream, rows, size, streamed, args, long_parameters);
  }
  if constexpr (P::kFixed || N == 1) {  // of groups in vectors is_too_long() has said so before
    const auto grid = static_cast<unsigned>(std::min(rows, int64_t{sm_count()} * kLongRowBlocks));
    long_row_kernel<N><<<grid, kMaxTeamThreads, 0, stream>>>(shape, args, long_parameters);
  }
}

}  // namespace braze::cuda
