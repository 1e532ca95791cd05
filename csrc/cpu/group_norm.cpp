#include "launchers/group_norm.h"

#include <algorithm>
#include <vector>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "cpu/common/row_norm.h"

namespace braze::cpu {
namespace {

constexpr int64_t kGrainElements = 16384;  // of a task

const KernelEntry kEntry({"group_norm", "planes", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised along the plane"});

// Calls f(row) for each group of each image, on many threads.
template <typename F>
void for_each_group(const GroupNormShape& shape, const F& f) {
  const int64_t grain = ceil_div(kGrainElements, std::max<int64_t>(shape.size(), 1));
  parallel_for(0, shape.rows(), grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) f(row);
  });
}

template <typename T, typename A>
void normalise_plane(const T* x, const RowStatistics<A>& norm, A weight, A bias, T* y,
                     int64_t inner) {
  const auto [pivot, rest, rstd] = norm;
  const A scale = rstd * weight;
#pragma omp simd
  for (int64_t i = 0; i < inner; ++i) y[i] = T(((A(x[i]) - pivot) - rest) * scale + bias);
}

// The parameter's gradient: the planes' sums over the images.
template <typename A>
void merge_images(const GroupNormShape& shape, const A* sums, DType dtype, void* out) {
  if (!out) return;
  dispatch(dtype, [&](auto tag) {
    using P = typename decltype(tag)::type;
    for (int64_t c = 0; c < shape.c; ++c) {
      double sum = 0;
      for (int64_t n = 0; n < shape.n; ++n) sum += sums[n * shape.c + c];
      static_cast<P*>(out)[c] = P(static_cast<acc_t<P>>(sum));
    }
  });
}

// Sums of each plane, [n, c]: of dy, and of dy xhat.
struct PlaneSums {
  double* sum;
  double* dot;
};

// dx of a group, and the sums of its planes.
template <typename T, typename A>
void group_gradient(const GroupNormShape& shape, int64_t row, const T* dy, const T* x, A mean,
                    A rstd, const A* weight, const PlaneSums& sums, T* dx) {
  const int64_t inner = shape.inner, first = row * shape.channels();
  double total = 0, total_dot = 0;
  for (int64_t plane = first; plane < first + shape.channels(); ++plane) {
    const T *g = dy + plane * inner, *in = x + plane * inner;
    const double sum = row_sum<A>(inner, [=](int64_t i) { return A(g[i]); });
    const double dot =
        row_sum<A>(inner, [=](int64_t i) { return A(g[i]) * ((A(in[i]) - mean) * rstd); });
    sums.sum[plane] = sum;
    sums.dot[plane] = dot;
    total += sum * weight[plane % shape.c];
    total_dot += dot * weight[plane % shape.c];
  }
  if (!dx) return;
  const double size = static_cast<double>(shape.size());
  const A by_count = static_cast<A>(total / size), by_xhat = static_cast<A>(total_dot / size);
  for (int64_t plane = first; plane < first + shape.channels(); ++plane) {
    const T *g = dy + plane * inner, *in = x + plane * inner;
    T* const result = dx + plane * inner;
    const A w = weight[plane % shape.c];
#pragma omp simd
    for (int64_t i = 0; i < inner; ++i) {
      const A xhat = (A(in[i]) - mean) * rstd;
      result[i] = T((A(g[i]) * w - by_count - xhat * by_xhat) * rstd);
    }
  }
}

}  // namespace

bool group_norm_takes_channels_last() { return false; }
bool group_norm_takes_activation(const GroupNormShape&) { return false; }
bool group_norm_takes_float32(const GroupNormShape&) { return false; }

int64_t group_norm_forward_workspace_bytes(const GroupNormShape&) { return 0; }

void group_norm(Stream, const GroupNormShape& shape, const void* x, const BatchNormAffine& affine,
                double eps, void* y, void* mean, void* rstd, void*) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const auto weight = parameters<A>(affine.weight, affine.dtype, shape.c, 1);
    const auto bias = parameters<A>(affine.bias, affine.dtype, shape.c, 0);
    for_each_group(shape, [&](int64_t row) {
      const T* in = static_cast<const T*>(x) + row * shape.size();
      T* const out = static_cast<T*>(y) + row * shape.size();
      const RowStatistics<A> norm = statistics_of<T, A>(in, shape.size(), eps);
      static_cast<A*>(mean)[row] = norm.pivot + norm.rest;
      static_cast<A*>(rstd)[row] = norm.rstd;
      for (int64_t c = 0; c < shape.channels(); ++c) {
        const int64_t channel = row % shape.groups * shape.channels() + c, at = c * shape.inner;
        normalise_plane(in + at, norm, weight[channel], bias[channel], out + at, shape.inner);
      }
    });
  });
}

int64_t group_norm_workspace_bytes(const GroupNormShape& shape) {
  return 2 * shape.planes() * static_cast<int64_t>(sizeof(double));
}

void group_norm_backward(Stream, const GroupNormShape& shape, const void* dy, const void* x,
                         const BatchNormAffine& affine, const void* mean, const void* rstd,
                         const GroupNormGradients& gradients, void* workspace) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    auto* const memory = static_cast<double*>(workspace);
    const PlaneSums sums{memory, memory + shape.planes()};
    const auto weight = parameters<A>(affine.weight, affine.dtype, shape.c, 1);
    for_each_group(shape, [&](int64_t row) {
      group_gradient(shape, row, static_cast<const T*>(dy), static_cast<const T*>(x),
                     static_cast<const A*>(mean)[row], static_cast<const A*>(rstd)[row],
                     weight.data(), sums, static_cast<T*>(gradients.x));
    });
    merge_images(shape, sums.dot, gradients.parameter_dtype, gradients.weight);
    merge_images(shape, sums.sum, gradients.parameter_dtype, gradients.bias);
  });
}

}  // namespace braze::cpu
