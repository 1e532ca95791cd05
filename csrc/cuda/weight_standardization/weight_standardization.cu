// Weight standardization: a block for each filter, which it reads once from memory and, for the
// sums that need others, again from its first-level cache. (Qiao et al., Micro-Batch Training with
// Batch-Channel Normalization and Weight Standardization, 2019)
#include "launchers/weight_standardization.h"

#include "cuda/common/ordered_sum.cuh"

namespace braze::cuda {
namespace {

const KernelEntry kEntry({"weight_standardization", "filters", "float64 float32 bfloat16 float16",
                          "sm_80+", true, "a block for each filter"});

// The sum of `v` over the block, in every thread.
template <int kThreads, typename A>
__device__ __forceinline__ A sum_for_all(A v) {
  __shared__ A sum;
  v = block_sum<kThreads>(v);
  if (threadIdx.x == 0) sum = v;
  __syncthreads();
  return sum;
}

template <typename T, typename R, int kThreads>
__global__ void __launch_bounds__(kThreads)
    standardize_kernel(const T* __restrict__ weight, const T* __restrict__ gain, acc_t<T> scale,
                       acc_t<T> eps, int64_t size, R* __restrict__ result,
                       acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd) {
  using A = acc_t<T>;
  const int64_t row = blockIdx.x;
  const T* const w = weight + row * size;
  A sum = 0;
  for (int64_t i = threadIdx.x; i < size; i += kThreads) sum += convert<A>(w[i]);
  // What rounding takes away from the mean is made up for: beside a deviation much smaller it
  // counts.
  const A pivot = sum_for_all<kThreads>(sum) / static_cast<A>(size);
  A deviations = 0, squares = 0;
  for (int64_t i = threadIdx.x; i < size; i += kThreads) {
    const A d = convert<A>(w[i]) - pivot;
    deviations += d;
    squares += d * d;
  }
  const A rest = sum_for_all<kThreads>(deviations) / static_cast<A>(size);
  __syncthreads();
  A variance = sum_for_all<kThreads>(squares) / static_cast<A>(size) - rest * rest;
  variance = variance < A(0) ? A(0) : variance;  // NaN stays
  const A by = rsqrt(variance + eps);
  if (threadIdx.x == 0) {
    mean[row] = pivot + rest;
    rstd[row] = by;
  }
  const A factor = gain ? convert<A>(gain[row]) * scale : scale;
  for (int64_t i = threadIdx.x; i < size; i += kThreads) {
    result[row * size + i] = convert<R>((convert<A>(w[i]) - pivot - rest) * by * factor);
  }
}

template <typename T, typename R, int kThreads>
__global__ void __launch_bounds__(kThreads)
    gradients_kernel(const R* __restrict__ grad, const T* __restrict__ weight,
                     const T* __restrict__ gain, acc_t<T> scale, const acc_t<T>* __restrict__ mean,
                     const acc_t<T>* __restrict__ rstd, int64_t size, T* __restrict__ dweight,
                     T* __restrict__ dgain) {
  using A = acc_t<T>;
  const int64_t row = blockIdx.x;
  const T* const w = weight + row * size;
  const R* const dy = grad + row * size;
  const A m = mean[row], by = rstd[row];
  A sum = 0, dot = 0;
  for (int64_t i = threadIdx.x; i < size; i += kThreads) {
    const A g = convert<A>(dy[i]);
    sum += g;
    dot += g * ((convert<A>(w[i]) - m) * by);
  }
  sum = sum_for_all<kThreads>(sum);
  __syncthreads();
  dot = sum_for_all<kThreads>(dot);
  if (dgain && threadIdx.x == 0) dgain[row] = convert<T>(dot * scale);
  if (!dweight) return;
  const A factor = (gain ? convert<A>(gain[row]) * scale : scale) * by;
  const A by_count = sum / static_cast<A>(size), by_xhat = dot / static_cast<A>(size);
  for (int64_t i = threadIdx.x; i < size; i += kThreads) {
    const A xhat = (convert<A>(w[i]) - m) * by;
    dweight[row * size + i] = convert<T>((convert<A>(dy[i]) - by_count - xhat * by_xhat) * factor);
  }
}

// f(weight's tag, result's tag, threads of a block).
template <typename F>
void dispatch_pair(const FiltersShape& shape, const F& f) {
  const auto with_threads = [&](auto weight, auto result) {
    if (shape.size <= 1024) return f(weight, result, std::integral_constant<int, 128>{});
    f(weight, result, std::integral_constant<int, 512>{});
  };
  dispatch(shape.dtype, [&](auto tag) {
    if constexpr (std::is_same_v<typename decltype(tag)::type, float>) {
      if (shape.result == DType::kBFloat16) return with_threads(tag, TypeTag<__nv_bfloat16>{});
      if (shape.result == DType::kFloat16) return with_threads(tag, TypeTag<__half>{});
    }
    with_threads(tag, tag);
  });
}

}  // namespace

void weight_standardization(Stream stream, const FiltersShape& shape, const void* w,
                            const void* gain, double scale, double eps, void* y, void* mean,
                            void* rstd) {
  dispatch_pair(shape, [&](auto tag, auto result, auto threads) {
    using T = typename decltype(tag)::type;
    using R = typename decltype(result)::type;
    using A = acc_t<T>;
    standardize_kernel<T, R, threads.value><<<shape.rows, threads.value, 0, as_cuda(stream)>>>(
        static_cast<const T*>(w), static_cast<const T*>(gain), static_cast<A>(scale),
        static_cast<A>(eps), shape.size, static_cast<R*>(y), static_cast<A*>(mean),
        static_cast<A*>(rstd));
    check_launch("weight_standardization");
  });
}

void weight_standardization_backward(Stream stream, const FiltersShape& shape, const void* dy,
                                     const void* w, const void* gain, double scale,
                                     const void* mean, const void* rstd, void* dw, void* dgain) {
  dispatch_pair(shape, [&](auto tag, auto result, auto threads) {
    using T = typename decltype(tag)::type;
    using R = typename decltype(result)::type;
    using A = acc_t<T>;
    gradients_kernel<T, R, threads.value><<<shape.rows, threads.value, 0, as_cuda(stream)>>>(
        static_cast<const R*>(dy), static_cast<const T*>(w), static_cast<const T*>(gain),
        static_cast<A>(scale), static_cast<const A*>(mean), static_cast<const A*>(rstd), shape.size,
        static_cast<T*>(dw), static_cast<T*>(dgain));
    check_launch("weight_standardization_backward");
  });
}

}  // namespace braze::cuda
