// conv_bn_relu_max_pool2d.h on the CPU. A vector's lanes are filters, so that every multiply-add
// takes a vector of weights and one broadcast input value; threads split the images.
#include "launchers/conv_bn_relu_max_pool2d.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "cpu/common/transpose_matrix.h"
#include "cpu/conv_bn_relu_max_pool2d/small_k_gradient.h"
#include "cpu/conv_bn_relu_max_pool2d/small_k_image.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

constexpr int kTapBlock = 3;  // taps whose products with as many others are summed together

// products[i][j]: the sums over a patch's positions of pixel i * pixel j, of pixels at `rows` and
// `columns`, kTapBlock of each; sums[i]: those of pixel i.
void sum_products(const SmallKShape& a, const PaddedImage<double>& image, const int64_t* rows,
                  const int64_t* columns, double (&products)[kTapBlock][kTapBlock],
                  double (&sums)[kTapBlock]) {
  using V = vec_t<double>;
  using Mask = decltype(V{} == V{});
  constexpr int64_t kL = kLanes<double>;
  // Lanes beyond a row's last position are zeroed on both sides: they may hold inf or NaN.
  const int64_t full = a.q / kL * kL;
  Mask tail;
  for (int64_t l = 0; l < kL; ++l) tail[l] = full + l < a.q ? -1 : 0;
  const auto at = [&](int64_t i, bool whole) {
    const V v = load<V>(&image.values[i]);
    return whole ? v : reinterpret_cast<V>(reinterpret_cast<Mask>(v) & tail);
  };
  V total[kTapBlock][kTapBlock] = {}, plain[kTapBlock] = {};
  for (int64_t p = 0; p < a.p; ++p) {
    const auto add = [&](int64_t position, bool whole) {
      V x[kTapBlock], y[kTapBlock];
#pragma GCC unroll 3
      for (int i = 0; i < kTapBlock; ++i) {
        x[i] = at(rows[i] + position, whole), y[i] = at(columns[i] + position, whole);
        plain[i] += x[i];
      }
#pragma GCC unroll 3
      for (int i = 0; i < kTapBlock; ++i) {
#pragma GCC unroll 3
        for (int j = 0; j < kTapBlock; ++j) total[i][j] += x[i] * y[j];
      }
    };
    const int64_t row = p * image.pitch;
    for (int64_t q = 0; q < full; q += kL) add(row + q, true);
    if (full < a.q) add(row + full, false);
  }
  for (int i = 0; i < kTapBlock; ++i) {
    sums[i] = 0;
    for (int64_t l = 0; l < kL; ++l) sums[i] += plain[i][l];
    for (int j = 0; j < kTapBlock; ++j) {
      products[i][j] = 0;
      for (int64_t l = 0; l < kL; ++l) products[i][j] += total[i][j][l];
    }
  }
}

// Sums of p_i and p_i p_j (j >= i) over all patches.
template <typename T>
std::vector<double> moments(const SmallKShape& a, const T* x) {
  const int64_t taps = a.c * a.r * a.s, size = taps + taps * (taps + 1) / 2;
  OrderedSum result(size);
  parallel_for(0, a.n, 8, [&](int64_t first, int64_t last) {
    PaddedImage<double> image(a);
    std::vector<double> sums(size);
    std::vector<int64_t> offsets = image.taps;  // those added are of no use
    offsets.resize(ceil_div(taps, kTapBlock) * kTapBlock);
    // Of the pairs (i, j): those of i come behind all of smaller ones.
    const auto pair = [&](int64_t i, int64_t j) { return taps + i * taps - i * (i + 1) / 2 + j; };
    for (int64_t n = first; n < last; ++n) {
      image.load(a, x, n);
      for (int64_t i = 0; i < taps; i += kTapBlock) {
        for (int64_t j = i; j < taps; j += kTapBlock) {
          double products[kTapBlock][kTapBlock], plain[kTapBlock];
          sum_products(a, image, &offsets[i], &offsets[j], products, plain);
          for (int64_t k = i; k < std::min(i + kTapBlock, taps); ++k) {
            if (j == i) sums[k] += plain[k - i];
            for (int64_t l = std::max(j, k); l < std::min(j + kTapBlock, taps); ++l) {
              sums[pair(k, l)] += products[k - i][l - j];
            }
          }
        }
      }
    }
    result.add(first, std::move(sums));
  });
  return result.total();
}

