// What cross_entropy and nll_loss share: labels, the sum over rows, the launch.
#pragma once

#include "cross_entropy.h"
#include "kernels/softmax/row_team.cuh"

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

// The gradient that reaches a row's loss before reduction.
template <typename T>
__device__ acc_t<T> row_gradient(const LossArgs& args, const void* grad_output,
                                 const void* total_weight, int64_t row) {
  if (args.reduction == Reduction::kNone) return load_loss<T>(args, grad_output, row);
  const acc_t<T> grad = load_loss<T>(args, grad_output, 0);
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
  if (thread == 0) {
    for (int w = 1; w < warps; ++w) v = AddPairs{}(v, warp_sums[w]);
  }
  return v;
}

// One thread writes the reduced loss from the sums of row losses and row weights.
template <typename T>
__device__ void store_reduced(const LossArgs& args, Pair<double> sum, void* loss,
                              void* total_weight) {
  const bool mean = args.reduction == Reduction::kMean;
  store_loss<T>(args, loss, 0, mean ? sum.first / sum.second : sum.first);
  *static_cast<acc_t<T>*>(total_weight) = static_cast<acc_t<T>>(mean ? sum.second : 1.0);
}

// The end of a forward kernel: `mine` is this thread's sum of row losses and weights. One block
// finishes the reduction itself; several leave partial sums to reduce_partials_kernel.
template <typename T>
__device__ void reduce_rows(const LossArgs& args, Pair<double> mine, void* loss, void* total_weight,
                            Pair<double>* partials) {
  const bool first = threadIdx.x == 0 && threadIdx.y == 0;
  if (args.reduction == Reduction::kNone) {
    if (first && blockIdx.x == 0) *static_cast<acc_t<T>*>(total_weight) = acc_t<T>(1);
    return;
  }
  const Pair<double> sum = block_sum(mine);
  if (!first) return;
  if (gridDim.x == 1) {
    store_reduced<T>(args, sum, loss, total_weight);
  } else {
    partials[blockIdx.x] = sum;
  }
}

template <typename T>
__global__ void reduce_partials_kernel(LossArgs args, const Pair<double>* partials, int count,
                                       void* loss, void* total_weight) {
  Pair<double> mine{0, 0};
  for (int i = threadIdx.x; i < count; i += blockDim.x) mine = AddPairs{}(mine, partials[i]);
  const Pair<double> sum = block_sum(mine);
  if (threadIdx.x == 0) store_reduced<T>(args, sum, loss, total_weight);
}

constexpr int kMaxPartials = 2048;

// Few short rows: one block of all threads, so that the reduction needs no second launch. Else as
// many blocks as there are partial sums for.
inline TeamLaunch choose_loss_team(const LossArgs& args, int vector) {
  TeamLaunch launch = choose_team(args.shape, vector);
  launch.grid = std::max(1, std::min(launch.grid, kMaxPartials));  // no rows: mean is NaN, sum 0
  if (launch.team == Team::kLanes && args.shape.rows() <= 1024 && args.shape.size <= 64) {
    constexpr int kPasses = 4;  // over the rows, at most
    while (launch.lanes > 1 && args.shape.rows() * launch.lanes > kPasses * kMaxTeamThreads) {
      launch.lanes /= 2;
    }
    launch.block = dim3(kMaxTeamThreads);
    launch.grid = 1;
  }
  return launch;
}

}  // namespace braze::cuda
