// Batch norm's passes over the elements on the CPU: normalisation, residual and activation, and the
// way back: sums per channel, then the input's gradient. Cuts depend on the shape alone, so results
// do not depend on the number of threads.
#include <vector>

#include "cpu/batch_norm/batch_norm_parts.h"
#include "cpu/batch_norm/batch_norm_runs.h"

namespace braze::cpu {
namespace {

constexpr int64_t kBlock = 4096;  // elements of a channel summed before float64 takes over

// Calls f(offset, count, at) for runs of up to kChunk adjacent elements: at(coefficient, j) is the
// coefficient of the run's j-th element, the same one throughout in [n, c, inner].
template <typename F>
void apply(const BatchNormShape& shape, const F& f) {
  if (shape.channels_last) {
    const int64_t grain = std::max<int64_t>(1, kGrain / shape.c);
    parallel_for(0, shape.count(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for_each_chunk(shape.c, [&](int64_t first, int64_t count) {
          f(i * shape.c + first, count,
            [first](const auto* coefficient, int64_t j) { return coefficient[first + j]; });
        });
      }
    });
    return;
  }
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, shape.inner));
  parallel_for(0, shape.n * shape.c, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t channel = i % shape.c;
      for_each_chunk(shape.inner, [&](int64_t first, int64_t count) {
        f(i * shape.inner + first, count,
          [channel](const auto* coefficient, int64_t) { return coefficient[channel]; });
      });
    }
  });
}

template <typename T>
void sums_of_plane(const GradSource<T>& source, int64_t offset, int64_t channel, int64_t count,
                   Partial* result) {
  using A = acc_t<T>;
  const A mean = source.statistics.mean[channel];
  const auto at = [channel](const A* coefficient, int64_t) { return coefficient[channel]; };
  A grad[kChunk];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    A sum = 0, dot = 0;
    for_each_chunk(std::min(kBlock, count - begin), [&](int64_t first, int64_t n) {
      const int64_t from = offset + begin + first;
      source(from, n, at, grad);
      const T* x = source.x + from;
#pragma omp simd reduction(+ : sum, dot)
      for (int64_t j = 0; j < n; ++j) {
        sum += grad[j];
        dot += grad[j] * (static_cast<A>(x[j]) - mean);
      }
    });
    result->first += sum;
    result->second += dot;
  }
}

template <typename T>
void sums_of_rows(const GradSource<T>& source, int64_t offset, int64_t rows, int64_t c,
                  Partial* results) {
  using A = acc_t<T>;
  const A* mean = source.statistics.mean;
  std::vector<A> sum(c), dot(c);
  A grad[kChunk];
  for (int64_t begin = 0; begin < rows; begin += kRowBlock) {
    std::fill(sum.begin(), sum.end(), A(0));
    std::fill(dot.begin(), dot.end(), A(0));
    for (int64_t i = begin; i < std::min(begin + kRowBlock, rows); ++i) {
      for_each_chunk(c, [&](int64_t first, int64_t n) {
        const int64_t from = offset + i * c + first;
        source(from, n, [first](const A* k, int64_t j) { return k[first + j]; }, grad);
        const T* x = source.x + from;
        const A* center = mean + first;
        A *to_sum = sum.data() + first, *to_dot = dot.data() + first;
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) {
          to_sum[j] += grad[j];
          to_dot[j] += grad[j] * (static_cast<A>(x[j]) - center[j]);
        }
      });
    }
    for (int64_t j = 0; j < c; ++j) {
      results[j].first += sum[j];
      results[j].second += dot[j];
    }
  }
}

// Fills `partials` with the sums of what `source` gives.
template <typename T>
void reduce_gradients(const BatchNormShape& shape, const GradSource<T>& source, Partial* partials) {
  reduce(
      shape, partials,
      [&](int64_t offset, int64_t channel, Partial* p) {
        sums_of_plane(source, offset, channel, shape.inner, p);
      },
      [&](int64_t offset, int64_t rows, Partial* p) {
        sums_of_rows(source, offset, rows, shape.c, p);
      });
}

template <typename T>
void input_gradient(const BatchNormShape& shape, const GradSource<T>& source, bool training,
                    const GradCoefficients<acc_t<T>>& k, T* dx) {
  using A = acc_t<T>;
  apply(shape, [&](int64_t offset, int64_t count, auto at) {
    A g[kChunk];
    source(offset, count, at, g);
    const T* from = source.x + offset;
    T* result = dx + offset;
    const A* mean = source.statistics.mean;
    if (training) {
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) {
        const A deviation = static_cast<A>(from[j]) - at(mean, j);
        result[j] = g[j] * at(k.by_grad, j) + deviation * at(k.by_input, j) + at(k.offset, j);
      }
    } else {
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) result[j] = g[j] * at(k.by_grad, j);
    }
  });
}

// Of gradients of the normalisation itself.
template <typename T>
GradSource<T> plain_source(const void* dy, const void* x, const BatchNormStatistics& statistics) {
  return {static_cast<const T*>(dy),       static_cast<const T*>(x), nullptr, nullptr, kIdentity,
          Statistics<acc_t<T>>(statistics)};
}

}  // namespace

