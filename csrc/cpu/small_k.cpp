// small_k.h on the CPU. A vector's lanes are filters, so that every multiply-add takes a vector of
// weights and one broadcast input value; threads split the images.
#include "kernels/fused/small_k.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <vector>

#include "cpu/numeric.h"
#include "cpu/parallel.h"
#include "kernels/common/registry.h"

namespace braze::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename A>
struct Lanes {
  static constexpr int kCount = kVectorBytes / sizeof(A);
  typedef A Vector __attribute__((vector_size(kVectorBytes)));
  // Loads and stores of vectors that need no alignment.
  typedef A Unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(A))));
};

// One image with its zero padding, and where each filter tap reads in it.
template <typename A>
struct PaddedImage {
  explicit PaddedImage(const SmallKShape& a)
      : height(a.p + a.r - 1), pitch(a.q + a.s - 1), values(a.c * height * pitch) {
    for (int64_t c = 0; c < a.c; ++c) {
      for (int64_t r = 0; r < a.r; ++r) {
        for (int64_t s = 0; s < a.s; ++s) taps.push_back((c * height + r) * pitch + s);
      }
    }
  }

  template <typename T>
  void load(const SmallKShape& a, const T* x, int64_t n) {
    for (int64_t c = 0; c < a.c; ++c) {
      for (int64_t h = 0; h < std::min(a.h, height - a.pad_h); ++h) {
        const T* row = x + n * a.x_n + c * a.x_c + h * a.x_h;
        A* out = values.data() + (c * height + h + a.pad_h) * pitch + a.pad_w;
        const int64_t width = std::min(a.w, pitch - a.pad_w);
        for (int64_t w = 0; w < width; ++w) out[w] = static_cast<A>(row[w * a.x_w]);
      }
    }
  }

  int64_t height, pitch;
  std::vector<A> values;
  std::vector<int64_t> taps;
};

