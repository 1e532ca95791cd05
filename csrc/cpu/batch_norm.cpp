// Batch norm on the CPU. Statistics: each channel's elements are cut into blocks that stay in
// cache; a block is passed over twice, for its mean and for the sum of squares about it, and blocks
// are merged in float64 by Chan's formula. So a mean much larger than the deviation costs no
// accuracy. Cuts depend on the shape alone, so results do not depend on the number of threads.
#include "kernels/batch_norm/batch_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/numeric.h"
#include "cpu/parallel.h"
#include "kernels/common/registry.h"

namespace braze::cpu {
namespace {

constexpr int64_t kGrain = 16384;   // elements per task
constexpr int64_t kMaxSplits = 32;  // partial results per channel
constexpr int64_t kBlock = 4096;    // elements of a channel passed over twice, [n, c, inner]
constexpr int64_t kRowBlock = 64;   // the same, [n, inner, c]: rows of c elements

// Two sums over a part of a channel: forward its mean and the squares about it (with a count),
// backward the sums of dy and of dy * (x - mean).
struct Partial {
  double count, first, second;
};

// Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"
// (1979).
void merge_moments(Partial* a, double count, double mean, double m2) {
  const double total = a->count + count, delta = mean - a->first;
  a->first += delta * count / total;
  a->second += m2 + delta * delta * a->count * count / total;
  a->count = total;
}

int64_t split_count(const BatchNormShape& shape) {
  const int64_t parts = shape.channels_last ? ceil_div(shape.count(), kRowBlock) : shape.n;
  return std::clamp<int64_t>(parts, 1, kMaxSplits);
}

double load_as_double(const void* p, DType dtype, int64_t i) {
  double v = 0;
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    v = static_cast<acc_t<T>>(static_cast<const T*>(p)[i]);
  });
  return v;
}

void store_from_double(void* p, DType dtype, int64_t i, double v) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    static_cast<T*>(p)[i] = static_cast<acc_t<T>>(v);
  });
}

template <typename T>
void moments_of_plane(const T* x, int64_t count, Partial* result) {
  using A = acc_t<T>;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const T* block = x + begin;
    const int64_t m = std::min(kBlock, count - begin);
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < m; ++i) sum += static_cast<A>(block[i]);
    const A center = sum / m;
    A rest = 0, squares = 0;  // the center is rounded: rest makes up for that
#pragma omp simd reduction(+ : rest, squares)
    for (int64_t i = 0; i < m; ++i) {
      const A d = static_cast<A>(block[i]) - center;
      rest += d;
      squares += d * d;
    }
    const double offset = static_cast<double>(rest) / m;
    merge_moments(result, m, center + offset, squares - offset * rest);
  }
}

template <typename T>
void sums_of_plane(const T* dy, const T* x, acc_t<T> mean, int64_t count, Partial* result) {
  using A = acc_t<T>;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    A sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
    for (int64_t i = begin; i < end; ++i) {
      const A g = dy[i];
      sum += g;
      dot += g * (static_cast<A>(x[i]) - mean);
    }
    result->first += sum;
    result->second += dot;
  }
}

template <typename T>
void moments_of_rows(const T* x, int64_t rows, int64_t c, Partial* results) {
  using A = acc_t<T>;
  std::vector<A> center(c), rest(c), squares(c);
  for (int64_t begin = 0; begin < rows; begin += kRowBlock) {
    const int64_t end = std::min(begin + kRowBlock, rows), m = end - begin;
    std::fill(center.begin(), center.end(), A(0));
    std::fill(rest.begin(), rest.end(), A(0));
    std::fill(squares.begin(), squares.end(), A(0));
    for (int64_t i = begin; i < end; ++i) {
#pragma omp simd
      for (int64_t j = 0; j < c; ++j) center[j] += static_cast<A>(x[i * c + j]);
    }
    for (int64_t j = 0; j < c; ++j) center[j] /= m;
    for (int64_t i = begin; i < end; ++i) {
#pragma omp simd
      for (int64_t j = 0; j < c; ++j) {
        const A d = static_cast<A>(x[i * c + j]) - center[j];
        rest[j] += d;
        squares[j] += d * d;
      }
    }
    for (int64_t j = 0; j < c; ++j) {
      const double offset = static_cast<double>(rest[j]) / m;
      merge_moments(&results[j], m, center[j] + offset, squares[j] - offset * rest[j]);
    }
  }
}

