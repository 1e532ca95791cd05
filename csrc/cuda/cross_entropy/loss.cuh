// What cross_entropy and nll_loss share: labels, the sum over rows, the launch.
#pragma once

#include "launchers/cross_entropy.h"
#include "cuda/common/cluster_mail.cuh"
#include "cuda/softmax/row_team.cuh"

namespace braze::cuda {

// {1, the label} once a label was out of range. A module variable: one per device, zero at load,
// and no allocation that a graph capture could meet.
__device__ long long label_error[2];

__device__ inline void report_label(int64_t label) {
  const auto flag = reinterpret_cast<unsigned long long*>(label_error);
  if (atomicCAS(flag, 0ull, 1ull) == 0) label_error[1] = label;
}

enum class LabelState { kCounted, kIgnored, kInvalid };

struct Label {
  int64_t value;
  LabelState state;
};

__device__ inline Label read_label(const LossArgs& args, int64_t row) {
  const int64_t value = args.target_kind == TargetKind::kUint8
                            ? static_cast<const uint8_t*>(args.target)[row]
                            : static_cast<const int64_t*>(args.target)[row];
  if (value == args.ignore_index) return {value, LabelState::kIgnored};
  const bool valid = value >= 0 && value < args.shape.size;
  return {value, valid ? LabelState::kCounted : LabelState::kInvalid};
}

template <typename A>
__device__ A class_weight(const LossArgs& args, int64_t c) {
  return args.weight == nullptr ? A(1) : static_cast<const A*>(args.weight)[c];
}

// Element i of a loss-shaped array, which holds T or acc_t<T>.
template <typename T>
__device__ acc_t<T> load_loss(const LossArgs& args, const void* p, int64_t i) {
  if (args.loss_is_acc) return static_cast<const acc_t<T>*>(p)[i];
  return convert<acc_t<T>>(static_cast<const T*>(p)[i]);
}

template <typename T, typename Value>
__device__ void store_loss(const LossArgs& args, void* p, int64_t i, Value value) {
  if (args.loss_is_acc) {
    static_cast<acc_t<T>*>(p)[i] = static_cast<acc_t<T>>(value);
  } else {
    static_cast<T*>(p)[i] = convert<T>(value);
  }
}

// The gradient that reaches a row's loss before reduction; grad_output may be null for 1.
template <typename T>
__device__ acc_t<T> row_gradient(const LossArgs& args, const void* grad_output,
                                 const void* total_weight, int64_t row) {
  if (args.reduction == Reduction::kNone) return load_loss<T>(args, grad_output, row);
  const acc_t<T> grad = grad_output ? load_loss<T>(args, grad_output, 0) : acc_t<T>(1);
  return args.reduction == Reduction::kMean ? grad / *static_cast<const acc_t<T>*>(total_weight)
                                            : grad;
}

// The block's sum, valid in thread 0.
__device__ inline Pair<double> block_sum(Pair<double> v) {
  __shared__ Pair<double> warp_sums[kMaxTeamThreads / 32];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int warps = blockDim.x * blockDim.y / 32;
  v = team_reduce<Team::kLanes>(v, 32, AddPairs{});
  if (thread % 32 == 0) warp_sums[thread / 32] = v;
  __syncthreads();
  if (thread < 32) {
    v = thread < warps ? warp_sums[thread] : Pair<double>{0, 0};
    v = team_reduce<Team::kLanes>(v, 32, AddPairs{});
  }
  return v;
}

template <typename T>
__device__ acc_t<T> divisor_of(const LossArgs& args, Pair<double> sum) {
  return args.reduction == Reduction::kMean ? static_cast<acc_t<T>>(sum.second) : acc_t<T>(1);
}

// One thread writes the reduced loss from the sums of row losses and row weights.
template <typename T>
__device__ void store_reduced(const LossArgs& args, Pair<double> sum, void* loss,
                              void* total_weight) {
  const bool mean = args.reduction == Reduction::kMean;
  store_loss<T>(args, loss, 0, mean ? sum.first / sum.second : sum.first);
  *static_cast<acc_t<T>*>(total_weight) = divisor_of<T>(args, sum);
}

// How the blocks of a launch come to one sum.
enum class Meeting { kBlock, kCluster, kPartials };

using LossMail = ClusterMail<Pair<double>, 1>;

// The end of a forward kernel: `mine` is this thread's sum of row losses and weights. One block, or
// a cluster that is the whole grid (whose `mail` expects a value of each block, where it is that of
// the first block or where there is a weight), finishes the reduction itself; other blocks leave
// partial sums to reduce_partials_kernel. `weight`, unless null, is in shared memory; it gets the
// divisor of the losses, where the reduction is finished here, for all of the block to read.
template <typename T>
__device__ void reduce_rows(const LossArgs& args, Meeting meeting, Pair<double> mine, void* loss,
                            void* total_weight, Pair<double>* partials, LossMail* mail = nullptr,
                            acc_t<T>* weight = nullptr) {
  const bool first = threadIdx.x == 0 && threadIdx.y == 0;
  if (args.reduction == Reduction::kNone) {
    if (first && blockIdx.x == 0) *static_cast<acc_t<T>*>(total_weight) = acc_t<T>(1);
    return;
  }
  Pair<double> sum = block_sum(mine);
  if (meeting == Meeting::kPartials) {
    if (first) partials[blockIdx.x] = sum;
    return;
  }
  if (meeting == Meeting::kCluster && first) {
    const int blocks = static_cast<int>(gridDim.x), receivers = weight ? blocks : 1;
    for (int to = 0; to < receivers; ++to) mail->send(sum, static_cast<int>(blockIdx.x), 0, to);
    if (blockIdx.x == 0 || weight) {
      mail->wait();
      sum = mail->values[0][0];
      for (int i = 1; i < blocks; ++i) sum = AddPairs{}(sum, mail->values[i][0]);
    }
  }
  if (weight) {
    if (first) *weight = divisor_of<T>(args, sum);
    __syncthreads();  // the others need not wait for the loss, a division
  }
  if (first && blockIdx.x == 0) store_reduced<T>(args, sum, loss, total_weight);
}

template <typename T>
__global__ void reduce_partials_kernel(LossArgs args, const Pair<double>* partials, int count,
                                       void* loss, void* total_weight) {
  wait_for_earlier_kernels();
  Pair<double> mine{0, 0};
  for (int i = threadIdx.x; i < count; i += blockDim.x) mine = AddPairs{}(mine, partials[i]);
  const Pair<double> sum = block_sum(mine);
  if (threadIdx.x == 0) store_reduced<T>(args, sum, loss, total_weight);
}

constexpr int kMaxPartials = 2048;

struct LossLaunch : TeamLaunch {
  Meeting meeting;
};

inline Meeting meeting_of(const LossArgs& args, int blocks, bool clustered) {
  if (blocks == 1 || args.reduction == Reduction::kNone) return Meeting::kBlock;
  return clustered ? Meeting::kCluster : Meeting::kPartials;
}

// Few short rows: one block, or one cluster of blocks, so that the reduction needs no second
// launch. Else as many blocks as there are partial sums for.
inline LossLaunch choose_loss_team(const LossArgs& args, int vector) {
  LossLaunch launch{choose_team(args.shape, vector), Meeting::kPartials};
  launch.grid = std::max(1, std::min(launch.grid, kMaxPartials));  // no rows: mean is NaN, sum 0
  const int64_t rows = args.shape.rows();
  bool clustered = false;
  if (launch.team == Team::kLanes && args.shape.size <= 64) {
    const int most = runs_sm90_code() ? kMaxCluster : 1;
    int lanes = launch.lanes;
    // One block meets nobody, which saves more than narrower teams cost.
    while (lanes > 4 && rows * lanes > kMaxTeamThreads && rows * 4 <= kMaxTeamThreads) lanes /= 2;
    while (lanes > 2 && rows * lanes > int64_t{most} * kMaxTeamThreads) lanes /= 2;
    if (rows * lanes <= int64_t{most} * kMaxTeamThreads) {
      launch.lanes = lanes;
      launch.block = dim3(kMaxTeamThreads);
      launch.grid = static_cast<int>(std::max<int64_t>(1, ceil_div(rows * lanes, kMaxTeamThreads)));
      clustered = true;
    }
  }
  launch.meeting = meeting_of(args, launch.grid, clustered);
  return launch;
}

}  // namespace braze::cuda
