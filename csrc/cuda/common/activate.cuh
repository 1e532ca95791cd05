// Activations on a thread's vector of elements.
#pragma once

#include <type_traits>

#include "numeric.cuh"
#include "launchers/common/activation.h"

namespace braze::cuda {

// a / b within 2 ulps for all b, infinite ones and those beyond 2^126 included, of which
// __fdividef makes 0: 1 + exp(-v) is one for v below -87. (PTX ISA, div.full.f32)
__device__ __forceinline__ float divide_full_range(float a, float b) {
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
}

// Math in the accumulation type of elements T.
template <typename T>
struct DeviceMath {
  static __device__ __forceinline__ float exp(float v) { return ::expf(v); }
  static __device__ __forceinline__ float expm1(float v) { return ::expm1f(v); }
  static __device__ __forceinline__ float tanh(float v) { return ::tanhf(v); }
  static __device__ __forceinline__ float divide(float a, float b) {
    return divide_full_range(a, b);
  }
  static __device__ __forceinline__ float bell(float v) { return ::expf(-0.5f * v * v); }
  static __device__ __forceinline__ float normal_cdf(float v) {
    return normal_cdf_of_erf(::erff(v * static_cast<float>(kSqrtHalf)));
  }
};

template <>
struct DeviceMath<double> {
  static __device__ __forceinline__ double exp(double v) { return ::exp(v); }
  static __device__ __forceinline__ double expm1(double v) { return ::expm1(v); }
  static __device__ __forceinline__ double tanh(double v) { return ::tanh(v); }
  static __device__ __forceinline__ double divide(double a, double b) { return a / b; }
  static __device__ __forceinline__ double bell(double v) { return ::exp(-0.5 * v * v); }
  static __device__ __forceinline__ double normal_cdf(double v) {
    return normal_cdf_of_erf(::erf(v * kSqrtHalf));
  }
};

// Of 16-bit elements: errors far below the 2^-9 and 2^-12 of their rounding, and few instructions:
// there are as many elements as of 32 bits in half of the time that the memory takes.
struct ShortMath : DeviceMath<float> {
  // 2 ulps (PTX ISA, ex2.approx), without subnormal results, which cost half of the instructions.
  static __device__ __forceinline__ float exp2(float v) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
  }
  // Errors of |v| 2^-23 more.
  static __device__ __forceinline__ float exp(float v) { return exp2(v * 1.44269504f); }
  static __device__ __forceinline__ float bell(float v) { return exp2(v * v * -0.72134752f); }
  // 1 / v within an ulp, 0 beyond 2^126.
  static __device__ __forceinline__ float reciprocal(float v) {
    float quotient;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(v));
    return quotient;
  }
  static __device__ __forceinline__ float divide(float a, float b) { return a * reciprocal(b); }
  // Within 7.5e-8, with fp32's roundings 2.3e-7: Abramowitz and Stegun, Handbook of Mathematical
  // Functions, 26.2.17. The tail beyond |v| is a polynomial in t times the density, of which a
  // derivative needs the exponential, too.
  static __device__ __forceinline__ float normal_cdf(float v) {
    constexpr double k = kBellToDensity;
    const float t = reciprocal(1.0f + 0.2316419f * ::fabsf(v));
    float p = static_cast<float>(k * 1.330274429);
    p = p * t - static_cast<float>(k * 1.821255978);
    p = p * t + static_cast<float>(k * 1.781477937);
    p = p * t - static_cast<float>(k * 0.356563782);
    p = p * t + static_cast<float>(k * 0.319381530);
    const float tail = p * t * bell(v);
    return v > 0.0f ? 1.0f - tail : tail;
  }
};
template <>
struct DeviceMath<__nv_bfloat16> : ShortMath {};
template <>
struct DeviceMath<__half> : ShortMath {};

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

// Which code a kernel has for its activation. A call costs about as much as the arithmetic, and in
// its place the memory waits; but each code inline is one more of every kernel. So the most used
// ones have theirs, where vectors have 16 bytes, and all others share one.
enum class ActivationCode { kClamp, kCalled, kSiLU, kGELU, kHardswish, kLeakyReLU };