int64_t batch_norm_mask_bytes(const BatchNormShape&, const BatchNormTail&) { return 0; }

void batch_norm_apply(Stream, const BatchNormShape& shape, const void* x, const BatchNormTail& tail,
                      const BatchNormStatistics& statistics, void* y, void*) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const Statistics<A> k(statistics);
    const T* residual = static_cast<const T*>(tail.residual);
    apply(shape, [&](int64_t offset, int64_t count, auto at) {
      A v[kChunk];
      const T* in = static_cast<const T*>(x) + offset;
      before_activation(in, residual ? residual + offset : nullptr, count, k, at, v);
      activate(tail.activation, v, v, count);
      T* out = static_cast<T*>(y) + offset;
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) out[j] = v[j];
    });
  });
}

void batch_norm_backward(Stream, const BatchNormShape& shape, bool training, const void* dy,
                         const void* x, const BatchNormTail& tail, const void*,
                         const BatchNormAffine& affine, const BatchNormStatistics& statistics,
                         const BatchNormGradients& gradients, void* workspace) {
  const BatchNormGradients& d = gradients;
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const T* in = static_cast<const T*>(x);
    T* kept = static_cast<T*>(d.residual);
    const GradSource<T> source{
        static_cast<const T*>(dy), in, static_cast<const T*>(tail.residual), kept, tail.activation,
        Statistics<A>(statistics)};
    const int64_t splits = split_count(shape), c = shape.c;
    Partial* partials = static_cast<Partial*>(workspace);
    const bool with_sums = d.weight || d.bias || d.constant || kept || (d.x && training);
    if (with_sums) reduce_gradients(shape, source, partials);
    const GradCoefficients<A> k(partials + splits * c, c);
    const GradResults results{affine, d.weight, d.bias, d.constant, shape.dtype, training};
    const A* rstd = source.statistics.rstd;
    merge_grads(c, shape.count(), partials, with_sums ? splits : 0, rstd, results, k);
    if (!d.x) return;
    // The gradient before the activation is known where it was kept.
    const GradSource<T> again{
        kept ? kept : source.dy, in, source.residual, nullptr, kept ? kIdentity : tail.activation,
        source.statistics};
    input_gradient(shape, again, training, k, static_cast<T*>(d.x));
  });
}

void batch_norm_backward_of_sums(Stream, const BatchNormShape& shape, const void* dy, const void* x,
                                 const float* sums, int sets, const BatchNormAffine& affine,
                                 const BatchNormStatistics& statistics,
                                 const BatchNormGradients& gradients, void* workspace) {
  const BatchNormGradients& d = gradients;
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const GradSource<T> source = plain_source<T>(dy, x, statistics);
    Partial* const total = static_cast<Partial*>(workspace);
    for (int64_t j = 0; j < shape.c; ++j) {
      total[j] = {};
      for (const float* part = sums + j * sets * 2; part < sums + (j + 1) * sets * 2; part += 2) {
        total[j].first += part[0], total[j].second += part[1];
      }
    }
    const GradCoefficients<A> k(total + shape.c, shape.c);
    merge_grads(shape.c, shape.count(), total, 1, source.statistics.rstd,
                {affine, d.weight, d.bias, d.constant, shape.dtype, true}, k);
    if (d.x) input_gradient(shape, source, true, k, static_cast<T*>(d.x));
  });
}

void batch_norm_sums(Stream, const BatchNormShape& shape, const void* dy, const void* x,
                     const BatchNormAffine& affine, const BatchNormStatistics& statistics,
                     GradSums* sums, void* dweight, void* dbias, void* workspace) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const GradSource<T> source = plain_source<T>(dy, x, statistics);
    Partial* const partials = static_cast<Partial*>(workspace);
    reduce_gradients(shape, source, partials);
    for (int64_t j = 0; j < shape.c; ++j) {
      sums[j] = sums_of(partials, split_count(shape), shape.c, j);
      const double rstd = source.statistics.rstd[j];
      if (dweight) store_from_double(dweight, affine.dtype, j, sums[j].dot * rstd);
      if (dbias) store_from_double(dbias, affine.dtype, j, sums[j].sum);
    }
  });
}

void batch_norm_input_grad(Stream, const BatchNormShape& shape, const void* dy, const void* x,
                           const BatchNormAffine& affine, const BatchNormStatistics& statistics,
                           const GradSums* sums, const double* total, void* dx, void* workspace) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const GradSource<T> source = plain_source<T>(dy, x, statistics);
    const GradCoefficients<A> k(workspace, shape.c);
    for (int64_t j = 0; j < shape.c; ++j) {
      const double rstd = source.statistics.rstd[j];
      set_coefficients(j, rstd * weight_of(affine, j), rstd, sums[j], *total, k);
    }
    input_gradient(shape, source, true, k, static_cast<T*>(dx));
  });
}

}  // namespace braze::cpu
