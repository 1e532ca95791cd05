// Batch norm's training passes over [rows, c] as one kernel each: sums, a barrier for the grid,
// what follows from them, a second barrier, and the pass that writes. See row_ring.cuh.
#pragma once

#include "cuda/common/grid_sync.cuh"
#include "resident_codes.cuh"
#include "row_ring.cuh"

namespace braze::cuda {

// Vectors of each tensor that a thread has in a slot: 32 KB of the forward pass's one tensor, and
// of the backward pass's two.
constexpr int kForwardVectors = 4, kBackwardVectors = 2;

template <typename T>
RingPlan plan_resident(const BatchNormShape& shape, bool backward) {
  return plan_ring(shape.count(), shape.c / kVecWidth<T>, backward ? 2 : 1,
                   backward ? kBackwardVectors : kForwardVectors);
}

// Bytes of a tensor below which launches one after the other are as fast.
constexpr int64_t kResidentBytes = 3 << 20;

template <typename T>
bool takes_resident(const BatchNormShape& shape, bool backward, int64_t least_bytes) {
  constexpr int N = kVecWidth<T>;
  return !std::is_same_v<T, double> && shape.channels_last && shape.c % N == 0 &&
         shape.c / N <= kRingThreads &&
         shape.count() * shape.c * int64_t{sizeof(T)} >= least_bytes && runs_sm90_code() &&
         plan_resident<T>(shape, backward).slots >= kLeastSlots;
}

#if __CUDA_ARCH__ >= 900
// Whole tensors' moments, of the blocks'.
template <typename A>
__device__ void merge_ring_moments(const RingPlan& plan, const RingPartials<3>& partials,
                                   const ForwardArgs& forward, double by_count) {
  const auto origin = [&](int64_t c) { return static_cast<double>(*partials.at(0, 0, c)); };
  merge_ring<3>(
      partials, [&](int64_t c) { return ChannelParameters(forward, c); },
      [&](int64_t c, double(&sums)[2], const float(&v)[3], int block) {
        // The spread of the pivots bounds what the squares about one of them are more.
        const double rows = plan.rows_of(block), delta = v[0] - origin(c);
        sums[0] += v[1] + delta * rows;
        sums[1] += v[2] + delta * (2.0 * v[1] + delta * rows);
      },
      [&](int64_t c, const double(&sums)[2], const ChannelParameters& loaded) {
        const double offset = sums[0] * by_count;
        batch_coefficients<A>(forward, loaded, static_cast<double>(plan.rows), origin(c) + offset,
                              sums[1] - sums[0] * offset, c);
      });
}

template <typename T, int N>
struct ResidualSide {
  const RingPlan& plan;
  const RingWorker& me;
  const T* residual;  // or nullptr
  StageVectors<T, N, kForwardVectors> now, next;

  __device__ __forceinline__ void load(const RingRows& rows) {
    if (residual) next.load(plan, me, rows.count, residual + rows.first * N);
  }
  __device__ __forceinline__ void take() { now = next; }
};

// What the gradient's sums need beside dy and x.
template <typename T, int N>
struct GradSide {
  const RingPlan& plan;
  const RingWorker& me;
  const T* residual;  // or nullptr
  const uint8_t* mask;
  StageVectors<T, N, kBackwardVectors> now, next;
  uint8_t open[kBackwardVectors], next_open[kBackwardVectors];

