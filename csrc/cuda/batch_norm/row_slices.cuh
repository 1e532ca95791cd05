// How the blocks of a cluster hold a slice of the channels of [rows, c]: of all rows, each block a
// part, which its threads have brought to shared memory. All that these channels' sums are of is in
// the cluster; its blocks tell each other theirs.
#pragma once

#include "cuda/common/cluster_mail.cuh"
#include "cuda/common/fast_div.cuh"
#include "rows.cuh"

namespace braze::cuda {

// Of a multiprocessor, in one block or in two: one works while the other waits.
constexpr int kHeldRowThreads = 512, kMostHeldRowBlocks = 2;
constexpr int kMostSlice = 16;  // vectors: two cache lines
// Vectors of each tensor that a thread asks for in a group of copies, where one tensor is held and
// where two are, and such groups: the first are summed while the last are on their way.
constexpr int kForwardCopies = 4, kBackwardCopies = 2, kMostCopyGroups = 8;
constexpr int kHeldRowsStatic =
    128;  // bytes of shared memory that the kernels have beside the rows

struct HeldRowsPlan {
  int cluster = 0;   // blocks; 0: none is good
  int slice;         // vectors of a row that a cluster has
  int channels;      // of the slice
  int height;        // lines of a block, each for a row's slice
  int threads;       // of a block: whole warps, in fours
  int warp_lines;    // the largest power of two that a warp has
  int groups;        // of copies
  int rows;          // in all
  int least;         // of a block
  int longer;        // blocks of a cluster that have one more, the first ones
  int held_step;     // elements of a block's lines in shared memory
  int64_t pitch;     // elements from a row to the next
  int64_t row_step;  // from the row of a line to its next one
  double by_rows;
  unsigned blocks;
  FastDiv by_slice, by_cluster;
  // Bytes of shared memory: behind what the blocks tell each other the warps' sums, coefficients
  // and the tensors' rows.
  int sums_at, coefficients_at, rows_at, tensor_bytes, bytes;

