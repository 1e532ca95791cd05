// Schemas and CPU kernels of torch.ops.custom_op.
#include "polynomial.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

using torch::stable::Tensor;

namespace {

// Serial to be short; `torch::stable::parallel_for` spreads such a loop over torch's threads.
Tensor polynomial(const Tensor& x_any, double a, double b, double c) {
  const Polynomial p{a, b, c};
  const Tensor x = torch::stable::contiguous(x_any);
  Tensor y = torch::stable::empty_like(x);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const T* in = static_cast<const T*>(x.data_ptr());
    T* out = static_cast<T*>(y.data_ptr());
    for (int64_t i = 0; i < x.numel(); ++i) {
      out[i] = static_cast<T>(p.value(static_cast<compute_t<T>>(in[i])));
    }
  });
  return y;
}

Tensor polynomial_backward(const Tensor& grad_any, const Tensor& x_any, double a, double b,
                           double c) {
  check_backward(grad_any, x_any);
  const Polynomial p{a, b, c};
  const Tensor grad = torch::stable::contiguous(grad_any);
  const Tensor x = torch::stable::contiguous(x_any);
  Tensor dx = torch::stable::empty_like(x);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const T* in = static_cast<const T*>(x.data_ptr());
    const T* g = static_cast<const T*>(grad.data_ptr());
    T* out = static_cast<T*>(dx.data_ptr());
    for (int64_t i = 0; i < x.numel(); ++i) {
      using C = compute_t<T>;
      out[i] = static_cast<T>(static_cast<C>(g[i]) * p.derivative(static_cast<C>(in[i])));
    }
  });
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY(custom_op, m) {
  m.def("polynomial(Tensor x, float a, float b, float c) -> Tensor");
  m.def("polynomial_backward(Tensor grad, Tensor x, float a, float b, float c) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(custom_op, CPU, m) {
  m.impl("polynomial", TORCH_BOX(&polynomial));
  m.impl("polynomial_backward", TORCH_BOX(&polynomial_backward));
}
