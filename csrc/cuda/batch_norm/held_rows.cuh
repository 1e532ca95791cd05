// Batch norm's training passes over [rows, c] as one kernel each, with one read and one write, of
// tensors that the multiprocessors' shared memory holds. As in held.cuh no grid has to wait, since
// a cluster has all that its channels' sums are of. See row_slices.cuh.
#pragma once

#include "resident_codes.cuh"
#include "row_slices.cuh"

namespace braze::cuda {

#if __CUDA_ARCH__ >= 900
// Beside the held tensors a walk may need others: load(group) asks for what belongs to a group, for
// the first one before the walk, and take() makes the last load's results those that are worked
// with. Here there are none.
struct NoHeldSide {
  __device__ __forceinline__ void load(int) {}
  __device__ __forceinline__ void take() {}
};

// A residual.
template <typename T, int U>
struct HeldResidual {
  const HeldRows<T>& rows;
  const T* residual;  // or nullptr
  Packed<T, kVecWidth<T>> now[U], next[U];

  __device__ __forceinline__ void load(int group) {
    if (!residual) return;
    rows.template each<U>(group,
                          [&](int u, int, int64_t offset) { next[u].load(residual + offset); });
  }
  __device__ __forceinline__ void take() {
#pragma unroll
    for (int u = 0; u < U; ++u) now[u] = next[u];
  }
};

// What the gradient's sums need beside dy and x. A mask's bytes are so few that a thread asks for
// all of its own at once.
template <typename T>
struct HeldGradSide {
  static constexpr int U = kBackwardCopies, kBytes = U * kMostCopyGroups;
  HeldResidual<T, U> residual;
  const uint8_t* mask;         // or nullptr
  uint8_t bytes[kBytes] = {};  // as they were loaded
  uint32_t now = 0, words[kBytes / 4] = {};

  __device__ __forceinline__ void ask() {
    residual.load(0);
    if (!mask) return;
    residual.rows.template each<kBytes>(0, [&](int u, int, int64_t offset) {
      bytes[u] = mask[static_cast<uint64_t>(offset) / kVecWidth<T>];
    });
  }
  // Once, before the walk.
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) words[i / 4] |= static_cast<uint32_t>(bytes[i]) << i % 4 * 8;
  }
  __device__ __forceinline__ void load(int group) { residual.load(group); }
  __device__ __forceinline__ void take() {
    residual.take();
    now = words[0];
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      words[i] = __funnelshift_r(words[i], i + 1 < kBytes / 4 ? words[i + 1] : 0, 8 * U);
    }
  }
  __device__ __forceinline__ uint8_t open(int u) const {
    return static_cast<uint8_t>(now >> 8 * u);
  }
};
#endif

template <typename T, ActivationCode kCode>
__global__ void __launch_bounds__(kHeldRowThreads)
    held_rows_forward_kernel(const __grid_constant__ HeldRowsPlan plan, ApplyArgs<T> args,
                             ForwardArgs forward, int64_t* batches) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kVecWidth<T>, U = kForwardCopies;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ uint64_t arrived;
  const HeldRows<T> rows(plan, in_register(shared), &arrived);
  T* const x = rows.held(0);
  if (threadIdx.x == 0) rows.expect();
  wait_for_earlier_kernels();
  // Asked for before the rows, which would be in the way.
  const int64_t channel = rows.merged_channel();
  const ChannelParameters loaded(forward, channel);
  RowMoments<T, N> moments;
  moments.start(args.x + rows.first(), rows.count(), plan.pitch);
  rows.template ask<U>({args.x});
  cluster_meet();  // the barriers are there
  NoHeldSide none;
  Packed<T, N> packed[U];
  const auto load = [&](int u, int held) { packed[u].load(x + held); };
  rows.template walk<U>(true, none, load, [&](int u, int, int64_t) { moments.add(packed[u]); });
  HeldResidual<T, U> side{rows, args.residual};
  side.load(0);
  rows.tell(moments.v, moments.pivot);
  ToldMoments told;
  ChannelStatistics<float> statistics;
  if (rows.merges()) {
    rows.each_block(
        [&](int block, const float4& v) { told.add(v, plan.rows_of(block), block == 0); });
    told.finish(plan.by_rows);
    statistics = ChannelStatistics<float>(
        told.mean, rsqrt(told.squares * plan.by_rows + forward.eps), loaded.weight, loaded.bias);
    rows.put(statistics.mean, statistics.scale, statistics.shift);
  }
  __syncthreads();
  if (rows.finishes()) {
    update_running(forward, loaded, plan.rows, told.mean, told.squares, channel);
    statistics.store(forward.statistics, channel);
    if (batches && channel == 0) ++*batches;
  }
  const auto center = rows.coefficients(0), scale = rows.coefficients(1),
             shift = rows.coefficients(2);
  rows.template walk<U>(false, side, load, [&](int u, int, int64_t offset) {
    apply_vector<kCode>(args, offset, packed[u], side.now[u], center, scale, shift);
  });
