#pragma once

#include "launchers/common/update.h"

namespace braze {

using AdamTensor = UpdateTensor<3>;  // exp_avg, exp_avg_sq, and max_exp_avg_sq with AMSGrad

struct AdamOptions : UpdateOptions {
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool decoupled;  // weight decay by itself (AdamW) and not as a part of the gradient
};

// torch.optim.Adam's and AdamW's, of a gradient g that has its sign and scale, at step t:
//   decoupled ? p *= 1 - lr weight_decay : g += weight_decay p
//   m += (1 - beta1) (g - m),  v = beta2 v + (1 - beta2) g^2,  u = AMSGrad ? max(u, v) : v
//   p -= lr / (1 - beta1^t) m / (sqrt(u) / sqrt(1 - beta2^t) + eps)
// Kingma and Ba, Adam: A Method for Stochastic Optimization (2015); Reddi, Kale and Kumar, On the
// Convergence of Adam and Beyond (2018); Loshchilov and Hutter, Decoupled Weight Decay
// Regularization (2019).
template <typename A>
struct AdamUpdate {
  static constexpr int kStates = 3;
  static constexpr unsigned kOptional = 4;
  static constexpr bool kCountsSteps = true;
  static constexpr bool kReadsStep = true;
  static constexpr bool kReadsParam = true;

  double bias1, decay;
  A step_size, shrink, rest1, beta2, rest2, root_bias2, eps, coupled;

  BRAZE_BOTH AdamUpdate(const AdamOptions& o, double step)
      : bias1(1 - std::pow(o.beta1, step)),
        decay(o.decoupled ? o.weight_decay : 0),
        rest1(static_cast<A>(1 - o.beta1)),
        beta2(static_cast<A>(o.beta2)),
        rest2(static_cast<A>(1 - o.beta2)),
        root_bias2(static_cast<A>(std::sqrt(1 - std::pow(o.beta2, step)))),
        eps(static_cast<A>(o.eps)),
        coupled(static_cast<A>(o.decoupled ? 0 : o.weight_decay)) {}

  BRAZE_BOTH void set_rate(double lr) {
    step_size = static_cast<A>(lr / bias1);
    shrink = static_cast<A>(1 - lr * decay);
  }
  BRAZE_BOTH bool reads_states() const { return true; }

  BRAZE_BOTH void operator()(A& p, A g, A (&states)[kStates], unsigned has) const {
    p *= shrink;
    g = coupled != A(0) ? multiply_add(coupled, p, g) : g;
    const A m = lerp(states[0], g, rest1);
    const A v = multiply_add(beta2, states[1], rest2 * g * g);
    states[0] = m;
    states[1] = v;
    A u = v;
    if (has & 4) {
      u = states[2] > v || states[2] != states[2] ? states[2] : v;
      states[2] = u;
    }
    p = multiply_add(-step_size, m / (std::sqrt(u) / root_bias2 + eps), p);
  }
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// AdamUpdate of `count` tensors of one dtype. 16-bit parameters are computed in float32 and rounded
// once.
void adam(Stream stream, DType dtype, const AdamTensor* tensors, int64_t count,
          const AdamOptions& options);

}  // namespace braze::BRAZE_DEVICE
