// What may follow a normalisation: a function of one element, and its derivative. The arithmetic is
// written once for both devices, over the functions of `Math`: exp, expm1, tanh, normal_cdf and
// bell, which is exp(-v v / 2), of one element, and divide of two, which each device has its own
// of.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "launchers/common/both.h"

namespace braze {

// kClamp is branch-free arithmetic and stands for all that only bounds its argument: the identity,
// ReLU, ReLU6, Hardtanh. All others are smooth().
enum class ActivationKind : int {
  kClamp,      // first: lower bound, second: upper bound; NaN: none
  kLeakyReLU,  // first: slope below 0
  kSiLU,
  kGELU,
  kGELUTanh,
  kHardswish,
  kHardsigmoid,
  kSigmoid,
  kTanh,
  kELU,  // first * expm1(second * v) below 0: ELU and CELU
  kMish,
};

struct Activation {
  ActivationKind kind;
  double first, second;

  bool smooth() const { return kind != ActivationKind::kClamp; }
  bool identity() const { return !smooth() && first != first && second != second; }
};

constexpr double kNoBound = std::numeric_limits<double>::quiet_NaN();
constexpr Activation kIdentity{ActivationKind::kClamp, kNoBound, kNoBound};
constexpr Activation kReLU{ActivationKind::kClamp, 0, kNoBound};

// condition ? a : b of values that are there in any case: of a conditional expression a host's
// compiler may make a branch, around a load even, and no vectors then.
template <typename A>
BRAZE_BOTH A select(bool condition, A a, A b) {
  return condition ? a : b;
}
#ifndef __CUDACC__
inline float select(bool condition, float a, float b) {
  const uint32_t mask = -static_cast<uint32_t>(condition);
  uint32_t bits[2];
  std::memcpy(bits, &a, sizeof(float)), std::memcpy(bits + 1, &b, sizeof(float));
  bits[0] = (bits[0] & mask) | (bits[1] & ~mask);
  std::memcpy(&a, bits, sizeof(float));
  return a;
}
#endif

// NaN stays NaN; no comparison with a bound that is NaN holds.
template <typename A>
BRAZE_BOTH A clamped(A v, A low, A high) {
  v = select(v < low, low, v);
  return select(v > high, high, v);
}

// The same with bounds that are no NaN: an instruction each on a GPU, where clamped() has four.
template <typename A>
BRAZE_BOTH A bounded(A v, A low, A high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<A, float>) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(low));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(high));
    return v;
  }
#endif
  return clamped(v, low, high);
}

// The gradient that a clamp lets through, torch's way: none at a bound, NaN's.
template <typename A>
BRAZE_BOTH A through_clamp(A grad, A v, A low, A high) {
  return select((v <= low) | (v >= high), A(0), grad);
}

// The normal distribution's density and, by the error function of v / sqrt(2), its integral.
constexpr double kBellToDensity = 0.39894228040143267794;
template <typename A, typename Math>
BRAZE_BOTH A normal_pdf(A v) {
  return A(kBellToDensity) * Math::bell(v);
}
template <typename A>
BRAZE_BOTH A normal_cdf_of_erf(A erf) {
  return A(0.5) * (A(1) + erf);
}
constexpr double kSqrtHalf = 0.70710678118654752440;

// f(v) and f'(v) of the smooth kinds. Formulas as torch has them, so that infinities give the same.
template <typename A, typename Math>
struct Smooth {
  static BRAZE_BOTH A sigmoid(A v) { return Math::divide(A(1), A(1) + Math::exp(-v)); }
  static BRAZE_BOTH A gelu_inner(A v) {
    return A(0.79788456080286535588) * (v + A(0.044715) * v * v * v);
  }
  // tanh(log(1 + exp(v))), whose numerator and denominator would overflow where it is 1.
  static BRAZE_BOTH A tanh_softplus(A v) {
    const A e = Math::exp(v > A(20) ? A(20) : v), n = e * (e + A(2));
    return v > A(20) ? A(1) : Math::divide(n, n + A(2));
  }

  static BRAZE_BOTH A leaky_relu(A v, A slope, A) { return select(v > A(0), v, v * slope); }
  static BRAZE_BOTH A leaky_relu_slope(A v, A slope, A) { return select(v > A(0), A(1), slope); }