  __host__ __device__ __forceinline__ int rows_of(int block) const {
    return least + (block < longer ? 1 : 0);
  }
  __device__ __forceinline__ int begin_of(int block) const {
    return block * least + min(block, longer);
  }
};

// The rows in slices of so many vectors of N elements, for clusters of so many blocks, of which a
// multiprocessor has `of_sm`: what a choice needs to know.
inline HeldRowsPlan split_held_rows(int rows, int N, int tensors, int of_sm, int slice,
                                    int cluster) {
  HeldRowsPlan plan;
  plan.cluster = cluster;
  plan.slice = slice;
  plan.channels = slice * N;
  plan.threads = kHeldRowThreads / of_sm;
  plan.height = plan.threads / slice;
  plan.rows = rows;
  plan.least = rows / cluster;
  plan.longer = rows - plan.least * cluster;
  const int lines = plan.height * (tensors == 1 ? kForwardCopies : kBackwardCopies);
  plan.groups = (plan.rows_of(0) + lines - 1) / lines;
  plan.sums_at = cluster * plan.channels * static_cast<int>(sizeof(float4));
  constexpr int kFloat = sizeof(float);
  plan.coefficients_at = plan.sums_at + plan.threads / 32 * 2 * plan.channels * kFloat;
  plan.rows_at = plan.coefficients_at + 3 * plan.channels * kFloat;
  plan.tensor_bytes = plan.rows_of(0) * slice * 16;
  plan.bytes = plan.rows_at + tensors * plan.tensor_bytes;
  return plan;
}

// And the rest.
inline void finish_plan(HeldRowsPlan& plan, int64_t channels) {
  plan.warp_lines = 1;
  while (2 * plan.warp_lines * plan.slice <= 32) plan.warp_lines *= 2;
  plan.held_step = plan.height * plan.channels;
  plan.pitch = channels;
  plan.row_step = plan.height * channels;
  plan.by_rows = 1.0 / plan.rows;
  plan.blocks = static_cast<unsigned>(channels / plan.channels * plan.cluster);
  plan.by_slice = FastDiv(plan.slice);
  plan.by_cluster = FastDiv(plan.cluster);
}

// The part that is a slice's own of the sectors that it is in; a wider one is better by a little.
inline double sectors_used(int slice) { return slice / ((slice + 1) / 2 * 2 + 0.25); }

// What a split has to be for a kernel to be ahead of the others that there are.
struct HeldRowsRule {
  int least_slice;   // vectors
  double least_use;  // of the multiprocessors
};

// What part of the GPU a split uses: so far as there are blocks for all of its multiprocessors,
// with as many rows as each other, and whole sectors of memory, of two vectors, are read. 0: it
// does not fit at once.
inline double use_of(const HeldRowsPlan& plan, int of_sm, int clusters, int at_once,
                     int multiprocessors, int memory) {
  constexpr int kSystem = 1 << 10;  // bytes of a block that the system has
  if (plan.groups > kMostCopyGroups || clusters > at_once) return 0;
  if (plan.bytes > (memory + kSystem) / of_sm - kSystem - kHeldRowsStatic) return 0;
  const double blocks = clusters * static_cast<double>(plan.rows) / plan.rows_of(0);
  return sectors_used(plan.slice) * blocks / (of_sm * multiprocessors);
}

// The split of which there is most use, and more than the rule's least.
template <typename T>
HeldRowsPlan plan_held_rows(const BatchNormShape& shape, int tensors, const HeldRowsRule& rule) {
  constexpr int N = kVecWidth<T>;
  HeldRowsPlan best;
  if (shape.c % N != 0 || shape.count() > 1 << 20 || shape.c > 1 << 20) return best;
  const int rows = static_cast<int>(shape.count()), vectors = static_cast<int>(shape.c / N);
  const int memory = most_shared_memory(), multiprocessors = sm_count();
  const int largest = std::min(kMaxCluster, rows);
  double most = rule.least_use;
  for (int of_sm = 1; of_sm <= kMostHeldRowBlocks; ++of_sm) {
    int at_once[kMaxCluster + 1];
    for (int c = 2; c <= largest; ++c) at_once[c] = clusters_at_once(c, of_sm);
    for (int slice = std::min(kMostSlice, vectors); slice >= rule.least_slice; --slice) {
      if (vectors % slice != 0 || sectors_used(slice) <= most) continue;
      for (int cluster = 2; cluster <= largest; ++cluster) {
        const HeldRowsPlan plan = split_held_rows(rows, N, tensors, of_sm, slice, cluster);
        const double use =
            use_of(plan, of_sm, vectors / slice, at_once[cluster], multiprocessors, memory);
        if (use <= most) continue;
        most = use;
        best = plan;
      }
    }
  }
  if (best.cluster > 0) finish_plan(best, shape.c);
  return best;
}

#if __CUDA_ARCH__ >= 900
// A block's rows of its cluster's slice, and a thread's part of them: one vector of a row's slice,
// of every row that its line comes to. Lines of threads are as long as the slice.
template <typename T>
class HeldRows {
 public:
  static constexpr int N = kVecWidth<T>;
  using Coefficients = PerElement<float, N, false>;

  __device__ __forceinline__ HeldRows(const HeldRowsPlan& plan, unsigned char* shared,
                                      uint64_t* arrived)
      : plan_(plan),
        arrived_(arrived),
        mail_(reinterpret_cast<float4*>(shared)),
        sums_(reinterpret_cast<float*>(shared + plan.sums_at)),
        coefficients_(reinterpret_cast<float*>(shared + plan.coefficients_at)),
        rows_at_(shared + plan.rows_at) {
    const int line = plan.by_slice.div(static_cast<int>(threadIdx.x), column_);
    const int group = plan.by_cluster.div(static_cast<int>(blockIdx.x), rank_);
    channel_ = int64_t{group} * plan.channels;
    // The last threads may have no whole line.
    end_ = line < plan.height ? plan.rows_of(rank_) : 0;
    line_ = line;
  }

