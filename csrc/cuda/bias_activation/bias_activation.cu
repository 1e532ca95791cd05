// activation(x + bias), memory-bound. Bytes per element of 16 bits: forward 4, backward 6, the
// bias' gradient included, which is summed from the values that dx is rounded from.
#include "launchers/bias_activation.h"

#include "cuda/common/channel_grads.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

const KernelEntry kEntry({"bias_activation", "rows", "float64 float32 bfloat16 float16", "sm_80+",
                          true, "a thread for a vector of channels"});

template <typename T, int N, ActivationCode kCode>
__global__ void __launch_bounds__(kMostRowThreads)
    row_bias_activation_kernel(const T* x, T* y, const void* biases, DType dtype, RowPlan plan,
                               ActivationArgs<acc_t<T>> activation) {
  using A = acc_t<T>;
  constexpr int U = kRowLoads;
  const RowWorker<N> me(plan, blockIdx.x);
  if (!me.works) return;
  const int64_t step = plan.vectors * N, first = me.begin * step + me.channel;
  A bias[N];
  load_parameters(bias, biases, dtype, me.channel);
  for (int64_t row = me.line; row < me.rows; row += int64_t{plan.height} * U) {
    Packed<T, N> packed[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * plan.height;
      if (r < me.rows) packed[u].load(x + first + r * step);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * plan.height;
      if (r >= me.rows) break;
      A v[N];
      unpack(packed[u], v);
#pragma unroll
      for (int k = 0; k < N; ++k) v[k] += bias[k];
      activate<kCode, T>(v, activation);
      store_as(y + first + r * step, v);
    }
  }
}

// dx = dy activation'(x + bias), which is what it adds to the bias' gradient, too.
template <typename T, ActivationCode kCode>
struct BiasGrads {
  ActivationArgs<acc_t<T>> activation;

  template <typename A, int N>
  __device__ __forceinline__ void operator()(A (&grad)[N], const A (&value)[N], const A (&bias)[N],
                                             A (&term)[N]) const {
    A v[N];
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = value[k] + bias[k];
    pass_back<kCode, T>(grad, v, activation);
#pragma unroll
    for (int k = 0; k < N; ++k) term[k] = grad[k];
  }
};

}  // namespace

void bias_activation(Stream stream, const BiasActivationShape& shape, const Activation& activation,
                     const void* x, const void* bias, void* y) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    const auto run = [&](auto width) {
      constexpr int N = decltype(width)::value;
      const RowPlan plan = plan_row_pass(shape.rows, shape.channels / N);
      with_activation_code<T, N>(activation, [&](auto code) {
        row_bias_activation_kernel<T, N, decltype(code)::value>
            <<<plan.grid(), plan.threads, 0, as_cuda(stream)>>>(
                in, out, bias, shape.bias, plan, ActivationArgs<acc_t<T>>(activation));
      });
    };
    with_width<T>(shape.channels, run, in, out);
  });
  check_launch("bias_activation");
}

int64_t bias_activation_workspace_bytes(const BiasActivationShape& shape) {
  return channel_grads_workspace_bytes(shape.channels);
}

void bias_activation_backward(Stream stream, const BiasActivationShape& shape,
                              const Activation& activation, const void* dy, const void* x,
                              const void* bias, void* dx, void* dbias, void* workspace) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* grad = static_cast<const T*>(dy);
    const T* value = static_cast<const T*>(x);
    T* to = static_cast<T*>(dx);
    const auto run = [&](auto width) {
      constexpr int N = decltype(width)::value;
      with_activation_code<T, N>(activation, [&](auto code) {
        launch_channel_grads<N>(
            as_cuda(stream), shape.rows, shape.channels, grad, value, to, bias, dbias, shape.bias,
            workspace, BiasGrads<T, decltype(code)::value>{ActivationArgs<acc_t<T>>(activation)});
      });
    };
    with_width<T>(shape.channels, run, grad, value, to);
  });
}

}  // namespace braze::cuda