template <typename P>
double param(const void* values, int64_t i, double absent) {
  return values ? static_cast<double>(static_cast<acc_t<P>>(static_cast<const P*>(values)[i]))
                : absent;
}

// Statistics of each filter's output from the moments, the running statistics, and what backward
// needs, in `saved`.
template <typename T, typename P>
void finalize(const SmallKShape& a, const SmallKNorm& norm, const double* sums, const T* w,
              double* saved) {
  const int64_t taps = a.c * a.r * a.s;
  const double count = static_cast<double>(a.n * a.p * a.q);
  double* mean = saved;
  double* covariance = saved + taps;
  double* filter_mean = covariance + taps * taps;
  double* filter_rstd = filter_mean + a.k;
  double factor = norm.momentum;
  if (norm.training) {
    for (int64_t i = 0; i < taps; ++i) mean[i] = sums[i] / count;
    int64_t pair = taps;
    for (int64_t i = 0; i < taps; ++i) {
      for (int64_t j = i; j < taps; ++j) {
        const double value = sums[pair++] / count - mean[i] * mean[j];
        covariance[i * taps + j] = covariance[j * taps + i] = value;
      }
    }
    if (norm.batches && !norm.cumulative) *norm.batches += 1;
    if (norm.cumulative) factor = 1.0 / static_cast<double>(*norm.batches);
  }
  for (int64_t k = 0; k < a.k; ++k) {
    const double bias = param<T>(norm.conv_bias, k, 0);
    double mu = 0, var = 0;  // of the bias-free convolution
    if (norm.training) {
      for (int64_t i = 0; i < taps; ++i) {
        const double wi = static_cast<acc_t<T>>(w[k * taps + i]);
        mu += wi * mean[i];
        for (int64_t j = 0; j < taps; ++j) {
          var += wi * covariance[i * taps + j] * static_cast<acc_t<T>>(w[k * taps + j]);
        }
      }
      var = std::max(var, 0.0);
      if (norm.running_mean) {
        P& running_mean = static_cast<P*>(norm.running_mean)[k];
        P& running_var = static_cast<P*>(norm.running_var)[k];
        running_mean = P(static_cast<acc_t<P>>((1 - factor) * static_cast<acc_t<P>>(running_mean) +
                                               factor * (mu + bias)));
        running_var = P(static_cast<acc_t<P>>((1 - factor) * static_cast<acc_t<P>>(running_var) +
                                              factor * var * count / (count - 1)));
      }
    } else {
      mu = param<P>(norm.running_mean, k, 0) - bias;
      var = param<P>(norm.running_var, k, 1);
    }
    filter_mean[k] = mu;
    filter_rstd[k] = 1 / std::sqrt(var + norm.eps);
  }
}

// Convolution, normalisation, ReLU and pooling at one window for the filters of kVectors vectors.
// Of two a pixel's value is loaded once, and eight sums are under way: as many as hide a
// multiply-add's latency.
template <typename A, int kVectors>
struct PooledPixels {
  using V = vec_t<A>;
  using Positions = typename PooledImage<A>::Positions;
  V best[kVectors];
  Positions code[kVectors];

  // weights: [kVectors][taps]
  PooledPixels(const PaddedImage<A>& image, int64_t offset, const V* weights, const V* scale,
               const V* shift) {
    V z[kVectors][4] = {};
    const A* origin = image.values.data() + offset;
    const int64_t* taps = image.taps.data();
    const int64_t count = static_cast<int64_t>(image.taps.size()), pitch = image.pitch;
    for (int64_t t = 0; t < count; ++t) {
      const A* at = origin + taps[t];
      const A pixels[4] = {at[0], at[1], at[pitch], at[pitch + 1]};
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const V weight = weights[v * count + t];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) z[v][i] += weight * pixels[i];
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      best[v] = z[v][0] * scale[v] + shift[v];
      code[v] = Positions{};
#pragma GCC unroll 3
      for (int i = 1; i < 4; ++i) {
        const V other = z[v][i] * scale[v] + shift[v];
        // torch's rule: the first maximum wins, and NaN beats every number.
        const auto wins = (other > best[v]) | ((other != other) & (best[v] == best[v]));
        best[v] = wins ? other : best[v];
        code[v] = wins ? Positions{} + i : code[v];
      }
      const auto dead = best[v] <= V{};
      best[v] = dead ? V{} : best[v];
      code[v] = dead ? Positions{} + 4 : code[v];
    }
  }
};

