// Activations of arrays in the accumulation type: values of other types go through a buffer in the
// cache, so that each activation has one loop, which the compiler vectorises, for all ops and
// dtypes.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/common/vector_math.h"
#include "launchers/common/activation.h"

namespace braze::cpu {

constexpr int64_t kChunk = 512;  // elements of a buffer

struct HostMath {
  template <typename A>
  static A exp(A v) {
    return vector_exp(v);
  }
  template <typename A>
  static A expm1(A v) {
    return vector_expm1(v);
  }
  template <typename A>
  static A bell(A v) {
    return exp(A(-0.5) * v * v);
  }
  template <typename A>
  static A normal_cdf(A v) {
    return normal_cdf_of_erf(vector_erf(v * A(kSqrtHalf)));
  }
  template <typename A>
  static A tanh(A v) {
    return vector_tanh(v);
  }
  template <typename A>
  static A divide(A a, A b) {
    return a / b;
  }
};

// to[j] = f(v[j]); `to` may be v.
template <typename A>
void activate(const Activation& activation, const A* v, A* to, int64_t count) {
  const A first = static_cast<A>(activation.first), second = static_cast<A>(activation.second);
  if (!activation.smooth()) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) to[j] = clamped(v[j], first, second);
    return;
  }
  Smooth<A, HostMath>::with(activation.kind, [&](auto function, auto) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) to[j] = function(v[j], first, second);
  });
}

// to[j] = grad[j] f'(v[j]); `to` may be grad.
template <typename A>
void pass_back(const Activation& activation, const A* v, const A* grad, A* to, int64_t count) {
  const A first = static_cast<A>(activation.first), second = static_cast<A>(activation.second);
  if (!activation.smooth()) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) to[j] = through_clamp(grad[j], v[j], first, second);
    return;
  }
  Smooth<A, HostMath>::with(activation.kind, [&](auto, auto slope) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) to[j] = grad[j] * slope(v[j], first, second);
  });
}

// Calls f(begin, count) for chunks that cover `count` elements.
template <typename F>
void for_each_chunk(int64_t count, const F& f) {
  for (int64_t begin = 0; begin < count; begin += kChunk) f(begin, std::min(kChunk, count - begin));
}

}  // namespace braze::cpu