// Adds this thread's sums to the shared ones in the order of the ranges, whichever thread finishes
// first, so that the result does not depend on scheduling. (Ranges depend on the thread count.)
class OrderedSum {
 public:
  explicit OrderedSum(int64_t size) : size_(size) {}
  void add(int64_t range_begin, std::vector<double> sums) {
    const std::lock_guard<std::mutex> lock(mutex_);
    parts_.emplace_back(range_begin, std::move(sums));
  }
  std::vector<double> total() {
    std::sort(parts_.begin(), parts_.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<double> sum(size_);
    for (const auto& part : parts_) {
      for (int64_t i = 0; i < size_; ++i) sum[i] += part.second[i];
    }
    return sum;
  }

 private:
  int64_t size_;
  std::mutex mutex_;
  std::vector<std::pair<int64_t, std::vector<double>>> parts_;
};

// Sums of p_i and p_i p_j (j >= i) over all patches.
template <typename T>
std::vector<double> moments(const SmallKShape& a, const T* x) {
  using V = Lanes<double>::Vector;
  using U = Lanes<double>::Unaligned;
  constexpr int64_t kLanes = Lanes<double>::kCount;
  const int64_t taps = a.c * a.r * a.s, size = taps + taps * (taps + 1) / 2;
  OrderedSum result(size);
  parallel_for(0, a.n, 8, [&](int64_t first, int64_t last) {
    PaddedImage<double> image(a);
    std::vector<double> sums(size);
    for (int64_t n = first; n < last; ++n) {
      image.load(a, x, n);
      const auto row_sum = [&](int64_t i, auto&& term) {
        V vector_sum{};
        double tail = 0;
        for (int64_t p = 0; p < a.p; ++p) {
          const int64_t row = image.taps[i] + p * image.pitch;
          int64_t q = 0;
          for (; q + kLanes <= a.q; q += kLanes) {
            vector_sum += term(*reinterpret_cast<const U*>(&image.values[row + q]), row + q);
          }
          for (; q < a.q; ++q) tail += term(image.values[row + q], row + q);
        }
        for (int64_t l = 0; l < kLanes; ++l) tail += vector_sum[l];
        return tail;
      };
      int64_t pair = taps;
      for (int64_t i = 0; i < taps; ++i) {
        sums[i] += row_sum(i, [](auto v, int64_t) { return v; });
        for (int64_t j = i; j < taps; ++j) {
          const double* other = image.values.data() + (image.taps[j] - image.taps[i]);
          sums[pair++] += row_sum(i, [&](auto v, int64_t at) {
            using Value = decltype(v);
            if constexpr (sizeof(Value) == sizeof(double)) {
              return v * other[at];
            } else {
              return v * *reinterpret_cast<const U*>(other + at);
            }
          });
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
void finalize(const SmallKShape& a, const SmallKNorm& norm, const T* x, const T* w, double* saved) {
  const int64_t taps = a.c * a.r * a.s;
  const double count = static_cast<double>(a.n * a.p * a.q);
  double* mean = saved;
  double* covariance = saved + taps;
  double* filter_mean = covariance + taps * taps;
  double* filter_rstd = filter_mean + a.k;
  double factor = norm.momentum;
  if (norm.training) {
    const std::vector<double> sums = moments(a, x);
    for (int64_t i = 0; i < taps; ++i) mean[i] = sums[i] / count;
    int64_t pair = taps;
    for (int64_t i = 0; i < taps; ++i) {
      for (int64_t j = i; j < taps; ++j) {
        const double value = sums[pair++] / count - mean[i] * mean[j];
        covariance[i * taps + j] = covariance[j * taps + i] = value;
      }
    }
    if (norm.batches) *norm.batches += 1;
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

// Convolution, normalisation, ReLU and pooling of one image's pooled row `p` for the filters of one
// vector: values and codes, lane by lane.
template <typename A>
struct PooledPixel {
  using V = typename Lanes<A>::Vector;
  V best;
  decltype(V{} > V{}) code;

  PooledPixel(const PaddedImage<A>& image, int64_t offset, const V* weights, V scale, V shift) {
    V z0{}, z1{}, z2{}, z3{};
    const A* origin = image.values.data() + offset;
    for (size_t t = 0; t < image.taps.size(); ++t) {
      const A* at = origin + image.taps[t];
      z0 += weights[t] * at[0];
      z1 += weights[t] * at[1];
      z2 += weights[t] * at[image.pitch];
      z3 += weights[t] * at[image.pitch + 1];
    }
    best = z0 * scale + shift;
    code = decltype(code){};
    const V others[3] = {z1 * scale + shift, z2 * scale + shift, z3 * scale + shift};
    for (int i = 0; i < 3; ++i) {
      // torch's rule: the first maximum wins, and NaN beats every number.
      const auto wins = (others[i] > best) | ((others[i] != others[i]) & (best == best));
      best = wins ? others[i] : best;
      code = wins ? decltype(code){} + (i + 1) : code;
    }
    const auto dead = best <= V{};
    best = dead ? V{} : best;
    code = dead ? decltype(code){} + 4 : code;
  }
};

template <typename T>
void forward(const SmallKShape& a, const T* x, const T* w, const double* scale_shift, T* y,
             uint32_t* codes) {
  using A = acc_t<T>;
  using V = typename Lanes<A>::Vector;
  constexpr int64_t kLanes = Lanes<A>::kCount;
  const int64_t taps = a.c * a.r * a.s, vectors = ceil_div(a.k, kLanes);
  const int64_t pooled_h = a.p / 2, pooled_w = a.q / 2, plane = pooled_h * pooled_w;
  const int64_t k_words = ceil_div(a.k, 8);
  // Weights by tap with filters in the lanes; lanes beyond the last filter hold zeros.
  std::vector<V> weights(vectors * taps), scale(vectors), shift(vectors);
  for (int64_t k = 0; k < a.k; ++k) {
    const int64_t v = k / kLanes, lane = k % kLanes;
    for (int64_t t = 0; t < taps; ++t) {
      weights[v * taps + t][lane] = static_cast<A>(w[k * taps + t]);
    }
    scale[v][lane] = static_cast<A>(scale_shift[2 * k]);
    shift[v][lane] = static_cast<A>(scale_shift[2 * k + 1]);
  }
  parallel_for(0, a.n, 2, [&](int64_t first, int64_t last) {
    PaddedImage<A> image(a);
    std::vector<T> row(pooled_w * a.k);
    std::vector<uint8_t> row_codes(k_words * 8);
    for (int64_t n = first; n < last; ++n) {
      image.load(a, x, n);
      for (int64_t p = 0; p < pooled_h; ++p) {
        T* out = a.channels_last ? y + (n * plane + p * pooled_w) * a.k : row.data();
        for (int64_t q = 0; q < pooled_w; ++q) {
          for (int64_t v = 0; v < vectors; ++v) {
            const PooledPixel<A> pixel(image, 2 * p * image.pitch + 2 * q, &weights[v * taps],
                                       scale[v], shift[v]);
            const int64_t lanes = std::min(kLanes, a.k - v * kLanes);
            for (int64_t l = 0; l < lanes; ++l) out[q * a.k + v * kLanes + l] = T(pixel.best[l]);
            for (int64_t l = 0; l < lanes; ++l) {
              row_codes[v * kLanes + l] = static_cast<uint8_t>(pixel.code[l]);
            }
          }
          uint32_t* words = codes + (n * plane + p * pooled_w + q) * k_words;
          for (int64_t i = 0; i < k_words; ++i) {
            uint32_t word = 0;
            for (int j = 0; j < 8; ++j) word |= uint32_t{row_codes[i * 8 + j]} << (4 * j);
            words[i] = word;
          }
        }
        if (!a.channels_last) {
          for (int64_t k = 0; k < a.k; ++k) {
            T* to = y + (n * a.k + k) * plane + p * pooled_w;
            for (int64_t q = 0; q < pooled_w; ++q) to[q] = row[q * a.k + k];
          }
        }
      }
    }
  });
}

// Q [k][taps] and S1 [k] of small_k.h: per pooled row in T's accumulation type, in total in fp64.
template <typename T>
std::vector<double> gradient_sums(const SmallKShape& a, const T* x, const T* dy,
                                  const uint32_t* codes) {
  using A = acc_t<T>;
  using V = typename Lanes<A>::Vector;
  constexpr int64_t kLanes = Lanes<A>::kCount;
  const int64_t taps = a.c * a.r * a.s, vectors = ceil_div(a.k, kLanes);
  const int64_t pooled_h = a.p / 2, pooled_w = a.q / 2, plane = pooled_h * pooled_w;
  const int64_t k_words = ceil_div(a.k, 8);
  const int64_t size = a.k * (taps + 1);
  OrderedSum result(size);
  parallel_for(0, a.n, 2, [&](int64_t first, int64_t last) {
    PaddedImage<A> image(a);
    std::vector<double> total(size);
    // The row's gradient by window position: zero in the three positions that lost.
    std::vector<V> grads(pooled_w * 4), sums(taps + 1);
    for (int64_t n = first; n < last; ++n) {
      image.load(a, x, n);
      for (int64_t p = 0; p < pooled_h; ++p) {
        for (int64_t v = 0; v < vectors; ++v) {
          const int64_t lanes = std::min(kLanes, a.k - v * kLanes);
          std::fill(grads.begin(), grads.end(), V{});
          for (int64_t q = 0; q < pooled_w; ++q) {
            const int64_t in_plane = p * pooled_w + q;
            const uint32_t* words = codes + (n * plane + in_plane) * k_words;
            for (int64_t l = 0; l < lanes; ++l) {
              const int64_t k = v * kLanes + l;
              const uint32_t code = words[k / 8] >> (4 * (k % 8)) & 7;
              if (code == 4) continue;
              grads[q * 4 + code][l] =
                  static_cast<A>(a.channels_last ? dy[(n * plane + in_plane) * a.k + k]
                                                 : dy[(n * a.k + k) * plane + in_plane]);
            }
          }
          V s1{};
          for (const V& g : grads) s1 += g;
          sums[taps] = s1;
          for (int64_t t = 0; t < taps; ++t) {
            V sum{};
            const A* at = image.values.data() + 2 * p * image.pitch + image.taps[t];
            for (int64_t q = 0; q < pooled_w; ++q) {
              sum += grads[q * 4] * at[2 * q];
              sum += grads[q * 4 + 1] * at[2 * q + 1];
              sum += grads[q * 4 + 2] * at[2 * q + image.pitch];
              sum += grads[q * 4 + 3] * at[2 * q + image.pitch + 1];
            }
            sums[t] = sum;
          }
          for (int64_t t = 0; t <= taps; ++t) {
            for (int64_t l = 0; l < lanes; ++l) {
              total[(v * kLanes + l) * (taps + 1) + t] += static_cast<double>(sums[t][l]);
            }
          }
        }
      }
    }
    result.add(first, std::move(total));
  });
  return result.total();
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

int64_t small_k_workspace_bytes(const SmallKShape&) { return 0; }

void small_k_forward(Stream, const SmallKShape& a, const SmallKNorm& norm, const void* x,
                     const void* w, void* y, uint32_t* codes, double* saved, void*) {
  dispatch_params(a.dtype, norm.param_dtype, [&](auto tag, auto param_tag) {
    using T = typename decltype(tag)::type;
    using P = typename decltype(param_tag)::type;
    const T* in = static_cast<const T*>(x);
    const T* weight = static_cast<const T*>(w);
    finalize<T, P>(a, norm, in, weight, saved);
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