// The pooled image to memory, in torch's layout. `narrow` has room for its values in 16 bits.
template <typename T>
void store_image(const SmallKShape& a, const PooledImage<acc_t<T>>& image, std::vector<T>& narrow,
                 T* y) {
  const acc_t<T>* const values = image.values.data();
  if (!a.channels_last) {
    const T* from;
    if constexpr (std::is_same_v<T, acc_t<T>>) {
      from = values;
    } else {
      narrow.resize(image.values.size());
      for (size_t i = 0; i < narrow.size(); ++i) narrow[i] = T(values[i]);
      from = narrow.data();
    }
    return transpose_matrix(y, image.pixels, from, image.width, a.k, image.pixels);
  }
  for (int64_t i = 0; i < image.pixels; ++i) {
    for (int64_t k = 0; k < a.k; ++k) y[i * a.k + k] = T(values[i * image.width + k]);
  }
}

template <typename T>
void forward(const SmallKShape& a, const T* x, const T* w, const double* scale_shift, T* y,
             uint32_t* codes) {
  using A = acc_t<T>;
  using V = vec_t<A>;
  using Pooled = PooledImage<A>;
  constexpr int64_t kL = kLanes<A>;
  const int64_t taps = a.c * a.r * a.s, vectors = ceil_div(a.k, kL);
  // Weights by tap with filters in the lanes; lanes beyond the last filter hold zeros.
  std::vector<V> weights(vectors * taps), scale(vectors), shift(vectors);
  for (int64_t k = 0; k < a.k; ++k) {
    const int64_t v = k / kL, lane = k % kL;
    for (int64_t t = 0; t < taps; ++t) {
      weights[v * taps + t][lane] = static_cast<A>(w[k * taps + t]);
    }
    scale[v][lane] = static_cast<A>(scale_shift[2 * k]);
    shift[v][lane] = static_cast<A>(scale_shift[2 * k + 1]);
  }
  parallel_for(0, a.n, 2, [&](int64_t first, int64_t last) {
    PaddedImage<A> image(a);
    Pooled pooled(a);
    std::vector<T> narrow;
    for (int64_t n = first; n < last; ++n) {
      image.load(a, x, n);
      T* result = y + n * a.k * pooled.pixels;
      A* values = pooled.values.data();
      if constexpr (std::is_same_v<T, A>) {
        if (pooled.template matches<T>(a)) values = result;
      }
      for (int64_t i = 0; i < pooled.pixels; ++i) {
        const int64_t corner = 2 * (i / pooled.q * image.pitch + i % pooled.q);
        const auto pool = [&](auto count, int64_t first_vector) {
          const PooledPixels<A, count.value> pixels(image, corner, &weights[first_vector * taps],
                                                    &scale[first_vector], &shift[first_vector]);
          for (int j = 0; j < count.value; ++j) {
            const int64_t v = first_vector + j;
            store(values + i * pooled.width + v * kL, pixels.best[j]);
            store(&pooled.codes[i * pooled.codes_width + v * kL],
                  __builtin_convertvector(pixels.code[j], typename Pooled::Codes));
          }
        };
        int64_t v = 0;
        for (; v + 1 < vectors; v += 2) pool(std::integral_constant<int, 2>{}, v);
        if (v < vectors) pool(std::integral_constant<int, 1>{}, v);
      }
      if (!pooled.template matches<T>(a)) store_image(a, pooled, narrow, result);
      pooled.pack_codes(codes + n * pooled.pixels * pooled.words);
    }
  });
}

template <typename F>
void dispatch_params(DType dtype, DType param_dtype, F&& f) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (dtype == param_dtype) {
      f(tag, tag);
    } else if constexpr (sizeof(T) == 2) {
      if (param_dtype != DType::kFloat32) {
        throw std::runtime_error("small_k: parameters have to be in the input's dtype or float32");
      }
      f(tag, TypeTag<float>{});
    } else {
      throw std::runtime_error("small_k: parameters have to be in the input's dtype or float32");
    }
  });
}