  // A tensor's rows in shared memory.
  __device__ __forceinline__ T* held(int tensor) const {
    return reinterpret_cast<T*>(rows_at_ + tensor * plan_.tensor_bytes);
  }
  // The thread's vector of the block's first row, whatever its line.
  __device__ __forceinline__ int64_t first() const {
    return plan_.begin_of(rank_) * plan_.pitch + column_channel();
  }
  __device__ __forceinline__ int64_t column_channel() const { return channel_ + column_ * N; }
  __device__ __forceinline__ int count() const { return plan_.rows_of(rank_); }

  // f(u, held, offset) for U of the thread's vectors, those of a group: their places in shared
  // memory and in the tensor.
  template <int U, typename F>
  __device__ __forceinline__ void each(int group, const F& f) const {
    const int row = line_ + group * U * plan_.height;
    const int held = static_cast<int>(threadIdx.x) * N + group * U * plan_.held_step;
    const int64_t offset = first() + row * plan_.pitch;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (row + u * plan_.height < end_) {
        f(u, held + u * plan_.held_step, offset + u * plan_.row_step);
      }
    }
  }

  // Asks for all of the thread's vectors: it is the one that reads them.
  template <int U, int kTensors>
  __device__ __forceinline__ void ask(const T* const (&from)[kTensors]) const {
#pragma unroll 1
    for (int group = 0; group < plan_.groups; ++group) {
      each<U>(group, [&](int, int held, int64_t offset) {
#pragma unroll
        for (int t = 0; t < kTensors; ++t) {
          cp_async<16>(this->held(t) + held, from[t] + offset, true);
        }
      });
      cp_async_commit();
    }
  }
  // load(u, held) for all vectors of a group, then f(u, held, offset), for all groups; as they
  // arrive where `arriving`.
  template <int U, typename Side, typename Load, typename F>
  __device__ __forceinline__ void walk(bool arriving, Side& side, const Load& load,
                                       const F& f) const {
#pragma unroll 1
    for (int group = 0; group < plan_.groups; ++group) {
      side.take();
      if (group + 1 < plan_.groups) side.load(group + 1);
      if (arriving) cp_async_wait_for_all_but(plan_.groups - 1 - group);
      each<U>(group, [&](int u, int held, int64_t) { load(u, held); });
      each<U>(group, f);
    }
  }

