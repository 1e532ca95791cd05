// Batch norm's statistics on the CPU: each channel's elements are cut into blocks that stay in
// cache; a block is passed over twice, for its mean and for the sum of squares about it, and blocks
// are merged in float64 by Chan's formula. So a mean much larger than the deviation costs no
// accuracy. Cuts depend on the shape alone, so results do not depend on the number of threads.
#include "launchers/batch_norm.h"

#include <cmath>
#include <vector>

#include "cpu/batch_norm/batch_norm_parts.h"

namespace braze::cpu {
namespace {

constexpr int64_t kBlock = 4096;  // elements of a channel passed over twice, [n, c, inner]

// Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"
// (1979).
void merge_moments(Partial* a, double count, double mean, double m2) {
  const double total = a->count + count, delta = mean - a->first;
  a->first += delta * count / total;
  a->second += m2 + delta * delta * a->count * count / total;
  a->count = total;
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

double bias_of(const BatchNormAffine& affine, int64_t channel) {
  return affine.bias ? load_as_double(affine.bias, affine.dtype, channel) : 0.0;
}

void update_buffer(void* buffer, DType dtype, int64_t channel, double momentum, double value) {
  if (!buffer) return;
  const double previous = load_as_double(buffer, dtype, channel);
  store_from_double(buffer, dtype, channel, (1 - momentum) * previous + momentum * value);
}

// BatchNormStatistics to be written.
template <typename A>
struct Coefficients {
  A* mean;
  A* rstd;
  A* scale;
  A* shift;

  explicit Coefficients(const BatchNormStatistics& s)
      : mean(static_cast<A*>(s.mean)),
        rstd(static_cast<A*>(s.rstd)),
        scale(static_cast<A*>(s.scale)),
        shift(static_cast<A*>(s.shift)) {}
};

// Calls f(channel, its moments).
template <typename T, typename F>
void for_each_channels_moments(const BatchNormShape& shape, const T* x, Partial* partials,
                               const F& f) {
  const int64_t splits = split_count(shape), c = shape.c;
  reduce(
      shape, partials,
      [&](int64_t offset, int64_t, Partial* p) { moments_of_plane(x + offset, shape.inner, p); },
      [&](int64_t offset, int64_t rows, Partial* p) { moments_of_rows(x + offset, rows, c, p); });
  for (int64_t j = 0; j < c; ++j) {
    Partial total = {};
    for (int64_t s = 0; s < splits; ++s) {
      const Partial& p = partials[s * c + j];
      if (p.count > 0) merge_moments(&total, p.count, p.first, p.second);
    }
    f(j, total);
  }
}

// What follows from a channel's moments, in training.
template <typename A>
class BatchCoefficients {
 public:
  BatchCoefficients(const BatchNormAffine& affine, const BatchNormBuffers& buffers, double eps,
                    const BatchNormStatistics& statistics)
      : affine(affine), buffers(buffers), eps(eps), k(statistics) {
    if (buffers.batches) ++*buffers.batches;
    momentum = buffers.momentum  ? *buffers.momentum
               : buffers.batches ? 1.0 / *buffers.batches
                                 : 0.0;
  }

  void operator()(int64_t j, const Partial& total) const {
    const double r = 1 / std::sqrt(total.second / total.count + eps);
    k.mean[j] = static_cast<A>(total.first);
    k.rstd[j] = static_cast<A>(r);
    k.scale[j] = static_cast<A>(r * weight_of(affine, j));
    // What rounding the mean took away goes into the shift.
    k.shift[j] =
        static_cast<A>(bias_of(affine, j) - (total.first - k.mean[j]) * r * weight_of(affine, j));
    update_buffer(buffers.mean, buffers.dtype, j, momentum, total.first);
    update_buffer(buffers.var, buffers.dtype, j, momentum, total.second / (total.count - 1));
  }

 private:
  const BatchNormAffine& affine;
  const BatchNormBuffers& buffers;
  double eps, momentum;
  Coefficients<A> k;
};

template <typename A>
void running_coefficients(const BatchNormShape& shape, const BatchNormAffine& affine,
                          const BatchNormBuffers& buffers, double eps, const Coefficients<A>& k) {
  for (int64_t j = 0; j < shape.c; ++j) {
    const double r = 1 / std::sqrt(load_as_double(buffers.var, buffers.dtype, j) + eps);
    k.mean[j] = static_cast<A>(load_as_double(buffers.mean, buffers.dtype, j));
    k.rstd[j] = static_cast<A>(r);
    k.scale[j] = static_cast<A>(r * weight_of(affine, j));
    k.shift[j] = static_cast<A>(bias_of(affine, j));
  }
}

constexpr KernelInfo kKernel = {"batch_norm",
                                "two_pass_blocks",
                                "float64 float32 bfloat16 float16",
                                "cpu",
                                true,
                                "blocks in cache passed over twice, merged in float64"};
const KernelEntry kEntry(kKernel);

}  // namespace

int64_t batch_norm_workspace_bytes(const BatchNormShape& shape) {
  // Partial results, then three coefficients per channel.
  return split_count(shape) * shape.c * sizeof(Partial) + 3 * shape.c * sizeof(double);
}

void batch_norm_coefficients(Stream, const BatchNormShape& shape, bool training, const void* x,
                             const ChannelMoments&, const BatchNormAffine& affine,
                             const BatchNormBuffers& buffers, double eps,
                             const BatchNormStatistics& statistics, void* workspace) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    if (training) {
      for_each_channels_moments(shape, static_cast<const T*>(x), static_cast<Partial*>(workspace),
                                BatchCoefficients<A>(affine, buffers, eps, statistics));
    } else {
      running_coefficients(shape, affine, buffers, eps, Coefficients<A>(statistics));
    }
  });
}

