// The polynomial a x^3 + b x^2 + c x and its derivative, for the CPU and the CUDA kernels alike.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <stdexcept>
#include <type_traits>

#ifdef __CUDACC__
#define POLYNOMIAL_INLINE __host__ __device__ inline
#else
#define POLYNOMIAL_INLINE inline
#endif

struct Polynomial {
  double a, b, c;

  template <typename T>
  POLYNOMIAL_INLINE T value(T x) const {
    return ((T(a) * x + T(b)) * x + T(c)) * x;
  }
  template <typename T>
  POLYNOMIAL_INLINE T derivative(T x) const {
    return (3 * T(a) * x + 2 * T(b)) * x + T(c);
  }
};

// 16-bit types are computed in float.
template <typename T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls f with a zero of the C++ type that `t` holds.
template <typename F>
void dispatch(const torch::stable::Tensor& t, F f) {
  using torch::headeronly::ScalarType;
  switch (t.scalar_type()) {
    case ScalarType::Double: return f(double{});
    case ScalarType::Float: return f(float{});
    case ScalarType::BFloat16: return f(c10::BFloat16{});
    case ScalarType::Half: return f(c10::Half{});
    default: throw std::runtime_error("polynomial: expected a floating-point tensor");
  }
}

// A raw call may pass anything; nothing is read before this.
inline void check_backward(const torch::stable::Tensor& grad, const torch::stable::Tensor& x) {
  bool same = grad.dim() == x.dim() && grad.scalar_type() == x.scalar_type() &&
              grad.is_cuda() == x.is_cuda() && grad.get_device_index() == x.get_device_index();
  for (int64_t i = 0; same && i < x.dim(); ++i) same = grad.size(i) == x.size(i);
  if (!same) {
    throw std::runtime_error(
        "polynomial_backward: expected grad to have the shape, dtype and device of x");
  }
}
