// What batch norm's kernels share with those that fuse it: partial results per channel, and what
// follows from the merged gradients' sums.
#pragma once

#include <algorithm>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "launchers/batch_norm.h"

namespace braze::cpu {

constexpr int64_t kGrain = 16384;   // elements per task
constexpr int64_t kMaxSplits = 32;  // partial results per channel
constexpr int64_t kRowBlock = 64;   // rows of c elements summed before float64 takes over

// Two sums over a part of a channel: forward its mean and the squares about it (with a count),
// backward the sums of dy and of dy * (x - mean).
struct Partial {
  double count, first, second;
};

inline int64_t split_count(const BatchNormShape& shape) {
  const int64_t parts = shape.channels_last ? ceil_div(shape.count(), kRowBlock) : shape.n;
  return std::clamp<int64_t>(parts, 1, kMaxSplits);
}

inline double load_as_double(const void* p, DType dtype, int64_t i) {
  double v = 0;
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    v = static_cast<acc_t<T>>(static_cast<const T*>(p)[i]);
  });
  return v;
}

inline void store_from_double(void* p, DType dtype, int64_t i, double v) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    static_cast<T*>(p)[i] = static_cast<acc_t<T>>(v);
  });
}

// Fills partials [split][channel]. planes(offset, channel, result) takes `inner` elements of one
// channel from `offset` on, rows(offset, rows, results) rows of all channels.
template <typename Planes, typename Rows>
void reduce(const BatchNormShape& shape, Partial* partials, const Planes& planes,
            const Rows& rows) {
  const int64_t splits = split_count(shape), c = shape.c;
  const auto cut = [&](int64_t total, int64_t split) { return total * split / splits; };
  if (shape.channels_last) {
    parallel_for(0, splits, 1, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        const int64_t first = cut(shape.count(), s), last = cut(shape.count(), s + 1);
        std::fill_n(partials + s * c, c, Partial{});
        rows(first * c, last - first, partials + s * c);
      }
    });
    return;
  }
  const int64_t work = std::max<int64_t>(1, shape.count() / splits);
  parallel_for(0, splits * c, std::max<int64_t>(1, kGrain / work), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t s = i / c, channel = i % c;
      partials[i] = {};
      for (int64_t image = cut(shape.n, s); image < cut(shape.n, s + 1); ++image) {
        planes((image * c + channel) * shape.inner, channel, &partials[i]);
      }
    }
  });
}

inline double weight_of(const BatchNormAffine& affine, int64_t channel) {
  return affine.weight ? load_as_double(affine.weight, affine.dtype, channel) : 1.0;
}

// dx = dy * by_grad + (x - mean) * by_input + offset, [c] each, in `memory`, which has room for
// three doubles per channel.
template <typename A>
struct GradCoefficients {
  A* by_grad;
  A* by_input;
  A* offset;

  GradCoefficients(void* memory, int64_t c)
      : by_grad(static_cast<A*>(memory)), by_input(by_grad + c), offset(by_input + c) {}
};

// The parameters' gradients, each nullptr where not wanted; see batch_norm_relu_backward.
struct GradResults {
  BatchNormAffine affine;
  void* dweight;
  void* dbias;
  void* dconstant;
  DType constant_dtype;
  bool training;
};

// What dx is made with, of channel j's sums over `count` elements.
template <typename A>
void set_coefficients(int64_t j, double scale, double rstd, const GradSums& sums, double count,
                      const GradCoefficients<A>& k) {
  k.by_grad[j] = static_cast<A>(scale);
  k.by_input[j] = static_cast<A>(-scale * rstd * rstd * sums.dot / count);
  k.offset[j] = static_cast<A>(-scale * sums.sum / count);
}

// Those of channel j that reduce() left.
inline GradSums sums_of(const Partial* partials, int64_t splits, int64_t c, int64_t j) {
  GradSums total{0, 0};
  for (int64_t s = 0; s < splits; ++s) {
    total.sum += partials[s * c + j].first;
    total.dot += partials[s * c + j].second;
  }
  return total;
}

// The coefficients and the parameters' gradients from `splits` sums that reduce() left in
// `partials` (none: of no use). count: elements per channel.
template <typename A>
void merge_grads(int64_t c, int64_t count, const Partial* partials, int64_t splits, const A* rstd,
                 const GradResults& results, const GradCoefficients<A>& k) {
  const auto& [affine, dweight, dbias, dconstant, constant_dtype, training] = results;
  for (int64_t j = 0; j < c; ++j) {
    const GradSums sums = sums_of(partials, splits, c, j);
    if (dweight) store_from_double(dweight, affine.dtype, j, sums.dot * rstd[j]);
    if (dbias) store_from_double(dbias, affine.dtype, j, sums.sum);
    const double scale = rstd[j] * weight_of(affine, j);
    // In training dx sums to 0, or to NaN where a gradient is not finite.
    if (dconstant) {
      store_from_double(dconstant, constant_dtype, j, sums.sum * (training ? 0 : scale));
    }
    set_coefficients(j, scale, rstd[j], sums, static_cast<double>(count), k);
  }
}

}  // namespace braze::cpu