const KernelEntry kEntry({"conv_bn_relu_max_pool2d", "small_k", "float64 float32 bfloat16 float16",
                          "cpu", true,
                          "statistics from patch moments; no convolution output in memory"});

}  // namespace

bool small_k_supports(const SmallKShape& a) { return a.c * a.r * a.s <= 32; }

// One set.
void small_k_sum_moments(Stream, const SmallKShape& a, const void* x, double* sums,
                         int64_t* batches) {
  dispatch(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::vector<double> total = moments(a, static_cast<const T*>(x));
    std::copy(total.begin(), total.end(), sums);
  });
  if (batches) *batches += 1;
}

int64_t small_k_backward_workspace_bytes(const SmallKShape&) { return 0; }

void small_k_forward(Stream, const SmallKShape& a, const SmallKNorm& norm, const void* x,
                     const void* w, const double* moments, void* y, uint32_t* codes,
                     double* saved) {
  dispatch_params(a.dtype, norm.param_dtype, [&](auto tag, auto param_tag) {
    using T = typename decltype(tag)::type;
    using P = typename decltype(param_tag)::type;
    const T* in = static_cast<const T*>(x);
    const T* weight = static_cast<const T*>(w);
    finalize<T, P>(a, norm, moments, weight, saved);
    const int64_t taps = a.c * a.r * a.s;
    const double* mean = saved + taps + taps * taps;
    const double* rstd = mean + a.k;
    std::vector<double> scale_shift(2 * a.k);
    for (int64_t k = 0; k < a.k; ++k) {
      scale_shift[2 * k] = param<P>(norm.gamma, k, 1) * rstd[k];
      scale_shift[2 * k + 1] = param<P>(norm.beta, k, 0) - mean[k] * scale_shift[2 * k];
    }
    forward(a, in, weight, scale_shift.data(), static_cast<T*>(y), codes);
  });
}

void small_k_backward(Stream, const SmallKShape& a, const SmallKNorm& norm, const void* x,
                      const void* w, const void* dy, const uint32_t* codes, const double* saved,
                      void* dw, void* dgamma, void* dbeta, void* dbias, void*) {
  dispatch_params(a.dtype, norm.param_dtype, [&](auto tag, auto param_tag) {
    using T = typename decltype(tag)::type;
    using P = typename decltype(param_tag)::type;
    const T* weight = static_cast<const T*>(w);
    const int64_t taps = a.c * a.r * a.s;
    const std::vector<double> sums =
        gradient_sums(a, static_cast<const T*>(x), static_cast<const T*>(dy), codes);
    const double* mean = saved;
    const double* covariance = saved + taps;
    const double* filter_mean = covariance + taps * taps;
    const double* filter_rstd = filter_mean + a.k;
    const auto store = [](void* out, auto tag, int64_t i, double value) {
      using O = typename decltype(tag)::type;
      if (out) static_cast<O*>(out)[i] = O(static_cast<acc_t<O>>(value));
    };
    for (int64_t k = 0; k < a.k; ++k) {
      const double* q = &sums[k * (taps + 1)];
      const auto weight_at = [&](int64_t i) {
        return static_cast<double>(static_cast<acc_t<T>>(weight[k * taps + i]));
      };
      const double s1 = q[taps], rstd = filter_rstd[k];
      double wq = 0;
      for (int64_t i = 0; i < taps; ++i) wq += weight_at(i) * q[i];
      const double s2 = rstd * (wq - filter_mean[k] * s1);
      const double scale = param<P>(norm.gamma, k, 1) * rstd;
      for (int64_t i = 0; i < taps; ++i) {
        double grad = q[i];
        if (norm.training) {
          double cw = 0;
          for (int64_t j = 0; j < taps; ++j) cw += covariance[i * taps + j] * weight_at(j);
          grad -= s1 * mean[i] + s2 * rstd * cw;
        }
        store(dw, tag, k * taps + i, scale * grad);
      }
      store(dgamma, param_tag, k, s2);
      store(dbeta, param_tag, k, s1);
      // In training a bias before batch norm cancels.
      store(dbias, tag, k, norm.training ? 0.0 : scale * s1);
    }
  });
}

}  // namespace braze::cpu
