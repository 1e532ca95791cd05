// The parts of batch norm's passes over runs of adjacent elements, with what comes behind the
// normalisation: a residual and an activation.
#pragma once

#include "cpu/common/activate.h"
#include "cpu/common/numeric.h"
#include "launchers/batch_norm.h"

namespace braze::cpu {

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
      pass_back(activation, v, grad, grad, count);
    }
    if (!kept) return;
    T* to = kept + offset;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) to[j] = grad[j];
  }
};

}  // namespace braze::cpu
