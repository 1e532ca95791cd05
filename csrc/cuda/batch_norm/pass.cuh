// What both layouts' kernels share: the arguments of the passes, and the arithmetic on one vector
// of N elements with their channels' coefficients C: C[k] is that of element k.
//
// Bytes per element of a 16-bit tensor, a residual and its gradient included where there is one:
//   moments               2: x
//   apply                 4: x, y                     + residual: 6 1/8: x, residual, y, mask
//   gradient sums         4: dy, x                    + residual: 6 1/8: dy, x, mask, dresidual
//   input gradient        6: dy, x, dx                + residual: 6: dresidual, x, dx
// The mask has a bit for each element and is for clamps (ReLU, ReLU6) alone. For other activations
// with a residual, the sums' pass reads the residual, so that v is made again: 8. Without a
// residual v follows from x. The result y, which the mask replaces, would have 16 times the bytes.
#pragma once

#include "channel.cuh"
#include "cuda/common/activate.cuh"

namespace braze::cuda {

template <typename T>
struct ApplyArgs {
  const T* x;
  const T* residual;  // or nullptr
  T* y;
  uint8_t* mask;  // a byte per vector, or nullptr
  BatchNormStatistics statistics;
  ActivationArgs<acc_t<T>> activation;
};

// First pass: sums of the gradient before the activation and residual, and of it times x - mean.
template <typename T>
struct GradSumsArgs {
  const T* dy;
  const T* x;
  const T* residual;    // read for smooth activations; or nullptr
  const uint8_t* mask;  // in the place of the value before a clamp; or nullptr
  T* dresidual;         // the gradient before the activation, or nullptr: not kept
  BatchNormStatistics statistics;
  ActivationArgs<acc_t<T>> activation;
};

// Second pass; dy is dresidual where there is one, and the activation then the identity.
template <typename T>
struct InputGradArgs {
  const T* dy;
  const T* x;  // nullptr where dx does not depend on it
  T* dx;
  bool training;
  BatchNormStatistics statistics;
  GradCoefficients<acc_t<T>> coefficients;
  ActivationArgs<acc_t<T>> activation;
};

// Coefficients of N neighbouring channels, or of one channel for all N.
template <typename A, int N, bool kSame>
struct PerElement {
  A v[kSame ? 1 : N];

  PerElement() = default;
  // Where there are none: zeros.
  __device__ __forceinline__ PerElement(const void* values, int64_t channel) {
    const A* from = static_cast<const A*>(values) + channel;
    if constexpr (kSame) {
      v[0] = values ? *from : A(0);
    } else {
      Vec<A, N> loaded{};
      if (values) loaded = load_vec<N>(from);
#pragma unroll
      for (int k = 0; k < N; ++k) v[k] = loaded.v[k];
    }
  }
  __device__ __forceinline__ const A& operator[](int k) const { return v[kSame ? 0 : k]; }
};

// The value before the activation, made alike in the forward and the backward pass.
template <typename A>
__device__ __forceinline__ A normalized(A deviation, A scale, A shift) {
  return deviation * scale + shift;
}

// y and the mask of a vector at `offset`.
template <ActivationCode kCode, typename T, int N, typename C>
__device__ __forceinline__ void apply_vector(const ApplyArgs<T>& args, int64_t offset,
                                             const Packed<T, N>& packed_x,
                                             const Packed<T, N>& packed_residual, const C& center,
                                             const C& scale, const C& shift) {
  using A = acc_t<T>;
  A v[N];
  unpack(packed_x, v);
#pragma unroll
  for (int k = 0; k < N; ++k) v[k] = normalized(v[k] - center[k], scale[k], shift[k]);
  if (args.residual) {
    A residual[N];
    unpack(packed_residual, residual);
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] += residual[k];
  }
  if (kCode == ActivationCode::kClamp && args.mask)
    args.mask[offset / N] = open_bits(v, args.activation);
  activate<kCode, T>(v, args.activation);
  store_as(args.y + offset, v);
}

// Adds a vector's part to the sums. keep(g): the gradient before the activation, where it is kept.
template <ActivationCode kCode, typename T, int N, typename C, typename Keep, typename Add>
__device__ __forceinline__ void sum_vector(const GradSumsArgs<T>& args,
                                           const Packed<T, N>& packed_dy,
                                           const Packed<T, N>& packed_x,
                                           const Packed<T, N>& packed_residual, uint8_t open,
                                           const C& center, const C& scale, const C& shift,
                                           const Keep& keep, const Add& add) {
  using A = acc_t<T>;
  A g[N], deviation[N];
  unpack(packed_dy, g);
  unpack(packed_x, deviation);
#pragma unroll
  for (int k = 0; k < N; ++k) deviation[k] -= center[k];
  if (kCode == ActivationCode::kClamp && args.mask) {
    pass_back(g, open);
  } else {
    A v[N];
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = normalized(deviation[k], scale[k], shift[k]);
    if (args.residual) {
      A residual[N];
      unpack(packed_residual, residual);
#pragma unroll
      for (int k = 0; k < N; ++k) v[k] += residual[k];
    }
    pass_back<kCode, T>(g, v, args.activation);
  }
  if (args.dresidual) {
    Vec<T, N> kept;
#pragma unroll
    for (int k = 0; k < N; ++k) kept.v[k] = convert<T>(g[k]);
    keep(kept);
  }
#pragma unroll
  for (int k = 0; k < N; ++k) add(k, g[k], g[k] * deviation[k]);
}

// dx of a vector. by_grad is scale where an activation has to be passed.
template <ActivationCode kCode, typename T, int N, typename C>
__device__ __forceinline__ void input_grad_vector(const InputGradArgs<T>& args, int64_t offset,
                                                  const Packed<T, N>& packed_dy,
                                                  const Packed<T, N>& packed_x, const C& center,
                                                  const C& by_grad, const C& shift,
                                                  const C& by_input, const C& constant) {
  using A = acc_t<T>;
  A g[N], deviation[N];
  unpack(packed_dy, g);
  unpack(packed_x, deviation);
#pragma unroll
  for (int k = 0; k < N; ++k) deviation[k] -= center[k];
  if (args.x) {
    A v[N];
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = normalized(deviation[k], by_grad[k], shift[k]);
    pass_back<kCode, T>(g, v, args.activation);
  }
  Vec<T, N> dx;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    A result = g[k] * by_grad[k];
    // dx = dy * by_grad + x * by_input + offset would cancel where the mean is large.
    if (args.training) result += deviation[k] * by_input[k] + constant[k];
    dx.v[k] = convert<T>(result);
  }
  store_vec(args.dx + offset, dx);
}

// The same of a gradient that may have been kept before the activation: that is not passed then.
template <ActivationCode kCode, typename T, int N, typename C>
__device__ __forceinline__ void kept_input_grad_vector(
    bool kept, const InputGradArgs<T>& args, int64_t offset, const Packed<T, N>& packed_dy,
    const Packed<T, N>& packed_x, const C& center, const C& by_grad, const C& shift,
    const C& by_input, const C& constant) {
  const auto store = [&](auto code) {
    input_grad_vector<decltype(code)::value>(args, offset, packed_dy, packed_x, center, by_grad,
                                             shift, by_input, constant);
  };
  if (kCode != ActivationCode::kClamp && kept) {
    store(std::integral_constant<ActivationCode, ActivationCode::kClamp>{});
  } else {
    store(std::integral_constant<ActivationCode, kCode>{});
  }
}

}  // namespace braze::cuda
