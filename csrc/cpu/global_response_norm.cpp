#include "launchers/global_response_norm.h"

#include <cmath>
#include <vector>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "cpu/common/row_norm.h"

namespace braze::cpu {
namespace {

const KernelEntry kEntry({"global_response_norm", "images", "float64 float32 bfloat16 float16",
                          "cpu", true, "an image per task"});

// Sums of a channel's pixels are taken of so many of them in the accumulation type.
constexpr int64_t kRun = 128;

// to[j][c] = the sum over the pixels of what f(j, element's offset) of each channel is, in float64.
template <typename A, int kSums, typename F>
void channel_sums(const ChannelScaleShape& shape, std::vector<double> (&to)[kSums], const F& f) {
  const int64_t c = shape.c, pixels = shape.pixels;
  for (auto& sums : to) sums.assign(c, 0.0);
  if (!shape.channels_last) {
    for (int64_t i = 0; i < c; ++i) {
      for (int j = 0; j < kSums; ++j) {
        to[j][i] = row_sum<A>(pixels, [&](int64_t p) { return f(j, i * pixels + p); });
      }
    }
    return;
  }
  std::vector<A> run(c);
  for (int j = 0; j < kSums; ++j) {
    for (int64_t begin = 0; begin < pixels; begin += kRun) {
      std::fill(run.begin(), run.end(), A(0));
      A* const sums = run.data();
      for (int64_t p = begin; p < std::min(begin + kRun, pixels); ++p) {
#pragma omp simd
        for (int64_t i = 0; i < c; ++i) sums[i] += f(j, p * c + i);
      }
      for (int64_t i = 0; i < c; ++i) to[j][i] += sums[i];
    }
  }
}

// f(element's offset, channel) of an image.
template <typename F>
void each_element(const ChannelScaleShape& shape, const F& f) {
  const int64_t c = shape.c, pixels = shape.pixels;
  const int64_t outer = shape.channels_last ? pixels : c, inner = shape.channels_last ? c : pixels;
  for (int64_t o = 0; o < outer; ++o) {
    if (shape.channels_last) {
#pragma omp simd
      for (int64_t i = 0; i < inner; ++i) f(o * inner + i, i);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < inner; ++i) f(o * inner + i, o);
    }
  }
}

}  // namespace

void global_response_norm(Stream, const ChannelScaleShape& shape, const void* x,
                          const ResponseNormParameters& parameters, double eps, void* y,
                          void* norms, void* scales) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const int64_t c = shape.c, size = c * shape.pixels;
    const auto weight = braze::cpu::parameters<A>(parameters.weight, parameters.dtype, c, 1);
    const auto bias = braze::cpu::parameters<A>(parameters.bias, parameters.dtype, c, 0);
    parallel_for(0, shape.n, 1, [&](int64_t first, int64_t last) {
      std::vector<double> squares[1];
      std::vector<A> slopes(c);
      for (int64_t image = first; image < last; ++image) {
        const T* const in = static_cast<const T*>(x) + image * size;
        T* const out = static_cast<T*>(y) + image * size;
        A* const g = static_cast<A*>(norms) + image * c;
        channel_sums<A>(shape, squares, [in](int, int64_t at) {
          const A v = A(in[at]);
          return v * v;
        });
        double sum = 0;
        for (int64_t i = 0; i < c; ++i) {
          g[i] = static_cast<A>(std::sqrt(squares[0][i]));
          sum += g[i];
        }
        const A r = static_cast<A>(1 / (sum / static_cast<double>(c) + eps));
        static_cast<A*>(scales)[image] = r;
        for (int64_t i = 0; i < c; ++i) slopes[i] = A(1) + weight[i] * (g[i] * r);
        const A *slope = slopes.data(), *shift = bias.data();
        each_element(shape,
                     [=](int64_t at, int64_t i) { out[at] = T(A(in[at]) * slope[i] + shift[i]); });
      }
    });
  });
}

// Sums over pixels for dweight and for dbias, of each image.
int64_t global_response_norm_backward_workspace_bytes(const ChannelScaleShape& shape) {
  return 2 * shape.n * shape.c * static_cast<int64_t>(sizeof(double));
}

void global_response_norm_backward(Stream, const ChannelScaleShape& shape, const void* dy,
                                   const void* x, const ResponseNormParameters& parameters,
                                   const void* norms, const void* scales,
                                   const ResponseNormGradients& gradients, void* workspace) {
  double* const partials = static_cast<double*>(workspace);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const int64_t c = shape.c, size = c * shape.pixels;
    const auto weight = braze::cpu::parameters<A>(parameters.weight, parameters.dtype, c, 1);
    parallel_for(0, shape.n, 1, [&](int64_t first, int64_t last) {
      std::vector<double> sums[2];
      std::vector<A> slopes(c), by_inputs(c);
      for (int64_t image = first; image < last; ++image) {
        const T* const grad = static_cast<const T*>(dy) + image * size;
        const T* const in = static_cast<const T*>(x) + image * size;
        const A* const g = static_cast<const A*>(norms) + image * c;
        const A r = static_cast<const A*>(scales)[image];
        channel_sums<A>(shape, sums, [=](int j, int64_t at) {
          return j == 0 ? A(grad[at]) * A(in[at]) : A(grad[at]);
        });
        double products = 0;
        for (int64_t i = 0; i < c; ++i) products += weight[i] * sums[0][i] * g[i];
        const double of_mean = products / static_cast<double>(c) * r * r;
        for (int64_t i = 0; i < c; ++i) {
          const double slope = weight[i] * sums[0][i] * r - of_mean;
          slopes[i] = A(1) + weight[i] * (g[i] * r);
          by_inputs[i] = g[i] == A(0) ? A(0) : static_cast<A>(slope / g[i]);
          partials[(2 * image) * c + i] = sums[0][i] * g[i] * r;
          partials[(2 * image + 1) * c + i] = sums[1][i];
        }
        if (!gradients.x) continue;
        T* const dx = static_cast<T*>(gradients.x) + image * size;
        const A *slope = slopes.data(), *by_input = by_inputs.data();
        each_element(shape, [=](int64_t at, int64_t i) {
          dx[at] = T(A(grad[at]) * slope[i] + A(in[at]) * by_input[i]);
        });
      }
    });
    if (!gradients.weight) return;
    dispatch(parameters.dtype, [&](auto parameter_tag) {
      using P = typename decltype(parameter_tag)::type;
      for (int64_t i = 0; i < c; ++i) {
        double dweight = 0, dbias = 0;
        for (int64_t image = 0; image < shape.n; ++image) {
          dweight += partials[(2 * image) * c + i];
          dbias += partials[(2 * image + 1) * c + i];
        }
        static_cast<P*>(gradients.weight)[i] = P(static_cast<acc_t<P>>(dweight));
        static_cast<P*>(gradients.bias)[i] = P(static_cast<acc_t<P>>(dbias));
      }
    });
  });
}

}  // namespace braze::cpu