  static BRAZE_BOTH A silu(A v, A, A) { return Math::divide(v, A(1) + Math::exp(-v)); }
  static BRAZE_BOTH A silu_slope(A v, A, A) {
    const A s = sigmoid(v);
    return s * (A(1) + v * (A(1) - s));
  }

  static BRAZE_BOTH A gelu(A v, A, A) { return v * Math::normal_cdf(v); }
  static BRAZE_BOTH A gelu_slope(A v, A, A) {
    return Math::normal_cdf(v) + v * normal_pdf<A, Math>(v);
  }

  static BRAZE_BOTH A gelu_tanh(A v, A, A) {
    return A(0.5) * v * (A(1) + Math::tanh(gelu_inner(v)));
  }
  static BRAZE_BOTH A gelu_tanh_slope(A v, A, A) {
    const A t = Math::tanh(gelu_inner(v));
    const A inner_slope = A(0.79788456080286535588) * (A(1) + A(3 * 0.044715) * v * v);
    return A(0.5) * (A(1) + t) + A(0.5) * v * (A(1) - t * t) * inner_slope;
  }

  static BRAZE_BOTH A hardsigmoid(A v, A, A) { return bounded(v + A(3), A(0), A(6)) * A(1. / 6); }
  static BRAZE_BOTH A hardsigmoid_slope(A v, A, A) {
    return select((v > A(-3)) & (v < A(3)), A(1. / 6), A(0));
  }

  static BRAZE_BOTH A hardswish(A v, A, A) { return v * bounded(v + A(3), A(0), A(6)) * A(1. / 6); }
  static BRAZE_BOTH A hardswish_slope(A v, A, A) {
    return select(v <= A(-3), A(0), select(v < A(3), v * A(1. / 3) + A(0.5), A(1)));
  }

  static BRAZE_BOTH A logistic(A v, A, A) { return sigmoid(v); }
  static BRAZE_BOTH A logistic_slope(A v, A, A) {
    const A s = sigmoid(v);
    return s * (A(1) - s);
  }

  static BRAZE_BOTH A tanh(A v, A, A) { return Math::tanh(v); }
  static BRAZE_BOTH A tanh_slope(A v, A, A) {
    const A t = Math::tanh(v);
    return A(1) - t * t;
  }

  static BRAZE_BOTH A elu(A v, A scale, A input_scale) {
    return v > A(0) ? v : scale * Math::expm1(v * input_scale);
  }
  static BRAZE_BOTH A elu_slope(A v, A scale, A input_scale) {
    return v > A(0) ? A(1) : scale * input_scale * Math::exp(v * input_scale);
  }

  static BRAZE_BOTH A mish(A v, A, A) { return v * tanh_softplus(v); }
  static BRAZE_BOTH A mish_slope(A v, A, A) {
    const A t = tanh_softplus(v);
    return t + v * sigmoid(v) * (A(1) - t * t);
  }

  // Calls f(function, slope) with those of a kind: the switch is outside of the loops over elements
  // that f runs.
  template <typename F>
  static BRAZE_BOTH void with(ActivationKind kind, const F& f) {
#define BRAZE_SMOOTH(name)                                                  \
  f([](A v, A first, A second) { return name(v, first, second); },          \
    [](A v, A first, A second) { return name##_slope(v, first, second); }); \
  break
    switch (kind) {
      case ActivationKind::kClamp: break;
      case ActivationKind::kLeakyReLU: BRAZE_SMOOTH(leaky_relu);
      case ActivationKind::kSiLU: BRAZE_SMOOTH(silu);
      case ActivationKind::kGELU: BRAZE_SMOOTH(gelu);
      case ActivationKind::kGELUTanh: BRAZE_SMOOTH(gelu_tanh);
      case ActivationKind::kHardswish: BRAZE_SMOOTH(hardswish);
      case ActivationKind::kHardsigmoid: BRAZE_SMOOTH(hardsigmoid);
      case ActivationKind::kSigmoid: BRAZE_SMOOTH(logistic);
      case ActivationKind::kTanh: BRAZE_SMOOTH(tanh);
      case ActivationKind::kELU: BRAZE_SMOOTH(elu);
      case ActivationKind::kMish: BRAZE_SMOOTH(mish);
    }
#undef BRAZE_SMOOTH
  }
};

}  // namespace braze
