// Sums of a matrix's columns, memory-bound: the bias gradient of a linear layer, and in the same
// pass the gradient through a ReLU that follows it. Blocks of 32 columns share out the rows; their
// partial sums are added in a fixed order, by the blocks of a cluster among themselves or by a
// second launch.
#include <climits>

#include "cuda/common/cluster_mail.cuh"
#include "cuda/common/ordered_sum.cuh"
#include "launchers/column_sum.h"

namespace braze::cuda {
namespace {

constexpr int kColumns = 32, kThreads = 512, kWarps = kThreads / 32;

enum class Finish { kDirect, kCluster, kPartials };

// finish: one block has all rows of its columns, the blocks of a cluster have, or the parts go to
// `partial`. N columns a thread, in one vector.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    column_sum_kernel(const T* x, const T* result, T* __restrict__ masked, T* __restrict__ out,
                      int64_t m, int64_t n, int splits, Finish finish,
                      acc_t<T>* __restrict__ partial) {
  wait_for_earlier_kernels();
  using Acc = acc_t<T>;
  constexpr int kLanes = kColumns / N;  // that share a row
  __shared__ __align__(16) Acc sums[kWarps][kColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int split = static_cast<int>(blockIdx.x % splits);
  const int64_t first_column = int64_t{blockIdx.x / splits} * kColumns;
  const int64_t column = first_column + lane % kLanes * N;
  const int64_t begin = m * split / splits, end = m * (split + 1) / splits;
  __shared__ ClusterMail<Acc, kColumns> mail;
  if (out && finish == Finish::kCluster) {
    const int columns = static_cast<int>(min(int64_t{kColumns}, n - first_column));
    if (split == 0 && threadIdx.x == 0) mail.expect(splits * columns);
    cluster_meet();
  }
  Acc sum[N] = {};
  if (column < n) {
#pragma unroll 4
    for (int64_t i = begin + threadIdx.x / kLanes; i < end; i += kThreads / kLanes) {
      const int64_t offset = i * n + column;
      Vec<T, N> v = *reinterpret_cast<const Vec<T, N>*>(x + offset);
      if (result) {
        const auto y = *reinterpret_cast<const Vec<T, N>*>(result + offset);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          if (convert<Acc>(y.v[k]) <= Acc(0)) v.v[k] = convert<T>(Acc(0));  // NaN passes
        }
        *reinterpret_cast<Vec<T, N>*>(masked + offset) = v;
      }
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += convert<Acc>(v.v[k]);
    }
  }
  if (!out) return;
#pragma unroll
  for (int k = 0; k < N; ++k) {
#pragma unroll
    for (int lanes = 16; lanes >= kLanes; lanes /= 2) {
      sum[k] += __shfl_xor_sync(0xffffffff, sum[k], lanes);
    }
    if (lane < kLanes) sums[warp][lane * N + k] = sum[k];
  }
  __syncthreads();
  const int mine = threadIdx.x;
  const bool has_column = mine < kColumns && first_column + mine < n;
  double total = 0;  // few terms are left, and the last chance to lose accuracy
  if (has_column) {
    for (int w = 0; w < kWarps; ++w) total += sums[w][mine];
  }
  if (finish == Finish::kPartials) {
    if (has_column) partial[split * n + first_column + mine] = static_cast<Acc>(total);
    return;
  }
  if (finish == Finish::kCluster) {
    if (has_column) mail.send(static_cast<Acc>(total), split, mine, 0);
    if (split > 0) return;
    mail.wait();
    total = 0;
    for (int s = 0; has_column && s < splits; ++s) total += mail.values[s][mine];
  }
  if (has_column) out[first_column + mine] = convert<T>(static_cast<Acc>(total));
}

struct Plan {
  int splits;
  Finish finish;
};

Plan plan(const ColumnSumArgs& args) {
  const int64_t groups = ceil_div(args.n, kColumns);
  const int64_t wanted = std::max<int64_t>(
      1, std::min(ceil_div(int64_t{sm_count()} * 4, groups), args.m / (2 * kWarps)));
  if (wanted == 1) return {static_cast<int>(wanted), Finish::kDirect};
  // Up to here a cluster is done before a second launch would have started.
  const int64_t most_rows = (args.result ? 256 : 2048) * kMaxCluster;
  if (args.m <= most_rows && runs_sm90_code()) {
    return {static_cast<int>(std::min<int64_t>(wanted, kMaxCluster)), Finish::kCluster};
  }
  return {static_cast<int>(wanted), Finish::kPartials};
}

template <typename T>
bool takes_vectors(const ColumnSumArgs& args) {
  bool aligned = args.n % kVecWidth<T> == 0;
  for (const void* p : {args.x, args.result, static_cast<const void*>(args.masked)}) {
    aligned = aligned && is_vec_aligned(p);
  }
  return aligned;
}

template <typename T, int N>
void launch(Stream stream, const ColumnSumArgs& args, void* workspace) {
  const Plan p = plan(args);
  const int64_t blocks = ceil_div(args.n, kColumns) * p.splits;
  if (blocks > INT_MAX) throw std::runtime_error("column_sum: too many columns");
  const T *const x = static_cast<const T*>(args.x), *const result =
                                                        static_cast<const T*>(args.result);
  T *const masked = static_cast<T*>(args.masked), *const out = static_cast<T*>(args.out);
  acc_t<T>* const partial = static_cast<acc_t<T>*>(workspace);
  if (p.finish == Finish::kCluster) {
    launch_clusters("column_sum", stream, column_sum_kernel<T, N>, static_cast<unsigned>(blocks),
                    kThreads, 0, p.splits, x, result, masked, out, args.m, args.n, p.splits,
                    p.finish, partial);
    return;
  }
  launch_early(column_sum_kernel<T, N>, static_cast<unsigned>(blocks), kThreads, 0, stream, x,
               result, masked, out, args.m, args.n, p.splits, p.finish, partial);
  check_launch("column_sum");
}

}  // namespace

int64_t column_sum_workspace_bytes(const ColumnSumArgs& args) {
  if (args.n == 0) return 0;
  const Plan p = plan(args);
  if (p.finish != Finish::kPartials) return 0;
  return p.splits * args.n * (args.dtype == DType::kFloat64 ? 8 : 4);
}

void column_sum(Stream stream, const ColumnSumArgs& args, void* workspace) {
  begin_column_sum(stream, args, workspace);
  finish_column_sum(stream, args, workspace);
}

void begin_column_sum(Stream stream, const ColumnSumArgs& args, void* workspace) {
  if (args.n == 0) return;
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (takes_vectors<T>(args)) {
      launch<T, kVecWidth<T>>(stream, args, workspace);
    } else {
      launch<T, 1>(stream, args, workspace);
    }
  });
}

void finish_column_sum(Stream stream, const ColumnSumArgs& args, void* workspace) {
  if (args.n == 0 || !args.out) return;
  const Plan p = plan(args);
  if (p.finish != Finish::kPartials) return;
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_ordered_sum(stream, static_cast<const acc_t<T>*>(workspace), p.splits, args.n,
                       static_cast<T*>(args.out));
  });
}

}  // namespace braze::cuda
