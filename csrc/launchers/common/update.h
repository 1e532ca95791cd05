// What the optimizers share: one pass over the gradients, the parameters and what is kept for them.
//
// An optimizer has a launcher <name>(stream, dtype, tensors, count, options) and, for its
// arithmetic, a class template of the accumulation type that both devices compile:
//
//   struct Update {
//     static constexpr int kStates;          // tensors kept for a parameter, at most
//     static constexpr unsigned kOptional;   // bit i: state i may be missing
//     static constexpr bool kCountsSteps;    // tensors have a count of steps
//     static constexpr bool kReadsStep;      // which the arithmetic depends on
//     Update(const Options&, double step);   // step: the number of this one, from 1 on
//     void set_rate(double lr);
//     bool reads_states() const;             // else they are written only
//     // New values of a parameter and its states; bit i of `has`: there is state i.
//     void operator()(A& param, A grad, A (&states)[kStates], unsigned has) const;
//   };
#pragma once

#include <cmath>

#include "launchers/common/both.h"
#include "launchers/common/types.h"

namespace braze {

// A parameter with its gradient and states (null where the update has none), all of `numel`
// elements in the same order in memory. Where there is a `source`, of another dtype, the gradient
// is cast from it first; it need not be kept then.
template <int kCount>
struct UpdateTensor {
  static constexpr int kStates = kCount;
  void* param;
  void* grad;  // written where there is a source; null where nobody is to have it then
  void* states[kCount];
  const void* source;
  void* average;  // moving average of the parameter; or null
  float* step;    // how many steps there were, which becomes one more; or null
  int64_t numel;

  BRAZE_BOTH unsigned has() const {
    unsigned bits = 0;
    for (int i = 0; i < kCount; ++i) bits |= states[i] != nullptr ? 1u << i : 0u;
    return bits;
  }
};

struct UpdateOptions {
  double lr;
  const void* lr_tensor;  // one element, read by the kernel in place of lr; or null
  bool lr_is_double;      // lr_tensor is float64, else float32
  bool maximize;
  const float* grad_scale;  // gradients are multiplied by its reciprocal; or null
  const float* found_inf;   // where it is not 0, only averages are written; or null
  const double*
      grad_norm;  // of the gradients so multiplied, brought down to max_grad_norm; or null
  double max_grad_norm;
  DType source_dtype;     // of all sources
  double average_weight;  // of the new parameter in its average
  int64_t* averaged;      // how many averages were taken, which becomes one more; or null
  unsigned* tickets;      // on a GPU: kTickets zeros, and zeros again afterwards; for steps
};

// As many as tensors fit into the 32 KB of kernel parameters.
constexpr int kTickets = 1024;

// By what gradients are multiplied before anything else. Clipping as
// torch.nn.utils.clip_grad_norm_.
template <typename A>
BRAZE_BOTH A gradient_factor(const UpdateOptions& o) {
  A factor = o.grad_scale == nullptr ? A(1) : A(1) / static_cast<A>(*o.grad_scale);
  if (o.grad_norm != nullptr) {
    const double clip = o.max_grad_norm / (*o.grad_norm + 1e-6);
    factor *= static_cast<A>(clip > 1 ? 1 : clip);  // NaN stays
  }
  return o.maximize ? -factor : factor;
}

// a b + c. On a GPU always in one rounding: a compiler that is left to choose which products it
// fuses with which sums chooses by the code around them, and an update with a cast in its launch
// has to give the same bits as one without.
template <typename A>
BRAZE_BOTH A multiply_add(A a, A b, A c) {
#ifdef __CUDA_ARCH__
  return fma(a, b, c);
#else
  return a * b + c;
#endif
}

// A gradient times gradient_factor(), for the same reason never fused with what follows.
template <typename A>
BRAZE_BOTH A scaled(A grad, A factor) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(A) == sizeof(float)) return __fmul_rn(grad, factor);
  return __dmul_rn(grad, factor);
#else
  return grad * factor;
#endif
}

// torch.lerp
template <typename A>
BRAZE_BOTH A lerp(A from, A to, A weight) {
  return weight < A(0.5) ? multiply_add(weight, to - from, from)
                         : multiply_add(from - to, A(1) - weight, to);
}

// An average of which `value` becomes a part: torch.optim.swa_utils, whose first one is a copy.
template <typename A>
BRAZE_BOTH A averaged_with(A average, A value, A weight) {
  return weight == A(1) ? value : lerp(average, value, weight);
}

}  // namespace braze