template <typename T>
void sums_of_rows(const T* dy, const T* x, const acc_t<T>* mean, int64_t rows, int64_t c,
                  Partial* results) {
  using A = acc_t<T>;
  std::vector<A> sum(c), dot(c);
  for (int64_t begin = 0; begin < rows; begin += kRowBlock) {
    const int64_t end = std::min(begin + kRowBlock, rows);
    std::fill(sum.begin(), sum.end(), A(0));
    std::fill(dot.begin(), dot.end(), A(0));
    for (int64_t i = begin; i < end; ++i) {
#pragma omp simd
      for (int64_t j = 0; j < c; ++j) {
        const A g = dy[i * c + j];
        sum[j] += g;
        dot[j] += g * (static_cast<A>(x[i * c + j]) - mean[j]);
      }
    }
    for (int64_t j = 0; j < c; ++j) {
      results[j].first += sum[j];
      results[j].second += dot[j];
    }
  }
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

// Calls f(offset, count, at) for runs of adjacent elements: at(coefficient, j) is the coefficient
// of the run's j-th element, the same one throughout in [n, c, inner].
template <typename F>
void apply(const BatchNormShape& shape, const F& f) {
  if (shape.channels_last) {
    const int64_t grain = std::max<int64_t>(1, kGrain / shape.c);
    parallel_for(0, shape.count(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        f(i * shape.c, shape.c, [](const auto* coefficient, int64_t j) { return coefficient[j]; });
      }
    });
    return;
  }
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, shape.inner));
  parallel_for(0, shape.n * shape.c, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t channel = i % shape.c;
      f(i * shape.inner, shape.inner,
        [channel](const auto* coefficient, int64_t) { return coefficient[channel]; });
    }
  });
}

// y = (x - center) * scale + shift.
template <typename T>
void normalize(const BatchNormShape& shape, const T* x, const acc_t<T>* center,
               const acc_t<T>* scale, const acc_t<T>* shift, T* y) {
  apply(shape, [&](int64_t offset, int64_t count, auto at) {
    const T* in = x + offset;
    T* out = y + offset;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      out[j] = (static_cast<acc_t<T>>(in[j]) - at(center, j)) * at(scale, j) + at(shift, j);
    }
  });
}

double weight_of(const BatchNormAffine& affine, int64_t channel) {
  return affine.weight ? load_as_double(affine.weight, affine.dtype, channel) : 1.0;
}

double bias_of(const BatchNormAffine& affine, int64_t channel) {
  return affine.bias ? load_as_double(affine.bias, affine.dtype, channel) : 0.0;
}

void update_buffer(void* buffer, DType dtype, int64_t channel, double momentum, double value) {
  if (!buffer) return;
  const double previous = load_as_double(buffer, dtype, channel);
  store_from_double(buffer, dtype, channel, (1 - momentum) * previous + momentum * value);
}

const KernelEntry kEntry({"batch_norm", "two_pass_blocks", "float64 float32 bfloat16 float16",
                          "cpu", true, "blocks in cache passed over twice, merged in float64"});

}  // namespace

int64_t batch_norm_workspace_bytes(const BatchNormShape& shape) {
  // Partial results, then up to three coefficients per channel.
  return split_count(shape) * shape.c * sizeof(Partial) + 3 * shape.c * sizeof(double);
}

void batch_norm_training(Stream, const BatchNormShape& shape, const void* x,
                         const BatchNormAffine& affine, const BatchNormBuffers& buffers, double eps,
                         void* y, void* mean, void* rstd, void* workspace) {
  if (buffers.batches) ++*buffers.batches;
  const double momentum = buffers.momentum  ? *buffers.momentum
                          : buffers.batches ? 1.0 / *buffers.batches
                                            : 0.0;
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const T* in = static_cast<const T*>(x);
    const int64_t splits = split_count(shape), c = shape.c;
    Partial* partials = static_cast<Partial*>(workspace);
    A* scale = reinterpret_cast<A*>(partials + splits * c);
    A* shift = scale + c;
    A* mean_out = static_cast<A*>(mean);
    A* rstd_out = static_cast<A*>(rstd);
    reduce(
        shape, partials,
        [&](int64_t offset, int64_t, Partial* p) { moments_of_plane(in + offset, shape.inner, p); },
        [&](int64_t offset, int64_t rows, Partial* p) {
          moments_of_rows(in + offset, rows, c, p);
        });
    for (int64_t j = 0; j < c; ++j) {
      Partial total = {};
      for (int64_t s = 0; s < splits; ++s) {
        const Partial& p = partials[s * c + j];
        if (p.count > 0) merge_moments(&total, p.count, p.first, p.second);
      }
      const double r = 1 / std::sqrt(total.second / total.count + eps);
      mean_out[j] = static_cast<A>(total.first);
      rstd_out[j] = static_cast<A>(r);
      scale[j] = static_cast<A>(r * weight_of(affine, j));
      // What rounding the mean took away goes into the shift.
      shift[j] = static_cast<A>(bias_of(affine, j) -
                                (total.first - mean_out[j]) * r * weight_of(affine, j));
      update_buffer(buffers.mean, buffers.dtype, j, momentum, total.first);
      update_buffer(buffers.var, buffers.dtype, j, momentum, total.second / (total.count - 1));
    }
    normalize(shape, in, mean_out, scale, shift, static_cast<T*>(y));
  });
}

