#include "launchers/layer_norm.h"

#include <algorithm>
#include <vector>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "cpu/common/row_norm.h"

namespace braze::cpu {
namespace {

constexpr int64_t kGrainElements = 16384;  // of a task
constexpr int64_t kMostParts = 32;  // that the rows of the parameters' gradients are cut into
constexpr int64_t kRowBlock = 64;   // rows summed before float64 takes over

const KernelEntry kEntry({"layer_norm", "rows", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised along the row"});

// f(input tag, result tag) for the pairs of dtypes that exist.
template <typename F>
void dispatch_pair(const LayerNormShape& shape, F&& f) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      if (shape.result == DType::kFloat32) return f(tag, TypeTag<float>{});
    } else if constexpr (sizeof(T) == 4) {
      if (shape.result == DType::kBFloat16) return f(tag, TypeTag<BFloat16>{});
      if (shape.result == DType::kFloat16) return f(tag, TypeTag<Half>{});
    }
    f(tag, tag);
  });
}

template <typename In, typename Out, typename A>
void normalise(const In* x, const RowStatistics<A>& row, const A* weight, const A* bias, Out* y,
               int64_t size) {
  const auto [pivot, rest, rstd] = row;
#pragma omp simd
  for (int64_t c = 0; c < size; ++c) {
    y[c] = Out(((A(x[c]) - pivot) - rest) * rstd * weight[c] + bias[c]);
  }
}

template <typename In, typename Out, typename A>
void row_gradient(const Out* dy, const In* x, A mean, A rstd, const A* weight, In* dx,
                  int64_t size) {
  const double sum = row_sum<A>(size, [=](int64_t c) { return A(dy[c]) * weight[c]; });
  const double dot =
      row_sum<A>(size, [=](int64_t c) { return A(dy[c]) * weight[c] * ((A(x[c]) - mean) * rstd); });
  const double count = static_cast<double>(size);
  const A by_count = static_cast<A>(sum / count), by_xhat = static_cast<A>(dot / count);
#pragma omp simd
  for (int64_t c = 0; c < size; ++c) {
    const A xhat = (A(x[c]) - mean) * rstd;
    dx[c] = In((A(dy[c]) * weight[c] - by_count - xhat * by_xhat) * rstd);
  }
}

// The same number for any number of threads, so that sums have the same order.
int64_t parts_of(const LayerNormShape& shape) {
  return std::clamp<int64_t>(shape.count() / kGrainElements, 1,
                             std::min(kMostParts, std::max<int64_t>(shape.rows, 1)));
}

// Adds rows [first, last) to the parameters' gradients: weight's, then bias', [size] each.
template <typename In, typename Out, typename A>
void parameter_sums(const Out* dy, const In* x, const A* mean, const A* rstd, int64_t first,
                    int64_t last, int64_t size, double* sums) {
  std::vector<A> block(2 * size);
  A *dweight = block.data(), *dbias = dweight + size;
  std::fill_n(sums, 2 * size, 0.0);
  for (int64_t begin = first; begin < last; begin += kRowBlock) {
    std::fill(block.begin(), block.end(), A(0));
    for (int64_t r = begin; r < std::min(begin + kRowBlock, last); ++r) {
      const Out* g = dy + r * size;
      const In* in = x + r * size;
      const A m = mean[r], s = rstd[r];
#pragma omp simd
      for (int64_t c = 0; c < size; ++c) {
        dweight[c] += A(g[c]) * ((A(in[c]) - m) * s);
        dbias[c] += A(g[c]);
      }
    }
    for (int64_t c = 0; c < 2 * size; ++c) sums[c] += block[c];
  }
}

void merge_sums(const double* sums, int64_t parts, int64_t size, DType dtype, void* out) {
  if (!out) return;
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t c = 0; c < size; ++c) {
      double sum = 0;
      for (int64_t p = 0; p < parts; ++p) sum += sums[2 * p * size + c];
      static_cast<T*>(out)[c] = T(static_cast<acc_t<T>>(sum));
    }
  });
}

}  // namespace

bool layer_norm_takes(const LayerNormShape&, int64_t inner) { return inner == 1; }

void layer_norm(Stream, const LayerNormShape& shape, const void* x, const BatchNormAffine& affine,
                double eps, void* y, void* mean, void* rstd) {
  dispatch_pair(shape, [&](auto in_tag, auto out_tag) {
    using In = typename decltype(in_tag)::type;
    using Out = typename decltype(out_tag)::type;
    using A = acc_t<In>;
    const int64_t size = shape.size;
    const auto weight = parameters<A>(affine.weight, affine.dtype, size, 1);
    const auto bias = parameters<A>(affine.bias, affine.dtype, size, 0);
    const int64_t grain = ceil_div(kGrainElements, std::max<int64_t>(size, 1));
    parallel_for(0, shape.rows, grain, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const In* in = static_cast<const In*>(x) + r * size;
        const RowStatistics<A> row = statistics_of<In, A>(in, size, eps);
        static_cast<A*>(mean)[r] = row.pivot + row.rest;
        static_cast<A*>(rstd)[r] = row.rstd;
        normalise(in, row, weight.data(), bias.data(), static_cast<Out*>(y) + r * size, size);
      }
    });
  });
}

int64_t layer_norm_workspace_bytes(const LayerNormShape& shape) {
  return parts_of(shape) * 2 * shape.size * static_cast<int64_t>(sizeof(double));
}

void layer_norm_backward(Stream, const LayerNormShape& shape, const void* dy, const void* x,
                         const BatchNormAffine& affine, const void* mean, const void* rstd,
                         const LayerNormGradients& gradients, void* workspace) {
  dispatch_pair(shape, [&](auto in_tag, auto out_tag) {
    using In = typename decltype(in_tag)::type;
    using Out = typename decltype(out_tag)::type;
    using A = acc_t<In>;
    const int64_t size = shape.size, parts = parts_of(shape);
    const Out* grad = static_cast<const Out*>(dy);
    const A *m = static_cast<const A*>(mean), *s = static_cast<const A*>(rstd);
    const In* in = static_cast<const In*>(x);
    auto* const sums = static_cast<double*>(workspace);
    const auto weight = parameters<A>(affine.weight, affine.dtype, size, 1);
    const bool of_parameters = gradients.weight || gradients.bias;
    parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const int64_t first = shape.rows * p / parts, last = shape.rows * (p + 1) / parts;
        if (of_parameters) parameter_sums(grad, in, m, s, first, last, size, sums + 2 * p * size);
        if (!gradients.x) continue;
        for (int64_t r = first; r < last; ++r) {
          row_gradient(grad + r * size, in + r * size, m[r], s[r], weight.data(),
                       static_cast<In*>(gradients.x) + r * size, size);
        }
      }
    });
    if (!of_parameters) return;
    merge_sums(sums, parts, size, gradients.parameter_dtype, gradients.weight);
    merge_sums(sums + size, parts, size, gradients.parameter_dtype, gradients.bias);
  });
}

}  // namespace braze::cpu