void batch_norm_moments(Stream, const BatchNormShape& shape, const void* x, MomentsPartial* moments,
                        void* workspace) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_channels_moments(shape, static_cast<const T*>(x), static_cast<Partial*>(workspace),
                              [&](int64_t j, const Partial& total) {
                                moments[j] = {total.first, total.second, total.count};
                              });
  });
}

void batch_norm_merge(Stream, const BatchNormShape& shape, const MomentsPartial* moments, int parts,
                      const BatchNormAffine& affine, const BatchNormBuffers& buffers, double eps,
                      const BatchNormStatistics& statistics, double* total) {
  *total = 0;
  for (int i = 0; i < parts; ++i) *total += moments[i].count;
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const BatchCoefficients<acc_t<T>> coefficients(affine, buffers, eps, statistics);
    if (*total == 0) return;
    for (int64_t j = 0; j < shape.c; ++j) {
      Partial merged = {};
      for (int i = 0; i < parts; ++i) {
        const MomentsPartial& part = moments[j * parts + i];
        if (part.count > 0) merge_moments(&merged, part.count, part.mean, part.squares);
      }
      coefficients(j, merged);
    }
  });
}

void batch_norm_train(Stream stream, const BatchNormShape& shape, const void* x,
                      const BatchNormAffine& affine, const BatchNormBuffers& buffers, double eps,
                      const BatchNormTail& tail, const BatchNormStatistics& statistics, void* y,
                      void* mask, void* workspace) {
  batch_norm_coefficients(stream, shape, true, x, {}, affine, buffers, eps, statistics, workspace);
  batch_norm_apply(stream, shape, x, tail, statistics, y, mask);
}

const KernelInfo* batch_norm_rung_info(int number) { return number == 0 ? &kKernel : nullptr; }

void batch_norm_rung(Stream stream, const BatchNormShape& shape, const void* x,
                     const BatchNormAffine& affine, const BatchNormBuffers& buffers, double eps,
                     const BatchNormStatistics& statistics, void* y, void* workspace, int) {
  batch_norm_train(stream, shape, x, affine, buffers, eps, {}, statistics, y, nullptr, workspace);
}

}  // namespace braze::cpu
