// Activations on a thread's vector of elements.
#pragma once

#include "numeric.cuh"
#include "launchers/common/activation.h"

namespace braze::cuda {

struct DeviceMath {
  static __device__ float exp(float v) { return ::expf(v); }
  static __device__ double exp(double v) { return ::exp(v); }
  static __device__ float expm1(float v) { return ::expm1f(v); }
  static __device__ double expm1(double v) { return ::expm1(v); }
  static __device__ float erf(float v) { return ::erff(v); }
  static __device__ double erf(double v) { return ::erf(v); }
  static __device__ float tanh(float v) { return ::tanhf(v); }
  static __device__ double tanh(double v) { return ::tanh(v); }
};

// An Activation in the accumulation type.
template <typename A>
struct ActivationArgs {
  ActivationKind kind;
  A first, second;

  explicit ActivationArgs(const Activation& activation)
      : kind(activation.kind),
        first(static_cast<A>(activation.first)),
        second(static_cast<A>(activation.second)) {}
};

// As many values as a call returns in registers.
template <typename A, int N>
struct Values {
  A v[N];
};
template <typename A, int N>
constexpr int kValues = N * sizeof(A) < 16 ? N : 16 / sizeof(A);

// Not inlined: a kernel would have the code of every kind once for each element of a thread's
// vectors. A call costs a few instructions per element, which these kernels wait for memory with.
template <typename A, int N>
__device__ __noinline__ Values<A, N> smooth_values(Values<A, N> values, ActivationKind kind,
                                                   A first, A second) {
  Smooth<A, DeviceMath>::with(kind, [&](auto function, auto) {
#pragma unroll
    for (int k = 0; k < N; ++k) values.v[k] = function(values.v[k], first, second);
  });
  return values;
}

// grads[k] * f'(values[k]).
template <typename A, int N>
__device__ __noinline__ Values<A, N> smooth_grads(Values<A, N> grads, Values<A, N> values,
                                                  ActivationKind kind, A first, A second) {
  Smooth<A, DeviceMath>::with(kind, [&](auto, auto slope) {
#pragma unroll
    for (int k = 0; k < N; ++k) grads.v[k] *= slope(values.v[k], first, second);
  });
  return grads;
}

template <bool kSmooth, typename A, int N>
__device__ __forceinline__ void activate(A (&v)[N], const ActivationArgs<A>& activation) {
  if constexpr (kSmooth) {
    constexpr int M = kValues<A, N>;
#pragma unroll
    for (int begin = 0; begin < N; begin += M) {
      Values<A, M> part;
#pragma unroll
      for (int k = 0; k < M; ++k) part.v[k] = v[begin + k];
      part = smooth_values(part, activation.kind, activation.first, activation.second);
#pragma unroll
      for (int k = 0; k < M; ++k) v[begin + k] = part.v[k];
    }
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = clamped(v[k], activation.first, activation.second);
  }
}

// grad[k] becomes the gradient before the activation, v[k] being the value before it.
template <bool kSmooth, typename A, int N>
__device__ __forceinline__ void pass_back(A (&grad)[N], const A (&v)[N],
                                          const ActivationArgs<A>& activation) {
  if constexpr (kSmooth) {
    constexpr int M = kValues<A, N>;
#pragma unroll
    for (int begin = 0; begin < N; begin += M) {
      Values<A, M> grads, values;
#pragma unroll
      for (int k = 0; k < M; ++k) {
        grads.v[k] = grad[begin + k];
        values.v[k] = v[begin + k];
      }
      grads = smooth_grads(grads, values, activation.kind, activation.first, activation.second);
#pragma unroll
      for (int k = 0; k < M; ++k) grad[begin + k] = grads.v[k];
    }
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      grad[k] = through_clamp(grad[k], v[k], activation.first, activation.second);
    }
  }
}

// A bit per value, whether a clamp lets its gradient through; the first in the lowest bit.
template <typename A, int N>
__device__ __forceinline__ uint8_t open_bits(const A (&v)[N], const ActivationArgs<A>& activation) {
  unsigned bits = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    bits |= static_cast<unsigned>(!(v[k] <= activation.first || v[k] >= activation.second)) << k;
  }
  return static_cast<uint8_t>(bits);
}

template <typename A, int N>
__device__ __forceinline__ void pass_back(A (&grad)[N], uint8_t open) {
#pragma unroll
  for (int k = 0; k < N; ++k) grad[k] = open >> k & 1 ? grad[k] : A(0);
}

}  // namespace braze::cuda