  // One thread, before the cluster meets.
  __device__ __forceinline__ void expect() const { expect_mail(arrived_, plan_.sums_at); }
  // Adds up each v over the block's lines and tells all blocks of the cluster, with the block's
  // pivots where it has some: after it the threads that merge() can see what all have told.
  __device__ __forceinline__ void tell(float (&v)[2 * N], const float* pivots) const {
    sum_warp(v);
    if (pivots && static_cast<int>(threadIdx.x) < plan_.slice) {
#pragma unroll
      for (int k = 0; k < N; ++k) coefficients_[threadIdx.x * N + k] = pivots[k];
    }
    __syncthreads();
    if (!merges()) return;
    float4 told{0, 0, 0, pivots ? coefficients_[threadIdx.x] : 0};
    const int channel = static_cast<int>(threadIdx.x);
    int turn;
    plan_.by_slice.div(32, turn);
    const float* from = sums_ + channel % N * plan_.slice;
    int place = channel / N;  // of the column among a warp's sums
#pragma unroll 1
    for (int warp = 0; warp < plan_.threads / 32; warp += 4) {
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        told.x += from[place];
        told.y += from[N * plan_.slice + place];
        from += 2 * plan_.channels;
        place -= turn;
        if (place < 0) place += plan_.slice;
      }
    }
    const float4* const to = mail_ + rank_ * plan_.channels + threadIdx.x;
#pragma unroll 1
    for (int block = 0; block < plan_.cluster; ++block) send_mail(told, to, arrived_, block);
    mbarrier_wait(arrived_, 0);
  }

  // Whether the thread makes what follows from a channel's sums, and that channel, or another one
  // that there is.
  __device__ __forceinline__ bool merges() const {
    return static_cast<int>(threadIdx.x) < plan_.channels;
  }
  __device__ __forceinline__ int64_t merged_channel() const {
    return channel_ + min(static_cast<int>(threadIdx.x), plan_.channels - 1);
  }
  // Whether it is the only one of the cluster that does.
  __device__ __forceinline__ bool finishes() const { return merges() && rank_ == 0; }
  // f(block, what it told of the channel) for the cluster's blocks, in order.
  template <typename F>
  __device__ __forceinline__ void each_block(const F& f) const {
#pragma unroll 2
    for (int r = 0; r < plan_.cluster; ++r) f(r, mail_[r * plan_.channels + threadIdx.x]);
  }
  // Three coefficients of the merged channel, and those of the thread's column behind a barrier.
  __device__ __forceinline__ void put(float first, float second, float third) const {
    coefficients_[threadIdx.x] = first;
    coefficients_[plan_.channels + threadIdx.x] = second;
    coefficients_[2 * plan_.channels + threadIdx.x] = third;
  }
  __device__ __forceinline__ Coefficients coefficients(int i) const {
    return Coefficients(coefficients_ + i * plan_.channels, column_ * N);
  }

 private:
  // Leaves the sums of v over a warp's lines in sums_, [warp][v][vector], the vector that the
  // warp's first lane has first. The lines are a power of two, after those beyond it have been
  // added to the first ones. Then each of two lines gives the other half of its sums, and so on: a
  // lane ends up with those of every warp_lines-th v, in fewer exchanges than with all of them.
  __device__ __forceinline__ void sum_warp(float (&v)[2 * N]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, line = plan_.by_slice.div(lane);
    const int whole = plan_.warp_lines * plan_.slice;
    if (whole < 32) {
#pragma unroll
      for (int k = 0; k < 2 * N; ++k) {
        const float beyond = __shfl_down_sync(kAll, v[k], whole);
        if (lane + whole < 32) v[k] += beyond;
      }
    }
    give_halves<2 * N>(v, lane, line, 1);
    float* const to = sums_ + threadIdx.x / 32 * 2 * plan_.channels;
#pragma unroll
    for (int k = 0; k < 2 * N; ++k) {
      const int place = k * whole + lane;
      if (lane < whole && place < 2 * plan_.channels) to[place] = v[k];
    }
  }

  // Of kLeft sums for each lane; `lines` already have theirs together.
  template <int kLeft>
  __device__ __forceinline__ void give_halves(float (&v)[2 * N], int lane, int line,
                                              int lines) const {
    for (; lines < plan_.warp_lines; lines *= 2) {
      const bool odd = line & lines;
      const int away = lines * plan_.slice, other = odd ? lane - away : lane + away;
      if constexpr (kLeft == 1) {
        v[0] += __shfl_sync(kAll, v[0], other);
      } else {
#pragma unroll
        for (int k = 0; k < kLeft / 2; ++k) {
          const float given = odd ? v[2 * k] : v[2 * k + 1], kept = odd ? v[2 * k + 1] : v[2 * k];
          v[k] = kept + __shfl_sync(kAll, given, other);
        }
        return give_halves<kLeft / 2>(v, lane, line, 2 * lines);
      }
    }
  }

  static constexpr unsigned kAll = 0xffffffffu;
  const HeldRowsPlan& plan_;
  uint64_t* arrived_;  // all that the blocks tell
  float4* mail_;       // [block][channel]
  float* sums_;
  float* coefficients_;  // [coefficient][channel], before that pivots
  unsigned char* rows_at_;
  int line_, column_, rank_, end_;
  int64_t channel_;  // the slice's first
};

#endif

}  // namespace braze::cuda