// Calls f(code) with a constant, for elements T in vectors of N.
template <typename T, int N, typename F>
void with_activation_code(const Activation& activation, const F& f) {
  if (!activation.smooth()) {
    return f(std::integral_constant<ActivationCode, ActivationCode::kClamp>{});
  }
  if constexpr (N == kVecWidth<T> && !std::is_same_v<T, double>) {
    switch (activation.kind) {
      case ActivationKind::kSiLU:
        return f(std::integral_constant<ActivationCode, ActivationCode::kSiLU>{});
      case ActivationKind::kGELU:
        return f(std::integral_constant<ActivationCode, ActivationCode::kGELU>{});
      case ActivationKind::kHardswish:
        return f(std::integral_constant<ActivationCode, ActivationCode::kHardswish>{});
      default: break;
    }
  }
  f(std::integral_constant<ActivationCode, ActivationCode::kCalled>{});
}

constexpr ActivationKind inline_kind(ActivationCode code) {
  switch (code) {
    case ActivationCode::kSiLU: return ActivationKind::kSiLU;
    case ActivationCode::kGELU: return ActivationKind::kGELU;
    case ActivationCode::kHardswish: return ActivationKind::kHardswish;
    case ActivationCode::kLeakyReLU: return ActivationKind::kLeakyReLU;
    default: return ActivationKind::kClamp;
  }
}

// As many values as a call returns in registers.
template <typename A, int N>
struct Values {
  A v[N];
};
template <typename A, int N>
constexpr int kValues = N * sizeof(A) < 16 ? N : 16 / sizeof(A);

// Not inlined: a kernel would have the code of every kind once for each element of a thread's
// vectors.
template <typename A, int N>
__device__ __noinline__ Values<A, N> called_values(Values<A, N> values, ActivationKind kind,
                                                   A first, A second) {
  Smooth<A, DeviceMath<A>>::with(kind, [&](auto function, auto) {
#pragma unroll
    for (int k = 0; k < N; ++k) values.v[k] = function(values.v[k], first, second);
  });
  return values;
}

// grads[k] * f'(values[k]).
template <typename A, int N>
__device__ __noinline__ Values<A, N> called_grads(Values<A, N> grads, Values<A, N> values,
                                                  ActivationKind kind, A first, A second) {
  Smooth<A, DeviceMath<A>>::with(kind, [&](auto, auto slope) {
#pragma unroll
    for (int k = 0; k < N; ++k) grads.v[k] *= slope(values.v[k], first, second);
  });
  return grads;
}

// v[k] = f(v[k]), of elements T.
template <ActivationCode kCode, typename T, typename A, int N>
__device__ __forceinline__ void activate(A (&v)[N], const ActivationArgs<A>& activation) {
  if constexpr (kCode == ActivationCode::kClamp) {
    const A first = activation.first, second = activation.second;
    const A low = first == first ? first : -A(INFINITY),
            high = second == second ? second : A(INFINITY);
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = bounded(v[k], low, high);
  } else if constexpr (kCode == ActivationCode::kCalled) {
    constexpr int M = kValues<A, N>;
#pragma unroll
    for (int begin = 0; begin < N; begin += M) {
      Values<A, M> part;
#pragma unroll
      for (int k = 0; k < M; ++k) part.v[k] = v[begin + k];
      part = called_values(part, activation.kind, activation.first, activation.second);
#pragma unroll
      for (int k = 0; k < M; ++k) v[begin + k] = part.v[k];
    }
  } else {
    Smooth<A, DeviceMath<T>>::with(inline_kind(kCode), [&](auto function, auto) {
#pragma unroll
      for (int k = 0; k < N; ++k) v[k] = function(v[k], activation.first, activation.second);
    });
  }
}

// grad[k] becomes the gradient before the activation, v[k] being the value before it.
template <ActivationCode kCode, typename T, typename A, int N>
__device__ __forceinline__ void pass_back(A (&grad)[N], const A (&v)[N],
                                          const ActivationArgs<A>& activation) {
  if constexpr (kCode == ActivationCode::kClamp) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      grad[k] = through_clamp(grad[k], v[k], activation.first, activation.second);
    }
  } else if constexpr (kCode == ActivationCode::kCalled) {
    constexpr int M = kValues<A, N>;
#pragma unroll
    for (int begin = 0; begin < N; begin += M) {
      Values<A, M> grads, values;
#pragma unroll
      for (int k = 0; k < M; ++k) {
        grads.v[k] = grad[begin + k];
        values.v[k] = v[begin + k];
      }
      grads = called_grads(grads, values, activation.kind, activation.first, activation.second);
#pragma unroll
      for (int k = 0; k < M; ++k) grad[begin + k] = grads.v[k];
    }
  } else {
    Smooth<A, DeviceMath<T>>::with(inline_kind(kCode), [&](auto, auto slope) {
#pragma unroll
      for (int k = 0; k < N; ++k) grad[k] *= slope(v[k], activation.first, activation.second);
    });
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
