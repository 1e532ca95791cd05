#include "launchers/bias_activation.h"

#include <algorithm>

#include "cpu/common/activate.h"
#include "cpu/common/channel_grads.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

constexpr int64_t kGrainElements = 8192;  // of a task

const KernelEntry kEntry({"bias_activation", "simd", "float64 float32 bfloat16 float16", "cpu",
                          true, "by way of a buffer in the cache; threaded over rows"});

// f(tag of x, tag of the bias).
template <typename F>
void dispatch_types(const BiasActivationShape& shape, const F& f) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_parameter<T>(shape.bias, [&](auto bias) { f(tag, bias); });
  });
}

// Calls f(offset, count, buffer) on many threads for chunks of rows, x + bias being in the buffer.
template <typename T, typename Bias, typename F>
void for_each_sum(const BiasActivationShape& shape, const T* x, const Bias* bias, const F& f) {
  using A = acc_t<T>;
  const int64_t grain = ceil_div(kGrainElements, shape.channels);
  parallel_for(0, shape.rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      for_each_chunk(shape.channels, [&](int64_t begin, int64_t count) {
        const int64_t offset = row * shape.channels + begin;
        A v[kChunk];
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) v[j] = A(x[offset + j]) + A(bias[begin + j]);
        f(offset, count, v);
      });
    }
  });
}

}  // namespace

void bias_activation(Stream, const BiasActivationShape& shape, const Activation& activation,
                     const void* x, const void* bias, void* y) {
  dispatch_types(shape, [&](auto tag, auto parameter) {
    using T = typename decltype(tag)::type;
    using Bias = typename decltype(parameter)::type;
    for_each_sum(shape, static_cast<const T*>(x), static_cast<const Bias*>(bias),
                 [&](int64_t offset, int64_t count, acc_t<T>* v) {
                   activate(activation, v, v, count);
                   T* to = static_cast<T*>(y) + offset;
#pragma omp simd
                   for (int64_t j = 0; j < count; ++j) to[j] = T(v[j]);
                 });
  });
}

// The gradients go through the workspace, unrounded, to the sums.
void bias_activation_backward(Stream, const BiasActivationShape& shape,
                              const Activation& activation, const void* dy, const void* x,
                              const void* bias, void* dx, void* dbias, void* workspace) {
  dispatch_types(shape, [&](auto tag, auto parameter) {
    using T = typename decltype(tag)::type;
    using Bias = typename decltype(parameter)::type;
    using A = acc_t<T>;
    A* const kept = static_cast<A*>(workspace);
    for_each_sum(shape, static_cast<const T*>(x), static_cast<const Bias*>(bias),
                 [&](int64_t offset, int64_t count, const A* v) {
                   A grad[kChunk];
                   const T* from = static_cast<const T*>(dy) + offset;
#pragma omp simd
                   for (int64_t j = 0; j < count; ++j) grad[j] = A(from[j]);
                   pass_back(activation, v, grad, grad, count);
                   if (kept) std::copy(grad, grad + count, kept + offset);
                   if (!dx) return;
                   T* to = static_cast<T*>(dx) + offset;
#pragma omp simd
                   for (int64_t j = 0; j < count; ++j) to[j] = T(grad[j]);
                 });
    if (dbias) {
      channel_sums(
          shape.rows, shape.channels, 1, [&](int64_t i) { return kept[i]; },
          [&](int64_t c, double sum) { static_cast<Bias*>(dbias)[c] = Bias(A(sum)); });
    }
  });
}

// The gradient before the activation in the accumulation type.
int64_t bias_activation_workspace_bytes(const BiasActivationShape& shape) {
  return shape.rows * shape.channels * (shape.dtype == DType::kFloat64 ? 8 : 4);
}

}  // namespace braze::cpu
