// A strided 1 x 1 convolution's input gradient that is added to another one, for the batch norm
// that made the input (Conv2dNormGrad): the pass that spreads the product's pixels goes down the
// rows as batch norm's own sums do (batch_norm/rows.cuh), and leaves these.
#pragma once

#include "cuda/batch_norm/rows.cuh"
#include "strided.cuh"

namespace braze::cuda::pointwise {

template <typename T>
struct NormGradArgs {
  const T *small, *added, *before;
  const uint8_t* mask;  // or nullptr, as in im2col/norm_grad.cuh
  T* dx;
  BatchNormStatistics statistics;
  float low, high;  // of a clamp
};

template <typename T, int N>
__global__ void __launch_bounds__(kMostRowThreads)
    add_pixels_norm_kernel(const __grid_constant__ Grids g, NormGradArgs<T> args, RowPlan plan,
                           GradPartial<float>* __restrict__ partials) {
  constexpr int U = kRowLoads / 2;
  __shared__ RowTotals<float, 2, N> shared;
  wait_for_earlier_kernels();
  const RowWorker<N> me(plan, blockIdx.x);
  const int64_t step = plan.vectors * N, first = me.begin * step + me.channel;
  float v[2][N] = {};  // sums of the gradient, and of it times deviations
  if (me.works) {
    using Coefficients = PerElement<float, N, false>;
    const Coefficients center(args.statistics.mean, me.channel);
    const Coefficients scale(args.statistics.scale, me.channel);
    const Coefficients shift(args.statistics.shift, me.channel);
    for (int64_t row = me.line; row < me.rows; row += int64_t{plan.height} * U) {
      Packed<T, N> added[U], before[U], small[U];
      uint8_t open[U];
      bool counts[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t r = row + u * plan.height, offset = first + r * step;
        if (r >= me.rows) continue;
        added[u].load(args.added + offset);
        before[u].load(args.before + offset);
        if (args.mask) open[u] = args.mask[offset / N];
        const int64_t pixel = g.small_pixel_of(static_cast<int>(me.begin + r));
        counts[u] = pixel >= 0;
        if (counts[u]) small[u].load(args.small + pixel * step + me.channel);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t r = row + u * plan.height;
        if (r >= me.rows) break;
        const Vec<T, N> other = added[u].unpacked(), z = before[u].unpacked();
        Vec<T, N> own{}, kept;
        if (counts[u]) own = small[u].unpacked();
#pragma unroll
        for (int k = 0; k < N; ++k) {
          // Rounded as it is stored.
          const T all = counts[u]
                            ? convert<T>(convert<float>(other.v[k]) + convert<float>(own.v[k]))
                            : other.v[k];
          const float deviation = convert<float>(z.v[k]) - center[k];
          float grad = convert<float>(all);
          grad = args.mask ? (open[u] >> k & 1 ? grad : 0.0f)
                           : through_clamp(grad, normalized(deviation, scale[k], shift[k]),
                                           args.low, args.high);
          kept.v[k] = convert<T>(grad);
          v[0][k] += grad;
          v[1][k] += grad * deviation;
        }
        store_vec(args.dx + first + r * step, kept);
      }
    }
  }
  float totals[2];
  row_totals(v, totals, shared, plan);
  for_my_total<N>(plan, [&](int64_t channel) {
    partials[channel * plan.parts + blockIdx.x] = {totals[0], totals[1]};
  });
}

}  // namespace braze::cuda::pointwise
