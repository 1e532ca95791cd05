// CUDA kernels of torch.ops.custom_op.
#include "polynomial.h"

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>

// Declared here because torch's header shows it only with USE_CUDA defined.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

using torch::stable::Tensor;

namespace {

// Grid-stride loops: any number of elements, any grid.
template <typename T>
__global__ void value_kernel(Polynomial p, const T* x, T* y, int64_t n) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += stride) {
    y[i] = static_cast<T>(p.value(static_cast<compute_t<T>>(x[i])));
  }
}

template <typename T>
__global__ void derivative_kernel(Polynomial p, const T* grad, const T* x, T* dx, int64_t n) {
  using C = compute_t<T>;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += stride) {
    dx[i] = static_cast<T>(static_cast<C>(grad[i]) * p.derivative(static_cast<C>(x[i])));
  }
}

constexpr int kThreads = 256;

int blocks_for(int64_t n) {
  return static_cast<int>(std::min<int64_t>((n + kThreads - 1) / kThreads, 65535));
}

// Kernels run on the tensor's device, in the stream that torch uses there at the moment.
cudaStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

void check_launch() {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("polynomial: ") + cudaGetErrorString(error));
  }
}

Tensor polynomial(const Tensor& x_any, double a, double b, double c) {
  const torch::stable::accelerator::DeviceGuard guard(x_any.get_device_index());
  const Tensor x = torch::stable::contiguous(x_any);
  Tensor y = torch::stable::empty_like(x);
  const int64_t n = x.numel();
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    if (n == 0) return;
    value_kernel<<<blocks_for(n), kThreads, 0, current_stream(x)>>>(
        Polynomial{a, b, c}, static_cast<const T*>(x.data_ptr()), static_cast<T*>(y.data_ptr()), n);
    check_launch();
  });
  return y;
}

Tensor polynomial_backward(const Tensor& grad_any, const Tensor& x_any, double a, double b,
                           double c) {
  check_backward(grad_any, x_any);
  const torch::stable::accelerator::DeviceGuard guard(x_any.get_device_index());
  const Tensor grad = torch::stable::contiguous(grad_any);
  const Tensor x = torch::stable::contiguous(x_any);
  Tensor dx = torch::stable::empty_like(x);
  const int64_t n = x.numel();
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    if (n == 0) return;
    derivative_kernel<<<blocks_for(n), kThreads, 0, current_stream(x)>>>(
        Polynomial{a, b, c}, static_cast<const T*>(grad.data_ptr()),
        static_cast<const T*>(x.data_ptr()), static_cast<T*>(dx.data_ptr()), n);
    check_launch();
  });
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(custom_op, CUDA, m) {
  m.impl("polynomial", TORCH_BOX(&polynomial));
  m.impl("polynomial_backward", TORCH_BOX(&polynomial_backward));
}
