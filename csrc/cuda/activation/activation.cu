// Activations, memory-bound: each thread moves 16 bytes at a time and has several loads in flight.
#include "launchers/activation.h"

#include "cuda/common/activate.cuh"
#include "cuda/common/launch.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 4;  // vectors that a thread has in flight, of two tensors half as many

// y = activation(x), or, with dy, dx = dy activation'(x) in its place: vectors of N elements, then
// the last n % N one by one.
template <typename T, int N, ActivationCode kCode, bool kBackward>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(const T* dy, const T* x, T* out, int64_t n,
                      ActivationArgs<acc_t<T>> activation) {
  using A = acc_t<T>;
  constexpr int U = kBackward ? kLoads / 2 : kLoads;
  const int64_t thread = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * kThreads, vectors = n / N;
  const auto apply = [&](auto values, auto grads) {
    constexpr int M = sizeof(values) / sizeof(T);
    A v[M];
#pragma unroll
    for (int k = 0; k < M; ++k) v[k] = convert<A>(values.v[k]);
    if constexpr (kBackward) {
      A g[M];
#pragma unroll
      for (int k = 0; k < M; ++k) g[k] = convert<A>(grads.v[k]);
      pass_back<kCode, T>(g, v, activation);
#pragma unroll
      for (int k = 0; k < M; ++k) v[k] = g[k];
    } else {
      activate<kCode, T>(v, activation);
    }
#pragma unroll
    for (int k = 0; k < M; ++k) values.v[k] = convert<T>(v[k]);
    return values;
  };
  for (int64_t i = thread; i < vectors; i += stride * U) {
    Packed<T, N> in[U], grads[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t at = i + u * stride;
      if (at < vectors) {
        in[u].load(x + at * N);
        if constexpr (kBackward) grads[u].load(dy + at * N);
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t at = i + u * stride;
      if (at < vectors) store_vec(out + at * N, apply(in[u].unpacked(), grads[u].unpacked()));
    }
  }
  if constexpr (N > 1) {
    for (int64_t i = vectors * N + thread; i < n; i += stride) {
      const Vec<T, 1> grad{kBackward ? dy[i] : x[i]};
      out[i] = apply(Vec<T, 1>{x[i]}, grad).v[0];
    }
  }
}

template <bool kBackward>
void launch(Stream stream, DType dtype, const Activation& activation, const void* dy, const void* x,
            void* out, int64_t n) {
  if (n == 0) return;
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* grad = static_cast<const T*>(dy);
    const T* in = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    const auto run = [&](auto width) {
      constexpr int N = decltype(width)::value;
      const int blocks = grid_stride_blocks(ceil_div(n, N), kThreads);
      with_activation_code<T, N>(activation, [&](auto code) {
        activation_kernel<T, N, decltype(code)::value, kBackward>
            <<<blocks, kThreads, 0, as_cuda(stream)>>>(grad, in, to, n,
                                                       ActivationArgs<acc_t<T>>(activation));
      });
    };
    const bool aligned = is_vec_aligned(in) && is_vec_aligned(to) && is_vec_aligned(grad);
    if (aligned) {
      run(std::integral_constant<int, kVecWidth<T>>{});
    } else {
      run(std::integral_constant<int, 1>{});
    }
  });
  check_launch("activation");
}

const KernelEntry kEntry({"activation", "vectorized", "float64 float32 bfloat16 float16", "sm_80+",
                          true, "16 bytes per thread and access, grid-stride"});

}  // namespace

void activation(Stream stream, DType dtype, const Activation& activation, const void* x, void* y,
                int64_t n) {
  launch<false>(stream, dtype, activation, nullptr, x, y, n);
}

void activation_backward(Stream stream, DType dtype, const Activation& activation, const void* dy,
                         const void* x, void* dx, int64_t n) {
  launch<true>(stream, dtype, activation, dy, x, dx, n);
}

}  // namespace braze::cuda