  __device__ __forceinline__ void load(const RingRows& rows) {
    if (residual) next.load(plan, me, rows.count, residual + rows.first * N);
    if (!mask) return;
    me.each_slot<kBackwardVectors>(
        plan, rows.count, [&](int u, int vector) { next_open[u] = mask[rows.first + vector]; });
  }
  __device__ __forceinline__ void take() {
    now = next;
#pragma unroll
    for (int u = 0; u < kBackwardVectors; ++u) open[u] = next_open[u];
  }
};
#endif

template <typename T, ActivationCode kCode>
__global__ void __launch_bounds__(kRingThreads, 1)
    resident_forward_kernel(const __grid_constant__ RingPlan plan, ApplyArgs<T> args,
                            ForwardArgs forward, RingPartials<3> partials, double by_count,
                            int64_t* batches) {
#if __CUDA_ARCH__ >= 900
  using A = acc_t<T>;
  constexpr int N = kVecWidth<T>, kCount = kForwardVectors;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ RingSlots slots;
  const RowRing<T, 1> ring(plan, shared, slots, {args.x});
  if (batches && blockIdx.x == 0 && threadIdx.x == 0) ++*batches;
  const RingWorker me(plan);
  const int64_t channel = me.works ? int64_t{me.column} * N : 0;
  StageVectors<T, N, kCount> x;
  {
    RowMoments<T, N> moments;
    bool started = false;
    NoSide side;
    ring.walk_forwards({args.x}, side, [&](const RingRows& rows) {
      const T* const from = ring.vectors(rows.slot, 0);
      x.load(plan, me, rows.count, from);
      if (!started) moments.start(from + channel, rows.count, plan.vectors * N);
      started = true;
      me.each<kCount>(plan, rows.count, [&](int u, int) { moments.add(x.v[u]); });
    });
    tree_sums(plan, me, moments.v, reinterpret_cast<A*>(shared + plan.ring_bytes()));
    if (me.line == 0) {
      partials.template store<N>(0, channel, moments.pivot);
      partials.template store<N>(1, channel, moments.v);
      partials.template store<N>(2, channel, moments.v + N);
    }
  }
  grid_sync();
  merge_ring_moments<A>(plan, partials, forward, by_count);
  grid_sync();
  using Coefficients = PerElement<A, N, false>;
  const Coefficients center(args.statistics.mean, channel), scale(args.statistics.scale, channel),
      shift(args.statistics.shift, channel);
  ResidualSide<T, N> side{plan, me, args.residual};
  ring.walk_backwards({args.x}, side, [&](const RingRows& rows) {
    x.load(plan, me, rows.count, ring.vectors(rows.slot, 0));
    if (!me.works) return;
    me.each_slot<kCount>(plan, rows.count, [&](int u, int vector) {
      apply_vector<kCode>(args, (rows.first + vector) * N, x.v[u], side.now.v[u], center, scale,
                          shift);
    });
  });
#endif
}

template <typename T, ActivationCode kCode>
__global__ void __launch_bounds__(kRingThreads, 1)
    resident_backward_kernel(const __grid_constant__ RingPlan plan, GradSumsArgs<T> args,
                             InputGradArgs<T> grads, BackwardArgs backward,
                             RingPartials<2> partials) {
#if __CUDA_ARCH__ >= 900
  using A = acc_t<T>;
  constexpr int N = kVecWidth<T>, kCount = kBackwardVectors;
  using Coefficients = PerElement<A, N, false>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ RingSlots slots;
  const RowRing<T, 2> ring(plan, shared, slots, {args.dy, args.x});
  const RingWorker me(plan);
  const int64_t channel = me.works ? int64_t{me.column} * N : 0;
  const Coefficients center(args.statistics.mean, channel), shift(args.statistics.shift, channel);
  StageVectors<T, N, kCount> dy, x;
  {
    const Coefficients scale(args.statistics.scale, channel);
    A v[2 * N] = {};  // sums of the gradient, and of it times deviations
    GradSide<T, N> side{plan, me, args.residual, args.mask};
    ring.walk_forwards({args.dy, args.x}, side, [&](const RingRows& rows) {
      T* const kept_dy = ring.vectors(rows.slot, 0);
      dy.load(plan, me, rows.count, kept_dy);
      x.load(plan, me, rows.count, ring.vectors(rows.slot, 1));
      me.each<kCount>(plan, rows.count, [&](int u, int vector) {
        sum_vector<kCode>(
            args, dy.v[u], x.v[u], side.now.v[u], side.open[u], center, scale, shift,
            [&](const Vec<T, N>& kept) {
              store_vec(args.dresidual + (rows.first + vector) * N, kept);
              store_vec(kept_dy + vector * N, kept);
            },
            [&](int k, A g, A product) {
              v[k] += g;
              v[N + k] += product;
            });
      });
      if (args.dresidual) fence_async_proxy();  // the copy engine may overwrite it
    });
    tree_sums(plan, me, v, reinterpret_cast<A*>(shared + plan.ring_bytes()));
    if (me.line == 0) {
      partials.template store<N>(0, channel, v);
      partials.template store<N>(1, channel, v + N);
    }
  }
  if (args.dresidual) fence_async_proxy_everywhere();  // the copy engine reads it
  grid_sync();
  merge_ring<2>(
      partials, [&](int64_t c) { return GradParameters<A>(backward, c); },
      [&](int64_t, double(&sums)[2], const float(&v)[2], int) {
        sums[0] += v[0];
        sums[1] += v[1];
      },
      [&](int64_t c, const double(&sums)[2], const GradParameters<A>& loaded) {
        store_coefficients(
            grad_coefficients<A>(backward, loaded, sums[0], sums[1], plan.rows, c, true),
            args.statistics, c, grads.coefficients);
      });
  grid_sync();
  if (args.dresidual) fence_async_proxy_everywhere();
  const Coefficients by_grad(grads.coefficients.by_grad, channel),
      by_input(grads.coefficients.by_input, channel), constant(grads.coefficients.offset, channel);
  NoSide side;
  ring.walk_backwards({grads.dy, args.x}, side, [&](const RingRows& rows) {
    dy.load(plan, me, rows.count, ring.vectors(rows.slot, 0));
    x.load(plan, me, rows.count, ring.vectors(rows.slot, 1));
    if (!me.works) return;
    me.each_slot<kCount>(plan, rows.count, [&](int u, int vector) {
      kept_input_grad_vector<kCode>(args.dresidual, grads, (rows.first + vector) * N, dy.v[u],
                                    x.v[u], center, by_grad, shift, by_input, constant);
    });
  });
#endif
}

}  // namespace braze::cuda