void batch_norm_evaluation(Stream, const BatchNormShape& shape, const void* x,
                           const BatchNormAffine& affine, const BatchNormBuffers& buffers,
                           double eps, void* y, void* mean, void* rstd) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    std::vector<A> scale(shape.c), shift(shape.c);
    A* mean_out = static_cast<A*>(mean);
    A* rstd_out = static_cast<A*>(rstd);
    for (int64_t j = 0; j < shape.c; ++j) {
      const double r = 1 / std::sqrt(load_as_double(buffers.var, buffers.dtype, j) + eps);
      mean_out[j] = static_cast<A>(load_as_double(buffers.mean, buffers.dtype, j));
      rstd_out[j] = static_cast<A>(r);
      scale[j] = static_cast<A>(r * weight_of(affine, j));
      shift[j] = static_cast<A>(bias_of(affine, j));
    }
    normalize(shape, static_cast<const T*>(x), mean_out, scale.data(), shift.data(),
              static_cast<T*>(y));
  });
}

void batch_norm_backward(Stream, const BatchNormShape& shape, bool training, const void* dy,
                         const void* x, const BatchNormAffine& affine, const void* mean,
                         const void* rstd, void* dx, void* dweight, void* dbias, void* workspace) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const T* grad = static_cast<const T*>(dy);
    const T* in = static_cast<const T*>(x);
    const A* center = static_cast<const A*>(mean);
    const A* r = static_cast<const A*>(rstd);
    const int64_t splits = split_count(shape), c = shape.c;
    Partial* partials = static_cast<Partial*>(workspace);
    const bool with_sums = dweight || dbias || (dx && training);
    if (with_sums) {
      reduce(
          shape, partials,
          [&](int64_t offset, int64_t channel, Partial* p) {
            sums_of_plane(grad + offset, in + offset, center[channel], shape.inner, p);
          },
          [&](int64_t offset, int64_t rows, Partial* p) {
            sums_of_rows(grad + offset, in + offset, center, rows, c, p);
          });
    }
    // dx = dy * by_grad + (x - mean) * by_input + offset.
    A* by_grad = reinterpret_cast<A*>(partials + splits * c);
    A* by_input = by_grad + c;
    A* offset = by_input + c;
    for (int64_t j = 0; j < c; ++j) {
      double sum = 0, dot = 0;
      for (int64_t s = 0; with_sums && s < splits; ++s) {
        sum += partials[s * c + j].first;
        dot += partials[s * c + j].second;
      }
      if (dweight) store_from_double(dweight, affine.dtype, j, dot * r[j]);
      if (dbias) store_from_double(dbias, affine.dtype, j, sum);
      const double scale = r[j] * weight_of(affine, j), count = static_cast<double>(shape.count());
      by_grad[j] = static_cast<A>(scale);
      by_input[j] = static_cast<A>(-scale * r[j] * r[j] * dot / count);
      offset[j] = static_cast<A>(-scale * sum / count);
    }
    if (!dx) return;
    T* out = static_cast<T*>(dx);
    apply(shape, [&](int64_t first, int64_t n, auto at) {
      const T* g = grad + first;
      const T* v = in + first;
      T* result = out + first;
      if (training) {
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) {
          result[j] = static_cast<A>(g[j]) * at(by_grad, j) +
                      (static_cast<A>(v[j]) - at(center, j)) * at(by_input, j) + at(offset, j);
        }
      } else {
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) result[j] = static_cast<A>(g[j]) * at(by_grad, j);
      }
    });
  });
}

}  // namespace braze::cpu
