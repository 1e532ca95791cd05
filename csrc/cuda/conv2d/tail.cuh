// Conv2dTail as kernels take it.
#pragma once

#include <cmath>

#include "cuda/common/activate.cuh"
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
    return t;
  }

  // What a filter's results are multiplied by, and what is added then.
  __device__ __forceinline__ float2 coefficients(int filter) const {
    const LoadedValue gamma(weight, affine, filter, 1), beta(bias, affine, filter, 0);
    const LoadedValue center(mean, statistics, filter, 0), spread(var, statistics, filter, 1);
    const LoadedValue before(conv_bias, dtype, filter, 0);
    return coefficients(gamma.single(), beta.single(), center.single(), spread.single() + eps,
                        before.single());
  }
  static __device__ __forceinline__ float2 coefficients(float gamma, float beta, float mean,
                                                        float var_and_eps, float conv_bias) {
    const float scale = gamma * __frsqrt_rn(var_and_eps);
    return {scale, fmaf(conv_bias - mean, scale, beta)};
  }

  // v[i] = f(v[i]), of elements T.
  template <typename T, int N>
  __device__ __forceinline__ void activate(float (&v)[N]) const {
    if (kind == ActivationKind::kClamp) {
#pragma unroll
      for (float& x : v) x = bounded(x);
    } else if (kind == ActivationKind::kSiLU) {
      apply<T, ActivationCode::kSiLU>(v);
    } else if (kind == ActivationKind::kHardswish) {
      apply<T, ActivationCode::kHardswish>(v);
    } else {
      apply<T, ActivationCode::kGELU>(v);
    }
  }

  // clamped(x, low, high) in two instructions.
  __device__ __forceinline__ float bounded(float x) const {
#if __CUDA_ARCH__ >= 800
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(low));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(high));
#endif
    return x;
  }

 private:
  template <typename T, ActivationCode kCode, int N>
  static __device__ __forceinline__ void apply(float (&v)[N]) {
    Smooth<float, DeviceMath<T>>::with(inline_kind(kCode), [&](auto function, auto) {
#pragma unroll
      for (float& x : v) x = function(x, 0.0f, 0.0f);
    });
  }
};

}  // namespace braze::cuda
