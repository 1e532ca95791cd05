// What ops with one parameter per channel share, over [rows, channels]: a thread keeps to a vector
// of channels, whose parameters are in registers, and walks down the rows (batch_norm/rows.cuh).
// The backward makes dx and the parameter's gradient in one pass: each block leaves a sum per
// channel, which a small kernel adds up. No atomics: bitwise repeatable.
#pragma once

#include "cuda/batch_norm/layout.cuh"

namespace braze::cuda {

// Those of N neighbouring channels.
template <int N, typename A>
__device__ __forceinline__ void load_parameters(A (&v)[N], const void* values, DType dtype,
                                                int64_t channel) {
  const auto load = [&](const auto* from) {
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = convert<A>(from[channel + k]);
  };
  switch (dtype) {
    case DType::kFloat64: return load(static_cast<const double*>(values));
    case DType::kFloat32: return load(static_cast<const float*>(values));
    case DType::kBFloat16: return load(static_cast<const __nv_bfloat16*>(values));
    case DType::kFloat16: return load(static_cast<const __half*>(values));
  }
}

// f(grad, value, parameter, term) turns N elements of dy into those of dx and gives what they add
// to the parameter's gradient. dx and partials may be nullptr.
template <typename In, typename Out, int N, typename F>
__global__ void __launch_bounds__(kMostRowThreads)
    channel_grads_kernel(const Out* dy, const In* x, In* dx, const void* parameters, DType dtype,
                         RowPlan plan, acc_t<In>* partials, F f) {
  using A = acc_t<In>;
  constexpr int U = kRowLoads / 2;
  __shared__ RowTotals<A, 1, N> shared;
  const RowWorker<N> me(plan, blockIdx.x);
  const int64_t step = plan.vectors * N, first = me.begin * step + me.channel;
  A sum[1][N] = {};
  if (me.works) {
    A parameter[N];
    load_parameters(parameter, parameters, dtype, me.channel);
    for (int64_t row = me.line; row < me.rows; row += int64_t{plan.height} * U) {
      Packed<Out, N> packed_grad[U];
      Packed<In, N> packed_value[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t r = row + u * plan.height;
        if (r < me.rows) {
          packed_grad[u].load(dy + first + r * step);
          packed_value[u].load(x + first + r * step);
        }
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t r = row + u * plan.height;
        if (r >= me.rows) break;
        A grad[N], value[N], term[N];
        unpack(packed_grad[u], grad);
        unpack(packed_value[u], value);
        f(grad, value, parameter, term);
#pragma unroll
        for (int k = 0; k < N; ++k) sum[0][k] += term[k];
        if (dx) store_as(dx + first + r * step, grad);
      }
    }
  }
  if (!partials) return;
  A total[1];
  row_totals(sum, total, shared, plan);
  for_my_total<N>(plan,
                  [&](int64_t channel) { partials[channel * plan.parts + blockIdx.x] = total[0]; });
}

template <typename A>
__global__ void __launch_bounds__(kCoefficientThreads)
    sum_partials_kernel(int64_t channels, const A* partials, int parts, void* result, DType dtype) {
  for_each_channel(channels, [&](int64_t c) {
    double sum = 0;
    for_each_item<32, 9>(partials + c * parts, parts, [&](A part) { sum += part; });
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) store_value(result, dtype, c, sum);
  });
}

// Narrow tiles, as plan_row_sums has them, but two blocks for each multiprocessor: the kernels of
// vectors of 16 bytes take 64 registers at most, so that both are there at once, and one computes
// while the other waits.
constexpr int kGradBlocks = 2;
inline RowPlan plan_channel_grads(int64_t rows, int64_t vectors) {
  return plan_rows(rows, vectors, 32, 1, kGradBlocks);
}
inline int64_t channel_grads_workspace_bytes(int64_t channels) {
  return int64_t{sm_count()} * kGradBlocks * channels * sizeof(double);
}

// dparameters of `dtype`, which the parameters have too, or nullptr.
template <int N, typename In, typename Out, typename F>
void launch_channel_grads(cudaStream_t stream, int64_t rows, int64_t channels, const Out* dy,
                          const In* x, In* dx, const void* parameters, void* dparameters,
                          DType dtype, void* workspace, const F& f) {
  using A = acc_t<In>;
  const RowPlan plan = plan_channel_grads(rows, channels / N);
  A* const partials = dparameters ? static_cast<A*>(workspace) : nullptr;
  channel_grads_kernel<In, Out, N>
      <<<plan.grid(), plan.threads, 0, stream>>>(dy, x, dx, parameters, dtype, plan, partials, f);
  check_launch("channel_grads");
  if (!dparameters) return;
  sum_partials_kernel<<<coefficient_blocks(channels), kCoefficientThreads, 0, stream>>>(
      channels, static_cast<const A*>(partials), plan.parts, dparameters, dtype);
  check_launch("sum_partials");
}

// Calls f(N): 16 bytes of elements T where channels and addresses allow it, else 1.
template <typename T, typename F, typename... Pointers>
void with_width(int64_t channels, const F& f, Pointers... pointers) {
  constexpr int kWidth = kVecWidth<T>;
  if (channels % kWidth == 0 && (is_vec_aligned(pointers) && ...)) {
    return f(std::integral_constant<int, kWidth>{});
  }
  f(std::integral_constant<int, 1>{});
}

}  // namespace braze::cuda
