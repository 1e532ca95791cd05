// Conv2dTail as kernels take it.
#pragma once

#include <cmath>

#include "cuda/common/activate.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/parameter.cuh"
#include "launchers/conv2d.h"

namespace braze::cuda {

// The kinds of activations whose code kernels of convolutions have inline: a call would have
// wgmmas wait for each other.
inline bool is_inline(const Activation& activation) {
  switch (activation.kind) {
    case ActivationKind::kClamp:
    case ActivationKind::kSiLU:
    case ActivationKind::kHardswish:
    case ActivationKind::kGELU: return true;
    default: return false;
  }
}

struct Tail {
  const void *weight, *bias, *mean, *var, *conv_bias;  // mean: nullptr where there is no tail
  DType affine, statistics, dtype;
  float eps;
  ActivationKind kind;
  float low, high;  // of a clamp
  bool in_vectors;  // whether find_coefficients() may load several channels' parameters at once

  // tail: may be nullptr. dtype: of the convolution.
  static Tail of(const Conv2dTail* tail, DType dtype) {
    Tail t{};
    if (!tail) return t;
    t.weight = tail->weight, t.bias = tail->bias, t.mean = tail->mean, t.var = tail->var;
    t.conv_bias = tail->conv_bias;
    t.affine = tail->affine, t.statistics = tail->statistics, t.dtype = dtype;
    t.eps = static_cast<float>(tail->eps);
    t.kind = tail->activation.kind;
    const auto bound = [](double given, float none) {
      return given == given ? static_cast<float>(given) : none;
    };
    t.low = bound(tail->activation.first, -INFINITY);
    t.high = bound(tail->activation.second, INFINITY);
    t.in_vectors = t.affine == DType::kFloat32 && t.statistics == DType::kFloat32 && !t.conv_bias;
    for (const void* vector : {t.weight, t.bias, t.mean, t.var}) {
      t.in_vectors = t.in_vectors && reinterpret_cast<uintptr_t>(vector) % 16 == 0;
    }
    return t;
  }

  // What a filter's results are multiplied by, and what is added then.
  __device__ __forceinline__ float2 coefficients(int filter) const {
    const LoadedValue gamma(weight, affine, filter, 1), beta(bias, affine, filter, 0);
    const LoadedValue center(mean, statistics, filter, 0), spread(var, statistics, filter, 1);
    const LoadedValue before(conv_bias, dtype, filter, 0);
    const float scale = gamma.single() * __frsqrt_rn(spread.single() + eps);
    return {scale, fmaf(before.single() - center.single(), scale, beta.single())};
  }

  // A channel's z becomes (z - center) * scale + shift, which is right far from 0 too.
  struct Coefficients {
    float center, scale, shift;

    __device__ __forceinline__ float operator()(float z) const {
      return fmaf(z - center, scale, shift);
    }
  };

  // Those of N channels from `channel`, a multiple of N, on. Loaded one by one they would wait for
  // memory again and again.
  template <int N>
  __device__ __forceinline__ void find_coefficients(int channel, Coefficients (&c)[N]) const {
    if (!in_vectors) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const LoadedValue gamma(weight, affine, channel + k, 1);
        const LoadedValue beta(bias, affine, channel + k, 0);
        const LoadedValue center(mean, statistics, channel + k, 0);
        const LoadedValue spread(var, statistics, channel + k, 1);
        const LoadedValue before(conv_bias, dtype, channel + k, 0);
        c[k] = {center.single() - before.single(),
                gamma.single() * __frsqrt_rn(spread.single() + eps), beta.single()};
      }
      return;
    }
    const Vec<float, N> gamma = loaded<N>(weight, channel, 1), beta = loaded<N>(bias, channel, 0);
    const Vec<float, N> center = loaded<N>(mean, channel, 0), spread = loaded<N>(var, channel, 1);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      c[k] = {center.v[k], gamma.v[k] * __frsqrt_rn(spread.v[k] + eps), beta.v[k]};
    }
  }

  // v[i] = f(v[i]), of elements T.
  template <typename T, int N>
  __device__ __forceinline__ void activate(float (&v)[N]) const {
    if (kind == ActivationKind::kClamp) {
#pragma unroll
      for (float& x : v) x = bounded(x, low, high);
    } else if (kind == ActivationKind::kSiLU) {
      apply<T, ActivationCode::kSiLU>(v);
    } else if (kind == ActivationKind::kHardswish) {
      apply<T, ActivationCode::kHardswish>(v);
    } else {
      apply<T, ActivationCode::kGELU>(v);
    }
  }

 private:
  // N values of a vector of channels; `otherwise` where there is none.
  template <int N>
  static __device__ __forceinline__ Vec<float, N> loaded(const void* vector, int channel,
                                                         float otherwise) {
    Vec<float, N> v;
#pragma unroll
    for (float& value : v.v) value = otherwise;
    if (vector) v = load_vec<N>(static_cast<const float*>(vector) + channel);
    return v;
  }

  template <typename T, ActivationCode kCode, int N>
  static __device__ __forceinline__ void apply(float (&v)[N]) {
    Smooth<float, DeviceMath<T>>::with(inline_kind(kCode), [&](auto function, auto) {
#pragma unroll
      for (float& x : v) x = function(x, 0.0f, 0.0f);
    });
  }
};

}  // namespace braze::cuda
