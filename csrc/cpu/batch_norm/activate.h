// The passes of batch norm over runs of adjacent elements, with what comes behind the
// normalisation: a residual and an activation. Values go through a buffer in the cache, so that
// each activation has one loop, which the compiler vectorises, for all passes and dtypes.
#pragma once

#include <algorithm>

#include "cpu/common/exp.h"
#include "cpu/common/numeric.h"
#include "launchers/batch_norm.h"

namespace braze::cpu {

constexpr int64_t kChunk = 512;  // elements of a buffer

struct HostMath {
  template <typename A>
  static A exp(A v) {
    return vector_exp(v);
  }
  template <typename A>
  static A expm1(A v) {
    return std::expm1(v);
  }
  template <typename A>
  static A erf(A v) {
    return std::erf(v);
  }
  template <typename A>
  static A tanh(A v) {
    return std::tanh(v);
  }
};

// v[j] = f(v[j]).
template <typename A>
void activate(const Activation& activation, A* v, int64_t count) {
  const A first = static_cast<A>(activation.first), second = static_cast<A>(activation.second);
  if (!activation.smooth()) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) v[j] = clamped(v[j], first, second);
    return;
  }
  Smooth<A, HostMath>::with(activation.kind, [&](auto function, auto) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) v[j] = function(v[j], first, second);
  });
}

// grad[j] *= f'(v[j]).
template <typename A>
void pass_back(const Activation& activation, const A* v, A* grad, int64_t count) {
  const A first = static_cast<A>(activation.first), second = static_cast<A>(activation.second);
  if (!activation.smooth()) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) grad[j] = through_clamp(grad[j], v[j], first, second);
    return;
  }
  Smooth<A, HostMath>::with(activation.kind, [&](auto, auto slope) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) grad[j] *= slope(v[j], first, second);
  });
}

// The arrays of BatchNormStatistics; scale and shift are nullptr where no activation is passed
// back.
template <typename A>
struct Statistics {
  const A* mean;
  const A* rstd;
  const A* scale;
  const A* shift;

  explicit Statistics(const BatchNormStatistics& s)
      : mean(static_cast<const A*>(s.mean)),
        rstd(static_cast<const A*>(s.rstd)),
        scale(static_cast<const A*>(s.scale)),
        shift(static_cast<const A*>(s.shift)) {}
};

// The values before the activation of a run; at(coefficient, j) is the coefficient of element j.
template <typename T, typename At>
void before_activation(const T* x, const T* residual, int64_t count, const Statistics<acc_t<T>>& k,
                       const At& at, acc_t<T>* v) {
  using A = acc_t<T>;
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    v[j] = (static_cast<A>(x[j]) - at(k.mean, j)) * at(k.scale, j) + at(k.shift, j);
  }
  if (!residual) return;
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) v[j] += static_cast<A>(residual[j]);
}

// Where a backward pass takes the gradient before the activation and residual from: dy, x, residual
// (or nullptr) are whole tensors; kept is where it goes, or nullptr.
template <typename T>
struct GradSource {
  const T* dy;
  const T* x;
  const T* residual;
  T* kept;
  Activation activation;
  Statistics<acc_t<T>> statistics;

  // That of a run of up to kChunk elements from `offset` on, in `grad`.
  template <typename At>
  void operator()(int64_t offset, int64_t count, const At& at, acc_t<T>* grad) const {
    using A = acc_t<T>;
    const T* from = dy + offset;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) grad[j] = static_cast<A>(from[j]);
    if (!activation.identity()) {
      A v[kChunk];
      before_activation(x + offset, residual ? residual + offset : nullptr, count, statistics, at,
                        v);
      pass_back(activation, v, grad, count);
    }
    if (!kept) return;
    T* to = kept + offset;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) to[j] = grad[j];
  }
};

// Calls f(begin, count) for chunks that cover `count` elements.
template <typename F>
void for_each_chunk(int64_t count, const F& f) {
  for (int64_t begin = 0; begin < count; begin += kChunk) f(begin, std::min(kChunk, count - begin));
}

}  // namespace braze::cpu