#endif
}

template <typename T, ActivationCode kCode>
__global__ void __launch_bounds__(kHeldRowThreads)
    held_rows_backward_kernel(const __grid_constant__ HeldRowsPlan plan, GradSumsArgs<T> args,
                              InputGradArgs<T> grads, BackwardArgs backward) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kVecWidth<T>, U = kBackwardCopies;
  using Coefficients = typename HeldRows<T>::Coefficients;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ uint64_t arrived;
  const HeldRows<T> rows(plan, in_register(shared), &arrived);
  T *const dy = rows.held(0), *const x = rows.held(1);
  if (threadIdx.x == 0) rows.expect();
  wait_for_earlier_kernels();
  // Asked for before the rows, which would be in the way.
  const int64_t channel = rows.merged_channel(), column = rows.column_channel();
  const GradParameters<float> loaded(backward, channel);
  const Coefficients center(args.statistics.mean, column), scale(args.statistics.scale, column),
      shift(args.statistics.shift, column);
  HeldGradSide<T> side{{rows, args.residual}, args.mask};
  side.ask();
  rows.template ask<U>({args.dy, args.x});
  cluster_meet();  // the barriers are there
  side.pack();
  float v[2 * N] = {};  // sums of the gradient, and of it times deviations
  Packed<T, N> packed_dy[U], packed_x[U];
  const auto load = [&](int u, int held) {
    packed_dy[u].load(dy + held);
    packed_x[u].load(x + held);
  };
  rows.template walk<U>(true, side, load, [&](int u, int held, int64_t offset) {
    sum_vector<kCode>(
        args, packed_dy[u], packed_x[u], side.residual.now[u], side.open(u), center, scale, shift,
        [&](const Vec<T, N>& kept) {
          store_vec(args.dresidual + offset, kept);
          store_vec(dy + held, kept);
        },
        [&](int k, float g, float product) {
          v[k] += g;
          v[N + k] += product;
        });
  });
  rows.tell(v, nullptr);
  if (rows.merges()) {
    double sum = 0, dot = 0;
    rows.each_block([&](int, const float4& of_block) {
      sum += of_block.x;
      dot += of_block.y;
    });
    const auto found =
        grad_coefficients<float>(backward, loaded, sum, dot, plan.rows, channel, rows.finishes());
    rows.put(found.by_grad, found.by_input, found.offset);
  }
  __syncthreads();
  // As the forward pass rounded it, where the value before the activation is made with it again.
  const auto by_grad = args.statistics.scale ? scale : rows.coefficients(0),
             by_input = rows.coefficients(1), constant = rows.coefficients(2);
  NoHeldSide none;
  rows.template walk<U>(false, none, load, [&](int u, int, int64_t offset) {
    kept_input_grad_vector<kCode>(args.dresidual, grads, offset, packed_dy[u], packed_x[u], center,
                                  by_grad, shift, by_input, constant);
  });
#endif
}

template <typename... Params, typename... Args>
void launch_held_rows(cudaStream_t stream, const HeldRowsPlan& plan, void (*kernel)(Params...),
                      const Args&... args) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       most_shared_memory() - kHeldRowsStatic);
  launch_early_in_clusters(kernel, plan.blocks, plan.threads, plan.bytes, stream, plan.cluster,
                           plan, args...);
}

// Bytes of a tensor below which launches one after the other are as fast.
constexpr int64_t kHeldRowsLeastBytes = 1 << 20;
// Above so many, where resident.cuh's kernels run otherwise, slices of 32 bytes are slow: of 64 x
// 1024 x 14 x 14 in bf16 with a residual 52 us forward in the place of 31 (H200).
constexpr int64_t kHeldRowsSmallBytes = 8 << 20;
constexpr HeldRowsRule kHeldRowsOfSmall{1, 0.4}, kHeldRowsOfLarge{4, 0.7};

// f(plan, integral constant code) where the kernels take a shape, and returns whether they do.
template <typename T, typename F>
bool with_held_rows(const BatchNormShape& shape, const Activation& activation, int tensors,
                    const F& f) {
  const int64_t bytes = shape.count() * shape.c * int64_t{sizeof(T)};
  if (!shape.channels_last || !runs_sm90_code()) return false;
  if (bytes < kHeldRowsLeastBytes) return false;
  const HeldRowsPlan plan = plan_held_rows<T>(
      shape, tensors, bytes < kHeldRowsSmallBytes ? kHeldRowsOfSmall : kHeldRowsOfLarge);
  if (plan.cluster == 0) return false;
  return with_ring_code(activation, [&](auto code) { f(plan, code); });
}

}  // namespace braze::cuda
