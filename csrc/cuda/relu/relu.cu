// ReLU, memory-bound: each thread moves 16 bytes at a time, so that a warp's access is 512 bytes.
#include "launchers/relu.h"

#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
struct ReluForward {
  __device__ T operator()(T x) const {
    return convert<acc_t<T>>(x) < acc_t<T>(0) ? convert<T>(acc_t<T>(0)) : x;
  }
};

template <typename T>
struct ReluBackward {
  __device__ T operator()(T dy, T y) const {
    return convert<acc_t<T>>(y) <= acc_t<T>(0) ? convert<T>(acc_t<T>(0)) : dy;
  }
};

// out[i] = f(in[i]...): whole vectors first, the last n % N elements one by one.
template <int N, typename T, typename F, typename... In>
__global__ void elementwise_kernel(F f, T* __restrict__ out, int64_t n, const In*... in) {
  const int64_t thread = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t vectors = n / N;
  for (int64_t i = thread; i < vectors; i += stride) {
    Vec<T, N> result;
    [&](const Vec<In, N>... v) {
#pragma unroll
      for (int k = 0; k < N; ++k) result.v[k] = f(v.v[k]...);
    }(reinterpret_cast<const Vec<In, N>*>(in)[i]...);
    reinterpret_cast<Vec<T, N>*>(out)[i] = result;
  }
  for (int64_t i = vectors * N + thread; i < n; i += stride) out[i] = f(in[i]...);
}

template <typename T, typename F, typename... In>
void launch_elementwise(Stream stream, F f, T* out, int64_t n, const In*... in) {
  if (n == 0) return;
  const bool aligned = is_vec_aligned(out) && (is_vec_aligned(in) && ...);
  const int width = aligned ? kVecWidth<T> : 1;
  const int blocks = grid_stride_blocks(ceil_div(n, width), kThreads);
  if (aligned) {
    elementwise_kernel<kVecWidth<T>><<<blocks, kThreads, 0, as_cuda(stream)>>>(f, out, n, in...);
  } else {
    elementwise_kernel<1><<<blocks, kThreads, 0, as_cuda(stream)>>>(f, out, n, in...);
  }
  check_launch("relu");
}

const KernelEntry kEntry({"relu", "vectorized", "float64 float32 bfloat16 float16", "sm_80+", true,
                          "16 bytes per thread and access, grid-stride"});

}  // namespace

void relu(Stream stream, DType dtype, const void* x, void* y, int64_t n) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_elementwise(stream, ReluForward<T>{}, static_cast<T*>(y), n, static_cast<const T*>(x));
  });
}

void relu_backward(Stream stream, DType dtype, const void* dy, const void* y, void* dx, int64_t n) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_elementwise(stream, ReluBackward<T>{}, static_cast<T*>(dx), n, static_cast<const T*>(dy),
                       static_cast<const T*>(y));
  });
}

}  // namespace braze::cuda
