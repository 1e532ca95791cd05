#pragma once

#include "launchers/common/update.h"

namespace braze {

// square_avg, momentum_buffer if there is momentum, and grad_avg if centered
using RMSpropTensor = UpdateTensor<3>;

struct RMSpropOptions : UpdateOptions {
  double alpha;
  double eps;
  double weight_decay;
  double momentum;
};

// torch.optim.RMSprop's, of a gradient g that has its sign and scale:
//   g += weight_decay p,  v = alpha v + (1 - alpha) g^2,  centered: a += (1 - alpha) (g - a)
//   d = g / (sqrt(centered ? v - a^2 : v) + eps)
//   p -= lr (momentum ? m = momentum m + d : d)
// Tieleman and Hinton, Neural Networks for Machine Learning, lecture 6.5 (2012); centered: Graves,
// Generating Sequences With Recurrent Neural Networks (2013).
template <typename A>
struct RMSpropUpdate {
  static constexpr int kStates = 3;
  static constexpr unsigned kOptional = 6;
  static constexpr bool kCountsSteps = true;
  static constexpr bool kReadsStep = false;
  static constexpr bool kReadsParam = true;

  A lr, alpha, rest, eps, weight_decay, momentum;

  BRAZE_BOTH RMSpropUpdate(const RMSpropOptions& o, double)
      : alpha(static_cast<A>(o.alpha)),
        rest(static_cast<A>(1 - o.alpha)),
        eps(static_cast<A>(o.eps)),
        weight_decay(static_cast<A>(o.weight_decay)),
        momentum(static_cast<A>(o.momentum)) {}

  BRAZE_BOTH void set_rate(double rate) { lr = static_cast<A>(rate); }
  BRAZE_BOTH bool reads_states() const { return true; }

  BRAZE_BOTH void operator()(A& p, A g, A (&states)[kStates], unsigned has) const {
    g = weight_decay != A(0) ? multiply_add(weight_decay, p, g) : g;
    A v = multiply_add(alpha, states[0], rest * g * g);
    states[0] = v;
    if (has & 4) {
      const A a = lerp(states[2], g, rest);
      states[2] = a;
      v = multiply_add(-a, a, v);
    }
    g /= std::sqrt(v) + eps;
    if (has & 2) {
      g = multiply_add(momentum, states[1], g);
      states[1] = g;
    }
    p = multiply_add(-lr, g, p);
  }
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// RMSpropUpdate of `count` tensors of one dtype. 16-bit parameters are computed in float32 and
// rounded once.
void rmsprop(Stream stream, DType dtype, const RMSpropTensor* tensors, int64_t count,
             const RMSpropOptions& options);

}  // namespace braze::BRAZE_DEVICE
